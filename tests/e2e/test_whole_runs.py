"""Whole runs as a person starts them: a real script, a real daemon, a real store, and what may go wrong with each.

The script's losses are the measure: with autofuse they agree with plain python's to float32 rounding, whatever fails.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autofuse.db.store import Store
from autofuse.ir.records import EAGER
from tests import forked
from tests.e2e.commands import report, stop_daemon

SCRIPT = Path(__file__).with_name("small_lm.py")
# Losses of a dozen steps: each step's kernels differ from eager's by a few units in the last place (6e-8 relative),
# AdamW divides gradients by their own size, so small ones carry their rounding into the weights; 1e-4 leaves room.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected():
    return [float(line) for line in new(SCRIPT).stdout.split()]


def run(*command, **environment):
    """A child of a process that has torch."""
    return forked.run(*command, environment={**os.environ, **environment})


def autofuse(*arguments, **environment):
    return run("-m", "autofuse", *arguments, **environment)


def new(*command, **environment):
    """As a person starts it."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, timeout=300)


QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.idle_exit_seconds=20")


def check_losses(result, expected, tolerance=TOLERANCE):
    assert result.returncode == 0, result.stderr
    losses = [float(line) for line in result.stdout.split()]
    assert len(losses) == len(expected)
    for loss, wanted in zip(losses, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=tolerance)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, expected):
    """A store that one waiting run has filled, and that run's result."""
    store = tmp_path_factory.mktemp("store") / "store.sqlite3"
    result = new("-m", "autofuse", "run", "--tune", "wait", "--store", store, *QUICK, SCRIPT)
    yield store, result
    stop_daemon(store)


def test_a_waiting_run_tunes_and_fuses(tuned, expected):
    store, result = tuned
    check_losses(result, expected)
    found = report(store)
    assert found["schema_version"] and found["totals"]["steps"] == 12
    assert found["totals"]["fused_calls"] > 0 and found["totals"]["tuning_seconds"] > 0
    assert found["totals"]["capture_seconds"] > 0
    assert found["totals"]["paused_seconds"] > 0
    wanted = {
        "node", "operations", "bucket", "calls", "time_share", "unfused_us", "fused_us",
        "speedup", "speedup_low", "speedup_high", "variant", "decision", "reason",
    }  # fmt: skip
    assert found["nodes"] and all(wanted <= set(row) for row in found["nodes"])


def test_the_second_run_fuses_from_its_first_call_and_tunes_nothing(tuned, expected):
    store, _ = tuned
    first = report(store)
    result = new("-m", "autofuse", "run", "--tune", "wait", "--store", store, *QUICK, SCRIPT)
    check_losses(result, expected)
    second = report(store)
    assert second["run"]["id"] != first["run"]["id"]
    assert second["totals"]["tuning_seconds"] == 0
    assert second["totals"]["fused_calls"] > first["totals"]["fused_calls"]
    (root,) = [r for r in second["roots"] if r["name"] == "Model"]
    assert root["reason"] in ("known_to_pay", "kept_trace")


def test_frozen_and_off_use_what_is_stored(tuned, expected):
    store, _ = tuned
    for option in (("--frozen",), ("--tune", "off", "--set", "capture.at_once=true")):
        check_losses(autofuse("run", *option, "--store", store, SCRIPT), expected)
        found = report(store)
        assert found["totals"]["fused_calls"] > 0 and not any(found["queue"].values())  # this run asked for nothing


# Dynamo reads what a session changes of all module calls where a module has a hook.
HOOKED = "model = Model(); next(model.children()).register_forward_pre_hook(lambda module, given: None); "


