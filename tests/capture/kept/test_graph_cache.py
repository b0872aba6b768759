"""Graphs kept from one capture to the next: the same results as eager's, found again, never mistaken for another."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from autofuse.capture.backend import compile_with
from autofuse.capture.kept import graph_cache
from autofuse.capture.traced import Keeper
from autofuse.pipeline import route_graph
from autofuse.private_files import PrivateFolder
from autofuse.runtime.graphs.plan_cache import PlanCache
from autofuse.sessions import make_session, start_session
from autofuse.settings.layers import load
from tests import forked

pytestmark = pytest.mark.skipif(
    not graph_cache.IS_SUPPORTED, reason=f"graphs are kept with torch 2.13, and traced anew with {torch.__version__}"
)


class Block(nn.Module):
    """Attention written out, dropout, a batch norm whose statistics are written, a number that is asked of sizes."""

    def __init__(self, width=16):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) / 4.0
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.drop(F.softmax(scores.masked_fill(later, float("-inf")), -1))
        x = x + self.drop(self.out(weights @ v))
        return x + self.norm(x.transpose(1, 2)).transpose(1, 2) * x.shape[1]


class Views(nn.Module):
    """Outputs that are views of inputs and of each other, an input that is written to."""

    def forward(self, x):
        x.mul_(2.0)
        y = (x + 1.0).relu()
        return y, y.transpose(0, 1), x[1:], x.shape[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


said = []  # kinds of trouble with kept graphs


@pytest.fixture
def capture(tmp_path):
    """``capture(module)``: as a new run would see it, with the graphs that earlier ones have kept."""
    said.clear()
    return starter(tmp_path)


def starter(place):
    """Captures beside a store in that place."""

    def start(module, folder=place / "graphs", blocks=0, **options):
        torch._dynamo.reset()
        counters.clear()
        values = {"run.store": place / "s.sqlite3", "run.tune": "off", "run.quiet": True}
        session = make_session(load(cli=values, environ={}, cwd=place), "test")

        def backend(graph, inputs):
            call = compile_with(
                graph, inputs, lambda g, phase, times: route_graph(g, phase, session, times), blocks, keeper
            )
            assert not session.context.said
            return call

        keeper = Keeper(PrivateFolder(folder), lambda kind, message: said.append(kind))

        return torch.compile(module, backend=backend, **options)

    return start


def found():
    return counters["aot_autograd"]["autograd_cache_hit"]


def train(module, sizes=(5, 7, 4)):
    """Results, gradients, statistics and the generator's state, call after call."""
    seen = []
    for size in sizes:
        torch.manual_seed(size)
        x = torch.randn(3, size, 16, requires_grad=True)
        result = module(x)
        result.square().mean().backward()
        seen += [result.detach(), x.grad, torch.get_rng_state()]
    original = getattr(module, "_orig_mod", module)
    return [*seen, *(p.grad for p in original.parameters()), *(b.clone() for b in original.buffers())]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def small_model():
    """For tests in which any graph will do: capturing it takes a tenth of a `Block`'s time."""
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))


def kept_by_a_run(model, folder):
    """A model, what it sees in eager, and the files of the graphs that a run of it has kept."""
    expected = train(copy.deepcopy(model))
    same(train(starter(folder)(copy.deepcopy(model), dynamic=True)), expected)
    assert found() == 0
    graphs = PrivateFolder(folder / "graphs")
    files = {path.name: graphs.read(path.name) for path in (folder / "graphs").iterdir()}
    assert files and all(path.is_file() for path in (folder / "graphs").iterdir())
    return model, expected, files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return kept_by_a_run(Block(), tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return kept_by_a_run(small_model(), tmp_path_factory.mktemp("small"))


def next_run(capture, kept, folder):
    """A call that trains as the next run would, with the files that are in ``folder`` by then."""
    model, _, files = kept
    for name, content in files.items():
        PrivateFolder(folder).write(name, content)
    return lambda: train(capture(copy.deepcopy(model), dynamic=True))


def test_training_from_kept_graphs_is_eagers(capture, trained, tmp_path):
    """As the run was that has kept them: see `kept_by_a_run`."""
    again = next_run(capture, trained, tmp_path / "graphs")
    same(again(), trained[1])
    assert found() == 1


def test_a_static_graph_with_its_backward_pass_is_kept_too(capture):
    model = Block()
    expected = train(copy.deepcopy(model), (6, 6))
    for hits in (0, 1):
        same(train(capture(copy.deepcopy(model)), (6, 6)), expected)
        assert found() == hits


def test_gradients_of_gradients_still_come_from_eager(capture):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)

    def second(module):
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)

    expected = second(model)
    for hits in (0, 1):
        for ours, theirs in zip(second(capture(model)), expected, strict=True):
            assert (ours is None) == (theirs is None) and (ours is None or torch.allclose(ours, theirs))
        assert found() == hits


