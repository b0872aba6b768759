"""A root whose every call has a size of its own: its steps are compared with those of nearly the same size."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from autofuse.ir.records import RootRecord, StepSample
from autofuse.ir.steps import MAX_SIZE_RATIO, PAIR_STEPS, PAIR_WINDOW, at_size, is_close
from autofuse.observer import observer as observer_module
from autofuse.observer.capture_policy import CaptureAdvice
from autofuse.observer.release_policy import CLEAR_PAIRS
from autofuse.observer.signatures import call_signature, count_elements, training_signature, without_sizes
from autofuse.report import wording
from autofuse.report.statistics import measure_gain
from autofuse.runtime.roots import root as root_module
from autofuse.runtime.roots.graph_trial import MAX_EXACT, PAIRED
from autofuse.runtime.roots.root import elements_of
from autofuse.runtime.roots.services import RootTools
from autofuse.runtime.roots.steps import RanPlans, Sizes, TimedStep
from autofuse.runtime.roots.unwatched import SHORT_SHARE, WATCHED_AT_FIRST, WATCHING_SHARE
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from tests.runtime.fake_capturer import fake_capturer


def test_signatures_of_other_sizes_are_one_without_them() -> None:
    def signature(batch: int, length: int) -> Any:
        return call_signature((torch.empty(batch, length), 3), {"masks": [torch.empty(length, dtype=torch.bool)]})

    assert without_sizes(signature(2, 5)) == without_sizes(signature(3, 7)) != without_sizes(signature(2, 5)[:1])
    assert count_elements(signature(2, 5)) == 15
    assert count_elements(call_signature((torch.empty(0, 4),), {})) == 1
    assert wording.signature(str((without_sizes(signature(2, 5)), False, False))) == "*×* * eval no_grad"
    needed = training_signature((torch.empty(2, 5), torch.empty(8, 256, requires_grad=True)), {})
    assert wording.signature(str((without_sizes(needed), True, True))) == "*×* *×* requires_grad"
    assert count_elements(needed) == 2058


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_close_sizes_are_close_both_ways_and_scale_there_and_back(one: int, other: int) -> None:
    assert is_close(one, other) is is_close(other, one)
    assert is_close(one, other) is (max(one, other) / min(one, other) <= MAX_SIZE_RATIO)
    assert at_size(at_size(80.0, one, other), other, one) == pytest.approx(80.0)
    assert at_size(80.0, one, one) == 80.0


def test_near_are_the_last_steps_of_about_the_size() -> None:
    sizes = Sizes("many", is_one=False)
    sizes.recent.extend([(100, 10.0), (120, 12.0), (200, 1.0), (80, 16.0), *[(1000, 5.0)] * PAIR_STEPS])
    assert sizes.near(100) == [20.0, 10.0, 10.0]
    assert sizes.near(1000) == [5.0] * PAIR_STEPS
    assert sizes.near(400) == []


Cost = Callable[[int], float]  # us of a call of so many elements


class Bench:
    """A root whose calls take what they are said to take, by a clock that nothing else moves."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, eager: Cost, captured: Cost, **more: str) -> None:
        environment = {"AUTOFUSE_STORE": str(folder / "s.sqlite3"), "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1"}
        self.eager_calls: list[int] = []  # their elements
        self.captured_calls: list[int] = []
        self.clock = clock = [0.0]

        def run(cost: Cost, calls: list[int], x: torch.Tensor) -> torch.Tensor:
            clock[0] += cost(x.numel()) / 1e6
            calls.append(x.numel())
            return x

        self.run_captured = lambda x: run(captured, self.captured_calls, x)
        capturer = fake_capturer(lambda module, x: self.run_captured(x))
        self.traced: Any = capturer.compile_root(nn.Identity())  # type: ignore[call-arg]
        tools = RootTools(clock=lambda: clock[0], load_capturer=lambda: capturer)
        self.roots = make_session(load(environ=environment | more), "test", tools=tools).roots
        self.model = nn.Identity()
        self.root = self.roots.root_of(self.model)
        patch.setattr(
            self.roots.tracker, "call_original", lambda module, args, kwargs: run(eager, self.eager_calls, *args)
        )
        self.version = 0  # of the plans that run
        patch.setattr(
            self.roots.context, "plans_since_mark", lambda whose: RanPlans(3, frozenset({(1, self.version, False)}))
        )
        patch.setattr(self.roots.tracker, "is_installed", True)

    def call(self, sizes: Iterable[int]) -> None:
        self.eager_calls.clear()
        self.captured_calls.clear()
        with torch.no_grad():
            for size in sizes:
                self.root.call(self.model, (torch.empty(size),), {})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def one(*costs: Cost, **more: str) -> Bench:
        made.append(Bench(tmp_path, monkeypatch, *costs, **more))
        return made[-1]

    yield one
    for bench in made:
        bench.roots.uninstall()


