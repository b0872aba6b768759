"""What is imported while a script runs must not be the script's own modules of the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autofuse.startup import deferred_imports

SCRIPT = """
import torch
import html
assert html.mine
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("done")
"""


def test_the_list_names_all_that_is_imported_late() -> None:
    code = """
import sys
import autofuse.cli.app, autofuse.cli.run, autofuse.cli.launch, torch, torch.optim
import autofuse.process.apply, autofuse.runtime.session
from autofuse.startup import deferred_imports as late
before = {name.partition(".")[0] for name in sys.modules}
late.shadowed = lambda folder: ["nothing of that name"]
late.import_now_for("")
new = {name.partition(".")[0] for name in sys.modules} - before
print(*(n for n in sorted(new) if "cython" not in n and n not in late.NAMES))
print(*(n for n in ("alembic", "sympy", "optuna", "triton") if n in before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["functorch", "sympy"])
def test_beside_a_module_that_tracing_would_import_the_script_runs_without_us(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("print('executed')")
    (tmp_path / "html.py").write_text("mine = True")
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True)
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", str(tmp_path / "s.sqlite3")]
    done = subprocess.run(
        [*command, "--set", "capture.at_once=true", str(tmp_path / "train.py")], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode), done.stderr
    assert f"torch imports {name} to trace" in done.stderr and "Rename that module." in done.stderr


def test_a_folder_with_such_names(tmp_path: Path) -> None:
    (tmp_path / "configparser").mkdir()  # no module
    assert not deferred_imports.shadowed(str(tmp_path))
    for name in ("alembic", "mako", "markupsafe"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "html.py").write_text("mine = True")
    assert deferred_imports.shadowed(str(tmp_path)) == ["alembic", "html", "mako", "markupsafe"]
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", str(tmp_path / "s.sqlite3")]
    done = subprocess.run(
        [*command, "--set", "capture.at_once=true", str(tmp_path / "train.py")], capture_output=True, text=True
    )
    assert done.stdout == "done\n" and "not this one" not in done.stderr and done.returncode == 0, done.stderr
    told = subprocess.run(
        [sys.executable, "-m", "autofuse", "report", "--verbose", "--store", str(tmp_path / "s.sqlite3")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "capture" in told.stdout and "6" in told.stdout
