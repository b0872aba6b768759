"""A launcher of ranks starts them under autofuse, with the options of the command; else it runs as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autofuse.startup.launchers import as_module, is_launcher, with_ranks
from autofuse.startup.script import Target

ROOT = Path(__file__).resolve().parents[2]
RUN = "torch.distributed.run"


def torchrun(*words: str) -> Target:
    return as_module(Target("torchrun", words))


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("train.py", "--module autofuse run --tune off train.py"),
        ("--nproc-per-node 2 train.py --lr 1", "--nproc-per-node 2 --module autofuse run --tune off train.py --lr 1"),
        ("--nnodes=1 -m pkg.train -m x", "--nnodes=1 -m autofuse run --tune off -m pkg.train -m x"),
        ("--standalone train.py train.py", "--standalone --module autofuse run --tune off train.py train.py"),
    ],
)
def test_the_script_is_found_among_the_launchers_words(words: str, ranks: str) -> None:
    found, why_not = with_ranks(torchrun(*words.split()), ["--tune", "off"])
    assert (found.name, " ".join(found.arguments), why_not) == (RUN, ranks, "")
    assert RUN not in sys.modules, "python -m would warn"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--no-python ./train.sh", "with --no-python it starts no python"),
        ("--run-path train.py", "with --run-path it starts no python"),
        ("--nproc-per-node 2", ""),  # without a script it says so itself
        ("--help", ""),
    ],
)
def test_else_it_is_left_alone(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = torchrun(*words.split())
    found, why_not = with_ranks(target, ["--tune", "off"])
    assert found == target and why_not.startswith(reason) and bool(why_not) == bool(reason)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "module"),
    [
        (Target("/usr/bin/torchrun", ("a.py",)), RUN),
        (Target(RUN, ("a.py",), is_module=True), RUN),
        (Target("accelerate", ("launch", "a.py")), "accelerate.commands.launch"),
        (Target("accelerate", ("config",)), None),
        (Target("train.py", ("torchrun",)), None),
        (Target("torchrun.py"), None),
    ],
)
def test_launchers_by_their_commands(target: Target, module: str | None) -> None:
    found = as_module(target)
    assert is_launcher(found) == (module is not None) and (module is None or found.name == module)


def test_accelerates_own_parser_is_understood(tmp_path: Path) -> None:
    pytest.importorskip("accelerate.commands.launch")
    found, why_not = with_ranks(as_module(Target("accelerate", ("launch", "--cpu", "a.py", "--x"))), ["-q"])
    assert (found.arguments, why_not) == (("--cpu", "--module", "autofuse", "run", "-q", "a.py", "--x"), "")


SCRIPT = """
import json, os, pathlib, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
from autofuse.runtime.session import running_session
found = [sys.argv, dist.get_world_size(), running_session() is not None, __name__, sys.path[0]]
pathlib.Path(__file__).with_name(f"rank{dist.get_rank()}").write_text(json.dumps(found))
processes = [None, None]
dist.all_gather_object(processes, os.getpid())
dist.destroy_process_group()
while os.environ["RANK"] == "1" and os.path.exists(f"/proc/{processes[0]}"):
    time.sleep(0.05)  # torchrun ends rank 0, perhaps before its line, as soon as rank 1 has failed
sys.exit(int(sys.argv[-1]) if os.environ["RANK"] == "1" else 0)
"""


TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


@pytest.mark.parametrize(("words", "code"), [(TORCHRUN, 0), (TORCHRUN, 3), (ACCELERATE, 0)])
def test_two_ranks_run_under_autofuse(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    if words is ACCELERATE:
        pytest.importorskip("accelerate")
    script, store = tmp_path / "train.py", tmp_path / "kept" / "s.sqlite3"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", str(store), *words]
    done = subprocess.run([*command, str(script), "--lr", str(code)], capture_output=True, text=True, timeout=120)
    assert bool(done.returncode) == bool(code), done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("autofuse:")]
    assert len(ours) == 1, "rank 0 speaks for all"
    for rank in range(2):
        expected = [[str(script), "--lr", str(code)], 2, True, "__main__", str(tmp_path)]
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == expected
