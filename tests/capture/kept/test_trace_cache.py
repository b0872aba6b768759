"""Dynamo's traces kept from one run to the next: the same results as plain Python's, and refused whenever they must be.

Each run is a process of its own, and a script of its own file: what a trace knows of another process is what is tested.
Traces are made by processes that have nothing in common with those that read them. These are forked from one that has
imported torch, which takes 3 s.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autofuse.capture.kept.graph_cache import IS_SUPPORTED
from autofuse.private_files import PrivateFolder
from tests import forked

pytestmark = pytest.mark.skipif(
    not IS_SUPPORTED, reason=f"traces are kept with torch 2.13, and made anew with {torch.__version__}"
)

SCRIPT = """
import json, sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
options = json.loads(sys.argv[1])
WIDTH = options.get("width", 32)

def gate(x):
    return torch.sigmoid(x)FACTOR

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH, eps=options.get("eps", 1e-5)), nn.Dropout(options.get("p", 0.1))
        self.scaled = options.get("flag", False)

    def forward(self, x, mask=None):
        y = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))) * gate(x)
        if self.scaled:
            y = y * 2.0
        return x + y if mask is None else x + y * mask

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Block(), Block(), nn.Linear(WIDTH, 5)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x, mask=None):
        y = self.b(self.a(x, mask), mask)
        if options.get("own_loss"):
            result = self.head(y)
            return result.square().mean(), result
        return self.head(self.statistics(y))

model = Net()
if options.get("tied"):
    model.b.up.weight = model.a.up.weight
if options.get("frozen"):
    model.head.requires_grad_(False)
exec(options.get("before", ""))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
for step in range(options.get("steps", 14)):
    exec(options.get("at", {}).get(str(step), ""))
    x = torch.randn(8 + step % options.get("shapes", 4), WIDTH)
    mask = torch.rand(x.shape[0], 1) if step in options.get("masked", ()) else None
    loss, result = model(x, mask) if options.get("own_loss") else (None, model(x, mask))
    if result.requires_grad:
        loss = result.square().mean() if loss is None else loss
        optimizer.zero_grad()
        loss.backward()
        seen += [float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None]
        optimizer.step()
    seen += [float(result.double().sum()), float(torch.rand(()))]
seen += [float(b.double().sum()) for b in model.buffers()]
if "torch._dynamo" in sys.modules:
    from torch._dynamo.utils import counters
    frames = counters["frames"]["ok"]
else:
    frames = -1
print(json.dumps({"seen": seen, "traced": frames}))
"""


class Scripts:
    """A script beside a store; ``run`` gives what it has seen, how often Dynamo traced, and stderr."""

    def __init__(self, folder, is_forked=False):
        self.folder = folder
        self.is_forked = is_forked  # whether the runs are children of a process that has torch
        self.write()

    def write(self, factor="", folder="one"):
        self.path = self.folder / folder / "train.py"
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(SCRIPT.replace("FACTOR", factor))

    def run(self, *settings, plain=False, **options):
        command = []
        if not plain:
            store = self.folder / "s.sqlite3"
            command += ["-m", "autofuse", "run", "--tune", "off", "--store", str(store)]
            command += ["--set", "capture.at_once=true", "--set", "capture.held_out_share=0", *settings]
        command += [str(self.path), json.dumps(options)]
        if self.is_forked:
            result = forked.run(*command)
        else:
            result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout.splitlines()[-1])
        return found["seen"], found["traced"], result.stderr

    @property
    def graphs(self):
        return self.folder / "s.sqlite3.graphs"

    def traces(self):
        return sorted(self.graphs.glob("*.trace"))


@pytest.fixture
def scripts(tmp_path):
    return Scripts(tmp_path)


def agree(ours, theirs):
    assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)  # eager's kernels, whose sums are cut otherwise


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A script that has run once."""
    scripts = Scripts(tmp_path_factory.mktemp("warm"))
    seen, traced, stderr = scripts.run()
    assert traced >= 1 and "made anew" not in stderr
    assert scripts.traces()
    return scripts, seen


def copied(warm, tmp_path):
    """The store of the first run in a place of this test's own, and the script as it was."""
    scripts, seen = warm
    fresh = Scripts(tmp_path, is_forked=True)
    fresh.path = scripts.path
    for path in scripts.graphs.iterdir():
        PrivateFolder(fresh.graphs).write(path.name, PrivateFolder(scripts.graphs).read(path.name))
        os.utime(fresh.graphs / path.name, (path.stat().st_mtime, path.stat().st_mtime))
    return fresh, seen


