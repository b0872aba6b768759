"""Nothing of autofuse draws from a global random generator: whole runs in which each draw is noted with its frame."""

from __future__ import annotations

import ast
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import autofuse
from tests.e2e.commands import stop_daemon

COUNTING = Path(__file__).with_name("count_draws")
PACKAGE = Path(autofuse.__file__).parent
ASSETS = Path(__file__).parent.parent / "db" / "assets"
QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.budget_seconds=8")

SCRIPT = """
import os, random, sys
sys.path.insert(0, {e2e!r})
from sitecustomize import count_what_was_undone
count_what_was_undone()
import small_lm
from small_lm import Model
random.random()  # the script's own, which must be seen
{door}
small_lm.main(14)
if {explains}:
    autofuse.explain()
print(os.getpid())
"""
DOORS = {
    "backend": 'small_lm.Model = lambda: torch.compile(Model(), backend="autofuse")\nimport torch',
    "optimize": "import autofuse\nsmall_lm.Model = lambda: autofuse.optimize(Model())",
}


def draws(tmp_path: Path, command: list[str], **environment: str) -> list[str]:
    """What a run has drawn in the script's process, apart from its first draw, which is its own."""
    log = tmp_path / "draws"
    log.unlink(missing_ok=True)
    env = os.environ | {"DRAWS": str(log), "PYTHONPATH": str(COUNTING)} | environment
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    pid = done.stdout.split()[-1]
    found = [line for line in log.read_text().splitlines() if line.split()[0] == pid]
    own = [line for line in found if " random: " in line and "train.py" in line.split(" < ")[0]]
    assert len(own) == 1
    return [line for line in found if line not in own]


def script(tmp_path: Path, door: str = "") -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(e2e=str(COUNTING.parent), door=door, explains="optimize" in door))
    return path