def test_zeros_for_an_unused_output_meet_no_infinity_in_the_next_run_either(capture):
    """Which operator made a value that forward has saved is kept with the graph."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            y = x * self.scale
            return y, y.exp()  # infinite from 89 on

    model = Two()
    for hits in (0, 1):
        x = torch.full((2, 3), 100.0, requires_grad=True)
        capture(model)(x)[0].sum().backward()
        assert found() == hits and x.grad.eq(1.0).all()


def test_inference_views_and_writes(capture):
    for hits in (0, 1):
        fast = capture(Views(), dynamic=True)
        for size in (4, 6):
            x = torch.randn(size, 5)
            y = x.clone()
            with torch.no_grad():
                ours, theirs = fast(x), Views()(y)
            assert torch.equal(x, y) and ours[3] == theirs[3] == size
            assert ours[1]._base is ours[0]._base or ours[1].data_ptr() == ours[0].data_ptr()
            assert ours[2].data_ptr() == x[1:].data_ptr()
            same(ours[:3], theirs[:3])
        assert found() == hits


def test_another_modules_weights_are_not_those_of_the_run_before(capture):
    x = torch.randn(2, 3, 9, 9)
    for seed, hits in ((0, 0), (1, 1)):
        torch.manual_seed(seed)
        model = Convolution().eval()
        with torch.no_grad():
            assert torch.allclose(capture(model)(x), model(x), atol=1e-6)
        assert found() == hits


def test_what_changes_the_trace_is_not_found(capture):
    class Defaults(nn.Module):
        def forward(self, x):
            return x + torch.ones(x.shape[0]) * torch.arange(x.shape[0]).mean(dtype=torch.get_default_dtype())

    model, x = Defaults(), torch.randn(6)
    linear, y = nn.Linear(6, 6), torch.randn(2, 6)

    def run(module, value):
        result = capture(module)(value)
        assert torch.equal(result, module(value)) and result.dtype == module(value).dtype
        return found()

    assert run(model, x) == 0 and run(model, x) == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert run(model, x) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert run(model, x) == 1 and run(model, x.double()) == 0 and run(model, torch.randn(12)[::2]) == 0
    assert run(linear, y) == 0 and run(linear, y) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert run(linear, y) == 0 and run(linear, y) == 1
    with torch.no_grad():
        assert run(linear, y) == 0 and run(linear, y) == 1
    assert run(linear.requires_grad_(False), y) == 0


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "folder", "writable"])
def test_a_damaged_file_is_traced_anew(capture, small, tmp_path, damage):
    again = next_run(capture, small, tmp_path / "graphs")
    files = [path for path in (tmp_path / "graphs").rglob("*") if path.is_file()]
    assert files
    for path in files:
        whole = path.read_bytes()
        changed = {"cut": whole[: len(whole) // 2], "garbage": os.urandom(500), "writable": whole}
        path.write_bytes(changed.get(damage, b""))
        if damage == "writable":
            path.chmod(0o666)
        if damage == "folder":
            path.unlink()
            path.mkdir()
    same(again(), small[1])
    assert found() == 0
    assert damage == "folder" or "kept_graph_refused" in said


def test_a_pickle_that_someone_else_put_there_is_not_opened(capture, small, tmp_path):
    """Whoever may write to the folder could have code of theirs run in the script."""
    again = next_run(capture, small, tmp_path / "graphs")
    for path in (tmp_path / "graphs").iterdir():
        path.write_bytes(pickle.dumps(Trap(tmp_path / "run")))
    same(again(), small[1])
    assert found() == 0 and not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path / "run")))
    assert (tmp_path / "run").exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_that_others_may_write_to_keeps_nothing(capture, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    model = small_model()
    expected = train(copy.deepcopy(model))
    for _ in range(2):
        same(train(capture(copy.deepcopy(model), tmp_path / "shared", dynamic=True)), expected)
        assert found() == 0 and said == ["graphs_not_kept"]
        said.clear()
    assert not list((tmp_path / "shared").iterdir())


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_graphs(capture, tmp_path):
    (tmp_path / "file").write_text("")
    model = small_model()
    expected = train(copy.deepcopy(model))
    for _ in range(2):
        same(train(capture(copy.deepcopy(model), tmp_path / "file" / "graphs", dynamic=True)), expected)
        assert found() == 0 and (tmp_path / "file").read_text() == ""
        assert said == ["graphs_not_kept"]
        said.clear()


def test_what_cannot_be_written_is_captured_as_ever(capture, monkeypatch, tmp_path):
    def refuse(*args):
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(graph_cache.GraphPickler, "dumps", refuse)
    model = small_model()
    expected = train(copy.deepcopy(model))
    for _ in range(2):
        same(train(capture(copy.deepcopy(model), dynamic=True)), expected)
        assert found() == 0


def test_nothing_of_torchs_own_is_left_changed(capture):
    before = (dict(vars(graph_cache.AOTAutogradCache)), graph_cache.autograd_cache.autograd_cache_key)
    settings = torch._functorch.config.save_config()
    train(capture(small_model(), dynamic=True))
    assert before == (
        dict(vars(graph_cache.AOTAutogradCache)),
        graph_cache.autograd_cache.autograd_cache_key,
    )
    assert settings == torch._functorch.config.save_config()


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(20 + step, 64)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
from torch._dynamo.utils import counters
print(counters["aot_autograd"]["autograd_cache_miss"])
"""