def test_the_next_run_traces_nothing_and_sees_the_same(warm, tmp_path):
    scripts, first = copied(warm, tmp_path)
    plain, _, _ = scripts.run(plain=True)
    seen, traced, stderr = scripts.run()
    assert traced == 0 and "anew" not in stderr
    assert seen == first
    agree(seen, plain)


@pytest.mark.parametrize(
    "event",
    [
        {"at": {"7": "model.eval()"}},
        {
            "at": {
                "5": "model.eval(); torch.set_grad_enabled(False)",
                "9": "model.train(); torch.set_grad_enabled(True)",
            }
        },
        {"at": {"6": "model.a.register_forward_hook(lambda m, i, o: o * 1.5)"}},
        {"at": {"6": "model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))"}},
        {"at": {"6": "model.a.up.weight.requires_grad_(False)"}},
        {"at": {"6": "model.b = Block()"}},
        {"at": {"6": "model.a.drop.p = 0.5"}},
        {"at": {"6": "gate = lambda x: x * 2.0"}},
        {"at": {"6": "model.a.scaled = True"}},
        {"shapes": 11},
        {"masked": [4, 5, 9]},
    ],
    ids=[
        "eval",
        "inference",
        "hook",
        "parameter",
        "frozen",
        "module",
        "rate",
        "function",
        "flag",
        "shapes",
        "mask",
    ],
)
def test_what_happens_after_a_trace_was_read_is_seen(warm, tmp_path, event):
    scripts, _ = copied(warm, tmp_path)
    expected, _, _ = scripts.run(plain=True, **event)
    seen, _, _ = scripts.run(**event)
    agree(seen, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"width": 48},
        {"flag": True},
        {"eps": 1e-3},
        {"p": 0.2},
        {"tied": True},
        {"frozen": True},
        {"before": "model.a.register_forward_hook(lambda m, i, o: o * 1.5)"},
        {"before": "Block.forward = lambda self, x, mask=None: x * gate(x)"},
        {"before": "gate = lambda x: x * 2.0"},
        {"before": "nn.functional.gelu = torch.tanh"},
        {"before": "model.double(); torch.set_default_dtype(torch.float64)"},
        {"before": "torch.set_num_threads(2)"},
        {"before": "torch.use_deterministic_algorithms(True)"},
        {"before": "model.eval()"},
        {"before": "model.a.drop.__class__ = nn.Identity"},
        {"before": "torch.backends.mkldnn.enabled = False"},
    ],
    ids=[
        "shape", "flag", "number", "rate", "tied", "frozen", "hook", "method", "function", "torch", "dtype", "threads",
        "deterministic", "eval", "class", "backend",
    ],
)  # fmt: skip
def test_a_trace_of_another_model_or_state_is_not_used(warm, tmp_path, change):
    """Calls are of one size, so that it is traced once instead."""
    scripts, _ = copied(warm, tmp_path)
    expected, _, _ = scripts.run(plain=True, shapes=1, **change)
    seen, traced, _ = scripts.run(shapes=1, **change)
    assert traced >= 1
    agree(seen, expected)


def test_another_script_with_the_same_names_is_traced(warm, tmp_path):
    scripts, _ = copied(warm, tmp_path)
    scripts.write(" * 0.5", "two")
    expected, _, _ = scripts.run(plain=True)
    seen, traced, stderr = scripts.run()
    assert traced >= 1 and "made anew" in stderr
    agree(seen, expected)


def test_lines_that_are_not_traced_may_change(warm, tmp_path):
    scripts, first = copied(warm, tmp_path)
    scripts.write("", "two")
    scripts.path.write_text("# a comment\n\nUNUSED = 1\n" + scripts.path.read_text())
    seen, traced, _ = scripts.run()
    assert traced == 0 and seen == first


@pytest.mark.parametrize("damage", ["cut", "bit", "pickle", "writable", "link", "name"])
def test_a_trace_that_may_not_be_ours_is_made_anew(warm, tmp_path, damage):
    scripts, first = copied(warm, tmp_path)
    for path in scripts.traces():
        whole = path.read_bytes()
        if damage == "writable":
            path.chmod(0o666)
        elif damage == "link":
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        elif damage == "name":
            path.rename(path.with_name(f"{path.name[:-7]}{'10'[path.name[-7] == '1']}.trace"))
        else:
            trap = pickle.dumps(Trap(tmp_path / "run"))
            path.write_bytes({"cut": whole[:-9], "bit": whole[:-1] + b"?", "pickle": trap}[damage])
    seen, traced, stderr = scripts.run()
    assert traced >= 1 and "a trace of an earlier run is made anew" in stderr
    assert seen == first and not (tmp_path / "run").exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_that_others_may_write_to_is_left_alone(warm, tmp_path):
    scripts, first = copied(warm, tmp_path)
    scripts.graphs.chmod(0o777)
    seen, traced, stderr = scripts.run()
    assert traced >= 1 and "may be written to by others" in stderr
    assert seen == first