@pytest.mark.parametrize("mode", ["wait", "background", "after", "off"])
def test_a_run_draws_nothing(mode: str, tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite3"
    run = ["-m", "autofuse", "run", "--tune", mode, "--store", str(store), *QUICK]
    try:
        assert draws(tmp_path, [*run, "--set", "capture.at_once=true", str(script(tmp_path))]) == []
        if mode == "wait":  # what is stored is read, and its kernels run
            assert draws(tmp_path, [*run, str(script(tmp_path))]) == []
    finally:
        stop_daemon(store)


@pytest.mark.parametrize("door", DOORS)
def test_the_other_two_ways_in_draw_nothing(door: str, tmp_path: Path) -> None:
    """What `explain` brings does draw, and that is undone."""
    store = tmp_path / "s.sqlite3"
    try:
        found = draws(tmp_path, [str(script(tmp_path, DOORS[door]))], AUTOFUSE_STORE=str(store), AUTOFUSE_TUNE="off")
    finally:
        stop_daemon(store)
    if door == "optimize":
        assert [line for line in found if " undone-0: " in line]
        found = [line for line in found if "rich/style.py" not in line and " undone-0: " not in line]
    assert found == []


def test_a_block_and_its_report_move_no_generator(tmp_path: Path) -> None:
    """The report brings rich, which draws where it is imported."""
    path = tmp_path / "train.py"
    path.write_text(
        "import random, sys, torch, numpy as np, autofuse\n"
        "random.seed(1), np.random.seed(1), torch.manual_seed(1)\n"
        "if sys.argv[1:]:\n"
        "    with autofuse.session(store=sys.argv[1], tune='off') as part:\n"
        "        assert 'rich.console' not in sys.modules\n"
        "        part.report()\n"
        "    part.report()\n"
        "    assert 'rich.console' in sys.modules\n"
        "print(random.random(), np.random.rand(), torch.rand(()).item())\n"
    )
    command = [sys.executable, str(path)]
    plain, ours = (
        subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
        for arguments in ([], [str(tmp_path / "s.sqlite3")])
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout and plain.stdout


def test_a_store_of_an_older_version_is_brought_up_without_a_draw(tmp_path: Path) -> None:
    """Alembic and what it brings are imported on the background thread, which could undo nothing."""
    store = tmp_path / "s.sqlite3"
    with sqlite3.connect(store) as connection:
        connection.executescript(sorted(ASSETS.glob("*.sql"))[0].read_text())
    connection.close()
    run = ["-m", "autofuse", "run", "--tune", "off", "--store", str(store), str(script(tmp_path))]
    assert draws(tmp_path, run) == []
    with sqlite3.connect(store) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() > (1,)
    connection.close()


# ---- where modules are imported late ------------------------------------------------------------------------------

# Late imports outside of a guarded block, by file or folder, and the imported if not all: why they move nothing of a
# script's.
UNGUARDED = {
    ("__main__.py", ""): "before the script",
    ("cli/", ""): "commands without a script, or before it",
    ("codegen/triton/", ""): "processes of the tuner and tests; scripts never import Triton",
    ("db/connection.py", ""): "on the background thread, where nothing could be undone: a test above runs it",
    ("db/serve.py", ""): "a process of its own",
    ("db/fleet_server.py", ""): "a fleet's server, to which only daemons and commands speak",
    ("db/base.py", "from sqlalchemy.dialects import postgresql"): "the same",
    ("startup/launchers.py", ""): "before the launcher of ranks, which runs no code of a script's",
    ("runtime/graphs/graph_runner.py", "from autofuse.wrapper"): "modules that the first graph has loaded",
    ("observer/module_calls.py", "from torch._dynamo.callback"): "a module of Dynamo, which is at work then",
    ("doctor.py", ""): "a command without a script",
    ("integrations/ray_cluster.py", "import ray"): "a command without a script, and a process of Ray's",
    ("daemon/", ""): "the daemon's process",
    ("optim/tensors.py", "importlib.import_module(f'torch.optim."): "modules that torch has loaded",
    ("runtime/optimizers/hook.py", "importlib.import_module(f'torch.optim."): "modules that torch has loaded",
    ("process/probe.py", ""): "a process of its own",
    ("process/apply.py", ""): "before the script",
    ("dynamo_skip.py", "from torch._C."): "a name of a module that torch has loaded",
    ("torch_compat.py", "importlib.import_module("): "a process of doctor's own",
}


def late_imports(tree: ast.AST, is_guarded: bool = False, is_late: bool = False) -> list[str]:
    """Imports in functions that stand in no ``with untouched():`` block."""
    found = []
    for node in ast.iter_child_nodes(tree):
        is_block = isinstance(node, ast.With) and any(ast.unparse(i).endswith("untouched()") for i in node.items)
        guarded = is_guarded or is_block
        late = is_late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_import = isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
        )
        if is_import and late and not guarded:
            found.append(ast.unparse(node))
        found += late_imports(node, guarded, late)
    return found


def test_late_imports_stand_in_guarded_blocks() -> None:
    used, found = set(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for text in late_imports(ast.parse(path.read_text())):
            keys = [key for key in UNGUARDED if name.startswith(key[0]) and text.startswith(key[1])]
            used |= set(keys)
            if not keys:
                found.append((name, text))
    assert found == []
    assert used == set(UNGUARDED)  # no exception outlives its reason


# ---- what a model draws itself ---------------------------------------------------------------------------------------

DRAWING = """
import random, numpy as np, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        x = self.a(x)
        if np.random.rand() < 0.3:  # a layer left out, as some models do in training
            return x
        x = x * float(np.random.uniform(0.9, 1.1)) + int(np.random.randint(0, 5, size=3).sum())
        return self.b(torch.nn.functional.dropout(x, 0.1)) * random.uniform(0.5, 1.0)

torch.manual_seed(0), np.random.seed(0), random.seed(0)
model = Model()
for step in range(12):
    y = model(torch.randn(32 + step % 3, 64))
    y.sum().backward()
    print(y.sum().item(), random.random(), np.random.rand(), torch.rand(()).item())
"""


def test_what_a_forward_draws_comes_from_the_generators_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DRAWING)
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    command = ["-m", "autofuse", "run", "--tune", "off", "--store", str(tmp_path / "s"), "--set"]
    ours = subprocess.run(
        [sys.executable, *command, "capture.at_once=true", str(path)], capture_output=True, text=True, timeout=300
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout and plain.stdout