def test_the_other_two_ways_in(tuned, tmp_path, expected):
    store, _ = tuned
    text = SCRIPT.read_text()
    for name, line in (
        ("backend", f'{HOOKED}model = torch.compile(model, backend="autofuse")'),
        ("optimize", "import autofuse; model = autofuse.optimize(Model())"),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text(text.replace("model = Model()", line))
        result = new(script, AUTOFUSE_STORE=str(store), AUTOFUSE_TUNE="off")
        check_losses(result, expected)
        assert report(store)["totals"]["fused_calls"] > 0, name
        disabled = new(script, AUTOFUSE_STORE=str(store), AUTOFUSE_DISABLE="1")
        assert [float(x) for x in disabled.stdout.split()] == expected


def test_background_and_after_mode_leave_work_to_the_daemon(tmp_path):
    store = tmp_path / "s.sqlite3"
    # Whether a capture pays, and which steps are the faster ones, is up to the machine: neither is asked here.
    options = ("--set", "capture.at_once=true", "--set", "capture.held_out_share=0", *QUICK)
    long = [float(line) for line in run(SCRIPT, 60).stdout.split()]
    try:
        result = autofuse("run", "--tune", "after", "--store", store, *options, SCRIPT, 60)
        check_losses(result, long, tolerance=1e-3)  # rounding grows over the steps
        deadline = time.monotonic() + 120
        with Store.open(store) as opened:
            while not has_tuned(opened) and time.monotonic() < deadline:
                time.sleep(0.2)
        found = report(store)
        assert found["queue"]["done"] > 0 and found["totals"]["fused_calls"] == 0
    finally:
        stop_daemon(store)
    result = autofuse("run", "--tune", "background", "--store", store, *options, SCRIPT, 60)
    check_losses(result, long, tolerance=1e-3)
    stop_daemon(store)
    assert report(store)["totals"]["fused_calls"] > 0


def has_tuned(store):
    """Whether a run on this store has something to fuse, or will never have."""
    won = [d for _, d in store.results.decisions() if d.candidate.variant != EAGER]
    length = store.queue.length()
    return len(won) >= 4 or (length.done and not length.queued and not length.running)


def one_line(result, *words):
    """Exactly one line of ours names the trouble."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("autofuse:")]
    found = [line for line in lines if all(word in line for word in words)]
    assert len(found) == 1, result.stderr
    assert "incomplete" not in result.stderr


def test_garbage_instead_of_a_store(tmp_path, expected):
    store = tmp_path / "s.sqlite3"
    store.write_bytes(b"this is no database" * 1000)
    result = autofuse("run", "--tune", "wait", "--store", store, SCRIPT)
    check_losses(result, expected)
    one_line(result, str(store))
    assert store.read_bytes().startswith(b"this is no database")


def test_a_directory_that_cannot_be_written(tmp_path, expected):
    if os.getuid() == 0:
        folder = Path("/proc/autofuse")  # root may write anywhere but here
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o555)
    result = autofuse("run", "--tune", "wait", "--store", folder / "s.sqlite3", SCRIPT)
    check_losses(result, expected)
    one_line(result, str(folder))


def test_no_compiler(tmp_path, expected):
    result = autofuse("run", "--tune", "wait", "--store", tmp_path / "s", SCRIPT, AUTOFUSE_CC=str(tmp_path / "no-cc"))
    check_losses(result, expected)
    one_line(result, "no-cc")
    assert report(tmp_path / "s")["totals"]["fused_calls"] == 0


def test_a_full_disk(tmp_path, expected):
    """Files may not grow beyond 300 kB: the store can be made but not filled."""
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "sys.argv = sys.argv[1:]; runpy.run_module('autofuse', run_name='__main__')"
    )
    command = ("-c", code, "autofuse", "run", "--tune", "wait", "--store", tmp_path / "s")
    result = new(*command, *QUICK, SCRIPT)
    check_losses(result, expected)
    assert [line for line in result.stderr.splitlines() if line.startswith("autofuse:")]
    stop_daemon(tmp_path / "s")


def test_kill_9_on_the_daemon_in_mid_tuning(tmp_path, expected):
    store = tmp_path / "s.sqlite3"
    options = (*QUICK, "--set", "tuner.budget_seconds=40")
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "wait", "--store", str(store), *options, str(SCRIPT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (pid_files := list(tmp_path.glob("*.pid"))):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        time.sleep(1.0)
        os.kill(json.loads(pid_files[0].read_text())["pid"], signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        stop_daemon(store)
    result = subprocess.CompletedProcess(command, process.returncode, out, err)
    check_losses(result, expected)
    one_line(result, "daemon ended")
    assert report(store)["totals"]["fused_calls"] > 0


def test_a_script_that_compiles_itself_stays_compiled(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "graphs = []\n"
        "def backend(gm, inputs):\n    graphs.append(gm)\n    return gm.forward\n"
        "model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), backend=backend)\n"
        "other = torch.nn.Linear(8, 8)\n"
        "for _ in range(6):\n    y = other(model(torch.ones(4, 8)))\n"
        "print(len(graphs), counters['stats']['unique_graphs'])\n"
    )
    plain = run(script)
    routed = autofuse("run", "--tune", "off", "--store", tmp_path / "s", script)
    assert plain.stdout == routed.stdout and plain.stdout.split()[0] == "1", routed.stderr


def test_a_module_that_cannot_be_captured_stays_eager_with_the_reason(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        import sys\n"
        "        frame = sys._getframe()\n"
        "        y = self.a(x)\n"
        "        print(round(float(y.sum()) * 0 + len(str(type(frame))), 3))\n"
        "        return y\n"
        "torch.manual_seed(0)\n"
        "m = Odd()\n"
        "for i in range(6):\n    m(torch.ones(3 + i, 8)).sum().backward()\n"
        "print(float(m.a.weight.grad.sum()))\n"
    )
    plain = run(script)
    routed = autofuse("run", "--tune", "wait", "--store", tmp_path / "s", *QUICK, script)
    assert routed.returncode == 0, routed.stderr
    assert routed.stdout.split()[:-1] == plain.stdout.split()[:-1]
    assert float(routed.stdout.split()[-1]) == pytest.approx(float(plain.stdout.split()[-1]), rel=1e-5)
    stop_daemon(tmp_path / "s")