@pytest.mark.parametrize("what", ["torch, Python or autofuse.capture", "torch._dynamo.config.automatic_dynamic_shapes"])
def test_a_trace_of_another_version_or_setting_is_made_anew(warm, tmp_path, what):
    scripts, first = copied(warm, tmp_path)
    folder = PrivateFolder(scripts.graphs)
    for path in scripts.traces():
        switches, kept = pickle.loads(folder.read(path.name))
        assert what in switches
        folder.write(path.name, pickle.dumps((switches | {what: "another"}, kept)))
    seen, traced, stderr = scripts.run()
    assert traced >= 1 and f"changed since: {what}" in stderr
    assert seen == first


def test_a_trace_of_another_autofuse_costs_no_import(warm, tmp_path):
    scripts, _ = copied(warm, tmp_path)
    for path in scripts.traces():
        root, _, rest = path.name.split(".", 2)
        path.rename(path.with_name(f"{root}.{'0' * 16}.{rest}"))
    scripts.is_forked = False
    at = {"13": "assert 'autofuse.capture.kept.trace_cache' not in sys.modules"}
    seen, traced, stderr = scripts.run("--set", "capture.at_once=false", at=at)
    assert traced <= 0 and "made anew" not in stderr, "nothing is made"
    assert seen == scripts.run(plain=True)[0]


PLANNING = (
    "autofuse.capture.backend",
    "autofuse.pipeline",
    "autofuse.runtime.graphs.planner",
    "autofuse.fusion.engine",
)
TRACING = ("networkx", "torch._functorch.partitioners", "torch._dynamo.testing")


def test_a_run_on_kept_traces_imports_nothing_that_traces_or_plans(warm, tmp_path):
    scripts, first = copied(warm, tmp_path)
    scripts.is_forked = False
    check = f"found = {{*{PLANNING + TRACING}}} & {{*sys.modules}}; assert not found, found"
    seen, traced, _ = scripts.run(at={"13": check})
    assert traced == 0 and seen == first


def test_traces_of_training_and_of_evaluation_are_both_used(scripts):
    at = {"4": "model.eval(); torch.set_grad_enabled(False)", "8": "model.train(); torch.set_grad_enabled(True)"}
    seen, traced, _ = scripts.run(at=at)
    scripts.is_forked = True
    again, traced_again, stderr = scripts.run(at=at)
    assert traced >= 2 and traced_again == 0 and "made anew" not in stderr
    assert again == seen


def test_a_trace_is_used_in_another_folder(warm, tmp_path, monkeypatch):
    scripts, first = copied(warm, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    seen, traced, _ = scripts.run()
    assert traced == 0 and seen == first


def test_without_graphs_beside_it_a_trace_is_made_anew(warm, tmp_path):
    scripts, first = copied(warm, tmp_path)
    for path in scripts.graphs.iterdir():
        if path.suffix != ".trace":
            path.unlink()
    seen, traced, _ = scripts.run()
    assert traced >= 1 and seen == first


def test_a_backward_graph_of_the_loss_alone_is_kept_too(scripts):
    """Zeros for what the loss does not use would be made by `filled`."""
    without = "if 'autofuse' in sys.modules: sys.modules['autofuse.capture.corrections.double_backward'].filled = None"
    options = {"own_loss": True, "at": {"5": without}}
    plain, _, _ = scripts.run(plain=True, **options)
    first, traced, _ = scripts.run(**options)
    assert traced >= 1 and scripts.traces()
    scripts.is_forked = True
    seen, traced, stderr = scripts.run(**options)
    assert traced == 0 and "anew" not in stderr
    assert seen == first
    agree(seen, plain)


def test_nothing_is_kept_where_that_is_switched_off(scripts):
    scripts.is_forked = True
    scripts.run("--set", "capture.keep_graphs=false")
    assert not scripts.graphs.exists()


@pytest.mark.parametrize(
    "factor",
    [
        " * (1.0 if type(x) == torch.Tensor else 2.0)",  # looks at torch under a name made of an address
        " + nn.Identity()(x) * 0.0",  # goes through what Dynamo has put around Module.__init__
    ],
    ids=["type", "module"],
)
def test_what_dynamo_itself_has_put_somewhere_is_found_again(scripts, factor):
    scripts.write(factor)
    seen, traced, _ = scripts.run(steps=6)
    assert traced >= 1 and scripts.traces()
    scripts.is_forked = True
    again, traced, stderr = scripts.run(steps=6)
    assert traced <= 0 and again == seen and "made anew" not in stderr