def test_the_next_run_of_a_script_finds_them(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(start, *options):
        command = ["-m", "autofuse", "run", "--tune", "off", "--store", str(tmp_path / "s.sqlite3")]
        result = start(*command, "--set", "capture.at_once=true", *options, str(script))
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    def new(*command):
        return subprocess.run([sys.executable, *command], capture_output=True, text=True)

    first, second = run(new), run(forked.run)
    assert (tmp_path / "s.sqlite3.graphs").is_dir()
    assert first[:-1] == second[:-1] and int(first[-1]) > 0 and second[-1] == "0"
    off = run(forked.run, "--set", "capture.keep_graphs=false")
    assert off[:-1] == first[:-1] and off[-1] == "0"  # nothing was looked for


@torch.library.custom_op("autofuse_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 3.0


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)


@pytest.mark.parametrize("function", [twice, Scaled.apply, checkpointed], ids=["operator", "function", "checkpoint"])
def test_what_the_script_may_define_anew_is_not_kept(capture, tmp_path, function):
    x = torch.randn(4, 5, requires_grad=function is not twice)  # whose gradient is not defined
    for _ in range(2):
        result = capture(lambda x: function(x) + x.relu())(x)
        assert torch.equal(result, function(x) + x.relu()) and found() == 0
    assert not [path for path in (tmp_path / "graphs").rglob("*") if path.is_file()]


def test_inputs_in_one_storage_are_traced_anew(capture):
    def write(x, y):
        x.mul_(2.0)
        return x * y

    def pair(overlaps):
        base = torch.arange(12.0)
        return (base[:8], base[4:]) if overlaps else (base[:8].clone(), base[4:].clone())

    def run(overlaps):
        ours, theirs = pair(overlaps), pair(overlaps)
        same((capture(write, dynamic=True)(*ours), *ours), (write(*theirs), *theirs))
        return found()

    # Where inputs are written to, calls whose inputs overlap run in eager, which is no part of what is kept.
    assert [run(False), run(True), run(False), run(True)] == [0, 0, 0, 0]


def test_effects_whose_tokens_torchs_cache_forgets_are_not_kept(capture):
    a, b = torch.randn(4, 4) + 4.0 * torch.eye(4), torch.randn(4, 2)
    for _ in range(2):
        result = capture(lambda a, b: torch.linalg.solve(a, b).relu())(a, b)
        assert torch.equal(result, torch.linalg.solve(a, b).relu()) and found() == 0


def test_equal_blocks_are_kept_with_guards_on_all_their_sizes(capture, tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(6))

        def forward(self, x):
            if x.shape[1] > 10:
                x = x + 1.0
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Deep()
    for size, hits in ((5, False), (6, True), (20, None), (5, True)):
        twin = copy.deepcopy(model)
        fast = capture(model, blocks=2, dynamic=True)
        x = torch.randn(3, size, 16)
        fast(x).square().sum().backward()
        twin(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.zero_grad()
        assert hits is None or bool(found()) == hits


@pytest.mark.parametrize("what", ["graph", "trace"])
def test_a_kept_graph_that_does_not_run_leaves_the_script_alone(tmp_path, monkeypatch, what):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(4, 8)
    values = {
        "run.store": tmp_path / "s.sqlite3", "run.tune": "off", "run.quiet": True, "capture.at_once": True
    }  # fmt: skip

    def run():
        torch._dynamo.reset()
        session = start_session(load(cli=values, environ={}, cwd=tmp_path), "test")
        try:
            with torch.no_grad():
                results = [model(x) for _ in range(3)]
            (root,) = session.roots.groups.values()
        finally:
            session.finish(0)
        assert all(torch.allclose(result, expected, atol=1e-6) for result in results)
        return root.state, root.reason

    with torch.no_grad():
        expected = model(x)
    assert run() == ("captured", "first_call")
    folder = tmp_path / "s.sqlite3.graphs"
    users_own = [folder / "note.txt", folder / "sub"]
    users_own[0].write_text("a user's own")
    users_own[1].mkdir()
    (users_own[1] / "x").touch()
    whole = graph_cache.GraphCache.compile_kept

    def broken(args):
        raise ValueError("not enough values to unpack")

    with monkeypatch.context() as patched:
        if what == "trace":
            patched.setattr(PlanCache, "from_bytes", lambda self, data: lambda phase: broken)
        else:
            patched.setattr(graph_cache.GraphCache, "compile_kept", lambda self, kept: (whole(self, kept), broken)[1])
            for path in folder.glob("*.trace"):
                path.unlink()
        assert run() == ("eager", "kept_graph_failed")
    assert sorted(folder.iterdir()) == users_own and (users_own[1] / "x").exists(), "what we wrote goes, and no more"
    assert run() == ("captured", "first_call")