NEVER = {"AUTOFUSE_CAPTURE_MAX_SLOWDOWN": "1.0"}  # is anything captured
UNSAMPLED = {**NEVER, "AUTOFUSE_OBSERVE_ENABLED": "false"}  # and no step is sampled


def test_of_short_calls_in_eager_few_are_watched_and_all_are_counted(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(lambda n: 1000.0, lambda n: 500.0, **UNSAMPLED)
    root, observer, watched, described = bench.root, bench.roots.observer, [], []
    before = observer.before_root_call
    monkeypatch.setattr(observer, "before_root_call", lambda *a: watched.append(root.calls) or before(*a))
    for module in (root_module, observer_module):
        monkeypatch.setattr(module, "call_signature", lambda *a: described.append(root.calls) or call_signature(*a))
    bench.call([64] * 1000)
    assert root.state == "observing" and len(bench.eager_calls) == root.calls == 1000
    assert watched[:WATCHED_AT_FIRST] == [*range(1, WATCHED_AT_FIRST + 1)]
    assert max(later - one for one, later in itertools.pairwise(watched)) <= 17
    assert WATCHED_AT_FIRST + 55 < len(watched) < WATCHED_AT_FIRST + 70
    assert len(described) == len(watched), "what a call is given is looked at where it is watched, once"
    assert not observer.dynamic_dims(root.key)
    bench.call([80] * 17)
    assert observer.dynamic_dims(root.key), "a shape that stays is seen 16 calls later at the latest"
    bench.roots.uninstall()
    assert root.calls == observer.calls(root.key) == sum(count for _, count in observer.shapes(root.key)) == 1017
    assert 0.98 < root.account.ledger.eager_seconds <= 1.017


@pytest.mark.parametrize("percent", ["1.0", "0"])
def test_calls_that_become_long_are_watched_and_count_by_the_clock(
    percent: str, make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = {"AUTOFUSE_OBSERVE_MAX_OVERHEAD_PERCENT": percent}
    bench = make(lambda n: 500.0 if n == 64 else 0.5e6, lambda n: 500.0, **UNSAMPLED, **cap)
    root, watched, describe = bench.root, [], root_module.call_signature

    def look(*arguments: Any) -> Any:
        watched.append(root.calls)
        bench.clock[0] += 60e-6
        return describe(*arguments)

    monkeypatch.setattr(root_module, "call_signature", look)
    bench.call([64] * 400)
    assert len(watched) < WATCHED_AT_FIRST + 10 and watched[-1] < 380, "most are only counted"
    ledger, known, began = root.account.ledger, root.account.ledger.eager_seconds, bench.clock[0]
    watched.clear()
    bench.call([1 << 12] * 200)
    unseen = 1 if percent == "1.0" else 10 * 2 + 1  # those of 10 s where watching may take nothing
    assert 400 < watched[0] <= 401 + unseen
    assert max(later - one for one, later in itertools.pairwise(watched)) <= 1 + unseen
    assert bench.clock[0] - began - 0.5 * (unseen + 1) <= ledger.eager_seconds - known <= bench.clock[0] - began


@settings(max_examples=15)
@example(of=1, sizes=2)
@example(of=1, sizes=16)
@example(of=17, sizes=17)
@given(of=st.integers(1, 20), sizes=st.sampled_from([2, 3, 4, 8, 16, 17, 30]))
def test_sizes_that_take_turns_are_all_seen_and_counted_for_what_they_are(of: int, sizes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        bench = Bench(Path(folder), patch, lambda n: 1000.0, lambda n: 500.0, **NEVER)
        bench.call([1] * (WATCHED_AT_FIRST + of))
        turns = 16 * 16
        bench.call([*range(100, 100 + sizes)] * turns)
        bench.roots.uninstall()
        shapes = bench.roots.observer.shapes(bench.root.key)
    counts = {shape[0][1][0]: count for shape, count in shapes if shape[0][1][0] >= 100}
    assert sorted(counts) == [*range(100, 100 + sizes)]
    assert sum(count for _, count in shapes) == WATCHED_AT_FIRST + of + sizes * turns
    assert all(turns / 5 < count < turns * 3 for count in counts.values()), counts


@pytest.mark.parametrize(
    "call_us, look_us, every",
    [(20_000, 50, 1), (3_000, 90, 10), (1_000, 10, 12), (1_000, 150, 150), (300, 300, 1000)],
)
def test_what_watching_takes_is_on_the_account_and_within_its_share(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, call_us: int, look_us: int, every: int
) -> None:
    bench = make(lambda n: float(call_us), lambda n: 500.0, **UNSAMPLED)
    root, observer, watched, describe = bench.root, bench.roots.observer, [], root_module.call_signature

    def look(*arguments: Any) -> Any:
        watched.append(root.calls)
        bench.clock[0] += look_us / 1e6
        return describe(*arguments)

    monkeypatch.setattr(root_module, "call_signature", look)
    bench.call([64] * WATCHED_AT_FIRST)
    first = observer.cost_seconds
    assert WATCHED_AT_FIRST * look_us / 1e6 <= first < WATCHED_AT_FIRST * look_us / 1e6 + 0.1
    watched.clear()
    began = bench.clock[0]
    bench.call([64] * 4000)
    assert 2500 / (every * 4 / 3 + 2) < len(watched) <= 4000 / every
    spent, share = len(watched) * look_us / 1e6, 0.01 * (SHORT_SHARE if call_us < 2000 else WATCHING_SHARE)
    assert spent <= share * (bench.clock[0] - began) * 1.1 + look_us / 1e6
    assert first + spent - 1e-9 <= observer.cost_seconds < first + spent + 0.1


def test_advice_is_asked_for_as_rarely_as_it_takes_long(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(lambda n: 3000.0, lambda n: 500.0, **UNSAMPLED)
    root, asked = bench.root, []

    def factor() -> float:
        asked.append(root.calls)
        bench.clock[0] += 1e-3
        return 1.0

    monkeypatch.setattr(bench.roots.services, "cost_factor", factor)
    before = bench.roots.observer.cost_seconds
    bench.call([64] * 4000)
    assert asked[:32] == [*range(1, 33)]
    assert 32 + 8 <= len(asked) <= 32 + 16, "12 s, and two of 1 ms each for 2 s"
    assert bench.roots.observer.cost_seconds - before >= len(asked) * 0.999e-3


def test_all_calls_are_watched_where_captures_are_asked_for(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    for asks, is_all in (({"AUTOFUSE_TUNE": "wait"}, True), ({}, False)):
        bench, watched = make(lambda n: 1000.0, lambda n: 500.0, **NEVER, **asks), []
        monkeypatch.setattr(bench.root.policy, "advise", lambda *a: CaptureAdvice(False, "not_yet", ""))
        monkeypatch.setattr(bench.roots.observer, "before_root_call", lambda *a, w=watched: w.append(a))
        bench.call([64] * 200)
        assert (len(watched) == 200) is is_all


def test_a_waiting_run_captures_once_no_further_dim_varies(make: Callable[..., Bench]) -> None:
    for shapes, captured_at in (
        ([(2, 8), (2, 9), (3, 9), (2, 8), (3, 8), (4, 8)], 6),
        ([(2, 8), (3, 9), (2, 8), (3, 8), (2, 8)], 5),
        ([(2, 8)] * 5, 4),
    ):
        bench = make(lambda n: 1000.0, lambda n: 500.0, **UNSAMPLED, AUTOFUSE_TUNE="wait")
        seen = []
        with torch.no_grad():
            for shape in shapes:
                bench.root.call(bench.model, (torch.empty(shape),), {})
                seen.append(bench.root.state)
        assert seen.index("captured") + 1 == captured_at, shapes


def test_calls_within_a_sampled_step_of_another_root_are_watched(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, watched = make(lambda n: 1000.0, lambda n: 500.0, **NEVER), []
    monkeypatch.setattr(bench.roots.observer, "before_root_call", lambda *a: watched.append(a))
    bench.call([64] * (WATCHED_AT_FIRST + 2))
    assert len(watched) == WATCHED_AT_FIRST
    monkeypatch.setattr(type(bench.roots.observer), "is_sampling", True)
    bench.call([64] * 20)
    assert len(watched) == WATCHED_AT_FIRST + 20


def test_advice_is_asked_for_at_calls_of_all_sizes(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(lambda n: n, lambda n: n / 2, AUTOFUSE_CAPTURE_MAX_SLOWDOWN="1.0")
    root, asked = bench.root, []
    advise = root.policy.advise
    monkeypatch.setattr(root.policy, "advise", lambda *a: asked.append(root.policy.last_elements) or advise(*a))
    bench.call([100_000, 300] * 500)
    late = asked[32:]
    assert len(late) < 400 and late.count(300) > 20 and late.count(100_000) > 20


def test_no_root_is_decided_before_earlier_runs_are_known(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(lambda n: n, lambda n: n / 2)
    ready = [False]
    monkeypatch.setattr(type(bench.roots.context.store_thread), "is_ready", property(lambda self: ready[0]))
    bench.call([50] * 40)
    assert bench.root.state == "observing", "too small, but who knows"
    ready[0] = True
    bench.call([50] * 400)
    assert bench.root.state == "eager" and bench.root.reason == "too_small"


def test_long_calls_in_eager_are_all_watched(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(lambda n: 3000.0, lambda n: 500.0, AUTOFUSE_CAPTURE_MAX_SLOWDOWN="1.0")
    watched = []
    monkeypatch.setattr(bench.roots.observer, "before_root_call", lambda *a: watched.append(a))
    bench.call([64] * 200)
    assert len(watched) == 200 and bench.root.account.ledger.eager_seconds == pytest.approx(3e-3 * 199)


def test_a_gain_is_measured_though_no_size_comes_twice(make: Callable[..., Bench]) -> None:
    bench = make(lambda n: n, lambda n: n / 2)
    root = bench.root
    root.capture()
    sizes = random.Random(0).sample(range(20_000, 80_000), 400)
    bench.call(sizes)
    samples = [StepSample(*fields) for fields in bench.roots.context.steps]
    assert len(samples) == 399 and len({s.signature for s in samples}) == MAX_EXACT + 1
    assert all(s.elements == sizes[s.index - 1] for s in samples)
    speedup = measure_gain(samples, 0.0).speedup
    assert speedup.pairs >= 5 * PAIRED and speedup.median == pytest.approx(2.0)
    assert root.state == "captured" and len(root.trial.verdicts.ratios(40_000)) >= 12


@pytest.mark.parametrize("of", [3, 12, 40])
def test_short_calls_of_many_sizes_are_timed_before_a_held_out_one_alone(make: Callable[..., Bench], of: int) -> None:
    bench = make(lambda n: n / 8, lambda n: n / 16, AUTOFUSE_CAPTURE_HELD_OUT_SHARE="0.01")
    root = bench.root
    code = SimpleNamespace(
        manager=bench, fits=lambda *args: True, run=lambda module, x: bench.run_captured(x), types=lambda: set()
    )
    bench.traced.direct.find = lambda *args: code
    root.capture()
    sizes = [4096 + 64 * n for n in range(of)]
    bench.call(sizes * (2000 // of))
    number = root.calls
    bench.roots.context.steps.clear()
    bench.call(sizes * (3000 // of) + [5000] * 2)
    steps = [TimedStep(*fields) for fields in bench.roots.context.steps]
    calls = root.calls - number
    assert calls == len(bench.eager_calls) + len(bench.captured_calls) == 3000 // of * of + 2
    held_out = [step for step in steps if step.held_out]
    assert len(steps) < calls / 6 and 8 <= len(held_out) <= 16, "a quarter of one in a hundred, in twos"
    for step in held_out[2:]:
        fresh = [s for s in steps if not s.held_out and 0 < step.number - s.number <= PAIR_WINDOW + 2]
        assert sum(is_close(s.elements, step.elements) for s in fresh) >= PAIRED, "with calls just before it"
    assert root.trial.gain == pytest.approx(2.0, rel=0.1)
    assert root.account.ledger.behind_seconds == 0.0
    bench.version = 1
    bench.roots.context.disturb()
    bench.call(sizes * (400 // of))
    assert len(bench.eager_calls) >= 2 * CLEAR_PAIRS, (
        "new kernels are noticed, and confirmed: in twos, for they are short"
    )


def test_calls_that_gain_beyond_doubt_are_held_out_less_until_they_lose(make: Callable[..., Bench]) -> None:
    factor = [2.0]
    bench = make(lambda n: float(n), lambda n: n / factor[0], AUTOFUSE_CAPTURE_HELD_OUT_SHARE="0.02")
    bench.root.capture()
    bench.call([1 << 14] * 3000)
    bench.call([1 << 14] * 2000)
    assert len(bench.eager_calls) == 10, "a quarter of 40"
    factor[0] = 0.8
    bench.call([1 << 14] * 3000)
    assert len(bench.eager_calls) >= 12 and bench.root.state == "eager", "all of it again once it loses"
    assert len(bench.captured_calls) < 2400


@pytest.mark.parametrize(("scale", "has_held"), [(1, False), (1, True), (10, True)])
def test_calls_that_are_timed_node_by_node_are_not_compared(
    make: Callable[..., Bench], scale: int, has_held: bool
) -> None:
    """The first calls of graphs all are, and of some nodes eager's operations are timed in them."""
    bench: Bench

    def captured(elements: int) -> float:
        if len(bench.captured_calls) >= 200:
            return 500.0 * scale
        bench.roots.context.timed_calls += 1
        bench.roots.context.held_calls += has_held
        return 1500.0 * scale

    bench = make(lambda n: 1000.0 * scale, captured, **NEVER)
    bench.root.capture()
    bench.call([64] * 1000)
    assert bench.root.state == "captured", bench.root.detail
    assert bench.root.trial.gain == pytest.approx(2.0, rel=0.1)


def test_long_steps_are_compared_though_their_graphs_are_timed(make: Callable[..., Bench]) -> None:
    bench: Bench

    def captured(elements: int) -> float:
        bench.roots.context.timed_calls += 1
        return 20_000.0

    bench = make(lambda n: 10_000.0, captured, **NEVER)
    bench.root.capture()
    bench.call([64] * 100)
    assert (bench.root.state, bench.root.reason) == ("eager", "slower_than_eager")


def test_calls_just_after_untimed_ones_are_not_compared(make: Callable[..., Bench]) -> None:
    """The code that times them has left the caches meanwhile."""
    bench: Bench
    cold = [0]

    def captured(elements: int) -> float:
        if bench.root.untimed.began is not None:
            cold[0] = 4
            return 500.0
        cold[0] = max(cold[0] - 1, 0)
        return 1500.0 if cold[0] else 500.0

    bench = make(lambda n: 1000.0, captured, **NEVER)
    code = SimpleNamespace(
        manager=bench, fits=lambda *args: True, run=lambda module, x: bench.run_captured(x), types=lambda: set()
    )
    bench.traced.direct.find = lambda *args: code
    bench.root.capture()
    bench.call([64] * 2000)
    compared = [step.step_us for step in bench.roots.context.steps if step.fused_nodes and step.step_us]
    assert bench.root.state == "captured" and len(compared) > 40
    assert compared == pytest.approx([500.0] * len(compared))


@pytest.mark.parametrize("lasts", [100, 100_000])
def test_a_moment_without_a_gain_does_not_end_a_short_graph(make: Callable[..., Bench], lasts: int) -> None:
    """All pairs of one time lie within milliseconds; without a gain at three times it ends."""
    bench: Bench
    bench = make(lambda n: 1000.0, lambda n: 1002.0 if len(bench.captured_calls) < lasts else 700.0, **NEVER)
    bench.root.capture()
    bench.call([64] * 4000)
    if lasts > 4000:
        assert (bench.root.state, bench.root.reason) == ("eager", "no_gain")
        assert len(bench.captured_calls) < 1000
    else:
        assert bench.root.state == "captured" and len(bench.captured_calls) > 2000
        assert bench.root.trial.gain == pytest.approx(1000 / 706, rel=0.02)


def test_a_run_that_ends_before_a_loss_is_tried_anew_has_learnt_it(make: Callable[..., Bench]) -> None:
    bench = make(lambda n: 1000.0, lambda n: 1002.0, **NEVER)
    bench.root.capture()
    bench.call([64] * 200)
    assert bench.root.state == "captured"
    bench.roots.uninstall()
    record = bench.root.record()
    assert (record.state, record.reason) == ("eager", "no_gain") and record.judged_elements >= 64


def test_no_steps_are_kept_for_a_store_that_is_lost(make: Callable[..., Bench]) -> None:
    bench = make(lambda n: n, lambda n: n / 2)
    context = bench.roots.context
    bench.root.capture()
    bench.call(range(20_000, 20_100))
    assert len(context.steps) == 99
    context.settings.run.store.write_bytes(b"not a database" * 100)
    context.store_thread.start()
    context.store_thread.thread.join(60.0)
    assert context.said["store_unusable"] == 1
    bench.call(range(20_100, 20_200))
    assert context.steps == []


# Captured, a call takes 100 us more and half of what eager takes for each element: it pays from 200 elements on, and
# with what the hook takes from about 250.
SMALL, LARGE = 64, 4096
LOSES_SMALL = (lambda n: float(n + 50), lambda n: n / 2 + 150.0)


def test_what_tiny_calls_lose_does_not_keep_large_ones_in_eager(make: Callable[..., Bench]) -> None:
    bench = make(*LOSES_SMALL, AUTOFUSE_CAPTURE_AT_ONCE="true")
    bench.root.capture()
    bench.call([SMALL] * 1200)
    assert bench.root.state == "eager" and bench.root.reason == "slower_than_eager"
    assert bench.roots.tracker.attach(bench.model).is_quiet
    bench.call([LARGE] * 1200)
    assert bench.root.state == "captured"
    assert not bench.roots.tracker.attach(bench.model).is_quiet
    assert len(bench.captured_calls) > 1000
    bench.call([SMALL, LARGE] * 200)
    assert set(bench.captured_calls) == {LARGE} and bench.eager_calls.count(SMALL) == 200


def test_what_large_calls_gain_does_not_keep_tiny_ones_captured(make: Callable[..., Bench]) -> None:
    bench = make(*LOSES_SMALL)
    bench.root.capture()
    bench.call([LARGE] * 1200)
    assert len(bench.captured_calls) > 1000
    bench.call([SMALL] * 1600)
    bench.call([SMALL] * 300)
    assert not bench.captured_calls, "tiny ones have lost by now"
    assert bench.root.state == "captured" and "64 elements stay in eager" in bench.root.detail
    assert bench.roots.tracker.attach(bench.model).is_quiet, "nothing else came for a while"
    bench.call([LARGE] * 300)
    assert len(bench.captured_calls) > 250


def test_a_graph_that_loses_rests_while_its_kernels_are_still_to_come(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = [False]
    bench = make(lambda n: float(n), lambda n: n / 2 if tuned[0] else n * 1.25)
    monkeypatch.setattr(bench.roots.services.tuning, "expects_more", lambda: not tuned[0])
    monkeypatch.setattr(bench.roots.services.tuning, "has_open", lambda: not tuned[0])
    bench.root.capture()
    bench.call([1 << 14] * 200)
    assert len(bench.captured_calls) < 120, "it has been found slower, and eager runs"
    assert bench.root.state == "captured", "it is not given up"
    assert (bench.root.record().state, bench.root.record().reason) == ("eager", "slower_untuned")
    assert bench.root.record().gain == 0.0, "what it lost says nothing of the kernels to come"
    bench.call([1 << 14] * 4000)
    assert 0 < len(bench.captured_calls) < 500, "tried again, each time later"
    tuned[0] = True
    bench.roots.context.disturbances += 1
    bench.call([1 << 14] * 64)
    bench.call([1 << 14] * 1000)
    assert len(bench.captured_calls) > 900, "its kernels are there"
    record = bench.root.record()
    assert record.state == "captured" and record.gain == pytest.approx(2.0, rel=0.1)


def test_only_kernels_of_its_own_have_a_graph_confirmed_anew(make: Callable[..., Bench]) -> None:
    bench = make(lambda n: float(n), lambda n: n / 1.05, AUTOFUSE_CAPTURE_HELD_OUT_SHARE="0.01")
    bench.root.capture()
    bench.call([1 << 14] * 600)
    for _ in range(3):
        bench.roots.context.disturb()  # another graph has a kernel
        bench.call([1 << 14] * 100)
        assert len(bench.eager_calls) <= 2, "the share of every run"
    bench.version = 1
    bench.roots.context.disturb()
    bench.call([1 << 14] * 100)
    assert len(bench.eager_calls) >= 12, "its own kernel"


def test_a_size_that_comes_now_and_then_does_not_undo_what_is_known(make: Callable[..., Bench]) -> None:
    bench = make(*LOSES_SMALL)
    bench.root.capture()
    odd = SMALL // 4  # the last batch of an epoch
    bench.call(([SMALL] * 60 + [odd]) * 20)
    assert bench.root.state in ("eager", "observing"), "though the odd one has no pairs"
    bench.call([odd])
    record = bench.root.record()
    assert (record.state, record.reason) == ("eager", "slower_than_eager"), "what later runs read"
    bench.call([SMALL])
    assert not bench.roots.observer.is_sampling, "no sampled step waits for the next odd one"


def test_a_root_too_small_to_capture_is_looked_at_again_when_it_grows(make: Callable[..., Bench]) -> None:
    bench = make(lambda n: n / 10 + 5.0, lambda n: n / 20)
    bench.call([SMALL] * 60)
    assert (bench.root.state, bench.root.reason) == ("eager", "too_small")
    bench.call([1 << 22])
    assert bench.root.state == "observing"
    bench.call([1 << 22] * 60)
    assert bench.root.reason != "too_small", "0.4 s a call"


@pytest.mark.parametrize("first", [SMALL, LARGE])
def test_what_an_earlier_run_found_out_holds_for_calls_as_large_as_its_own(
    make: Callable[..., Bench], first: int
) -> None:
    earlier = make(*LOSES_SMALL)
    earlier.root.capture()
    earlier.call([SMALL] * 1200)
    record = earlier.root.record()
    assert (record.state, record.reason) == ("eager", "slower_than_eager") and SMALL <= record.judged_elements < LARGE
    later = make(*LOSES_SMALL)
    later.roots.known[later.root.key] = record
    later.call([first, SMALL])
    assert later.root.state == ("eager" if first == SMALL else "observing")
    later.call([LARGE])
    assert (later.root.state, later.root.reason) == ("observing", "not_observed"), "large ones may pay for a capture"
    assert later.root.policy.observed_calls == (1 if first == SMALL else 2), "small ones are no part of what is weighed"


def test_what_lost_without_its_kernels_may_win_in_the_next_run(make: Callable[..., Bench]) -> None:
    bench = make(*LOSES_SMALL)
    for reason in ("slower_untuned", "too_small"):
        bench.roots.known[bench.root.key] = RootRecord(
            bench.root.key, "Identity", "eager", reason, judged_elements=10 * SMALL
        )
        bench.call([SMALL] * 2)
        assert bench.root.state == "observing" and not bench.root.trial.verdicts.any_lost


def test_a_call_that_does_not_tell_its_size_is_the_smallest() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert call_signature((nested,), {}) == (torch.Tensor,)
    assert elements_of((nested,), {}) == 1
    assert elements_of((torch.ones(2, 3), 7), {"x": [torch.ones(4)]}) == 10


def test_what_has_failed_is_not_tried_for_every_new_size(make: Callable[..., Bench]) -> None:
    bench = make(*LOSES_SMALL)
    bench.root.capture()
    bench.call([SMALL] * 1200)
    bench.root.life.fail(RuntimeError("no"), from_kept=False)
    bench.call([LARGE, LARGE * 4] * 4)
    assert bench.root.state == "eager" and not bench.captured_calls
