"""What the tests of CUDA graphs share: routers on a player of recordings (`tests.gpu.fake_graphs`), and a small net."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch

from autofuse.codegen.triton.source import Argument, Pass, TritonSource
from autofuse.gpu import capturing
from autofuse.gpu.modules import load_artifact
from autofuse.runtime.graphs import injector
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.replays import inputs as replay_inputs
from autofuse.runtime.replays.plan_replay import PlanReplay
from autofuse.runtime.replays.replays import Replays
from autofuse.settings.groups import ReplaySettings
from autofuse.wrapper import node_call
from tests.gpu.fake_driver import artifact_of, fake_driver
from tests.gpu.fake_graphs import Player
from tests.runtime.graphs.test_gpu_graphs import GPU, planned
from tests.runtime.graphs.test_routed_graphs import Undecided

AFTER = 4
SLOW, FAST = 1e-4, 2e-5  # seconds


class Kernels(Undecided):
    """Every node of a GPU has a kernel."""

    def __init__(self, driver):
        super().__init__()
        self.driver, self.forms, self.version, self.known = driver, {}, 0, True

    def learn(self, program):
        for slot in program.slots:
            self.forms[slot.node.fusion_id] = slot.node.form

    def choose(self, fusion_id, values, device):
        if not self.known:
            return UNKNOWN
        form = self.forms[fusion_id]
        count = len(form.inputs) + len(form.outputs)
        arguments = tuple(Argument(f"p{i}", "param", "*fp32", i) for i in range(count))
        name = f"af_{fusion_id[:12]}_{self.version}"
        source = TritonSource(name, "", (Pass(name, arguments, (), ((128, 64),)),), (), (), 4, 1)
        return Choice(True, load_artifact(artifact_of(source), 0, driver=self.driver.driver), name)


class Times:
    """A timer that says what it was told."""

    def __init__(self, seconds):
        self.seconds, self.waiting, self.open = seconds, [], False

    def start(self):
        self.open = True

    def stop(self):
        assert self.open
        self.waiting.append(self.seconds)
        self.open = False

    def poll(self):
        found, self.waiting = self.waiting, []
        return found


class Bench:
    """Routers on a player."""

    def __init__(self, monkeypatch):
        self.driver = fake_driver()
        self.driver.forget()
        self.player = player = Player(self.driver)
        self.kernels = Kernels(self.driver)
        self.refusals, self.failures, self.disturbed = [], [], 0
        self.seconds = [SLOW, FAST]  # of launches one by one, of replays
        self._timers = 0
        real = node_call.make_device_launcher

        def make(form, loaded, values, allocate=None, failed=None, calls=None, launch=None):
            launcher = player.launcher(form, tuple(values))
            with monkeypatch.context() as patch:
                patch.setattr(node_call, "launch_of", launcher)
                return real(form, loaded, values, allocate, failed, player.torch_calls())

        monkeypatch.setattr(node_call, "make_device_launcher", make)
        monkeypatch.setattr(node_call, "is_capturing", player.is_capturing)
        monkeypatch.setattr(capturing, "is_capturing", player.is_capturing)
        monkeypatch.setattr(replay_inputs, "ALIGNMENT", 64)
        checked = injector.layout_problem
        monkeypatch.setattr(injector, "layout_problem", lambda *args: checked(*args[:-1], torch.device("cpu")))
        self.replays = self.session()

    def session(self, **settings):
        """Also replaces the present one."""
        self.replays = Replays(
            ReplaySettings(enabled=True, after=AFTER, **settings),
            0.03,
            self.player.calls(),
            self.refusals.append,
            lambda kind, what, error: self.failures.append((kind, what, error)),
            self.disturb,
        )
        return self.replays

    def disturb(self):
        self.disturbed += 1

    def timer(self, device):
        self._timers += 1
        return Times(self.seconds[1 - self._timers % 2])

    def router(self, function, *examples, phase="inference"):
        _, program = planned(function, *[GPU] * len(examples), shapes=[tuple(x.shape) for x in examples])
        self.kernels.learn(program)
        replay = partial(PlanReplay, self.replays, self.timer)
        return GraphRouter(program, self.kernels, phase, perf_counter, self.timer, 1, replay)

    @property
    def codes(self):
        return [refusal.code for refusal in self.refusals]


def net(x, w, b):
    """Products with fused nodes between them."""
    hidden = (x @ w + b).relu() * 2.0
    out = (hidden @ w - x).tanh() + b
    return out, hidden.sum(-1) * 0.5 + 1.0


def inputs(seed, rows=8, width=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator)


def weights(width=16):
    return torch.nn.Parameter(inputs(100, width, width) / 4), torch.nn.Parameter(inputs(101, 1, width)[0].clone())


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)


UNTIL_KEPT = 60  # calls


def settle(router, make, expected, calls=UNTIL_KEPT):
    """Call until a replay is kept, or nothing more changes; each call is checked."""
    for seed in range(calls):
        args = make(seed)
        want = expected(*args)
        same(router([*args]), want)


def one_by_one(bench, function, *examples):
    """The same graph on the same kernels, never replayed."""
    _, program = planned(function, *[GPU] * len(examples), shapes=[tuple(x.shape) for x in examples])
    bench.kernels.learn(program)
    router = GraphRouter(program, bench.kernels, "inference", perf_counter)
    return lambda *args: router([*args])


def replayed(bench, call):
    """Whether a call was, and its result."""
    before = bench.player.replays
    found = call()
    return bench.player.replays > before, found
