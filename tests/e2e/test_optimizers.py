"""Optimizers under `autofuse run`: the results, the states and the saved files are those of plain python."""

import re
from pathlib import Path

import pytest
import torch

from autofuse.db.store import Store
from tests.e2e.commands import stop_daemon
from tests.e2e.test_whole_runs import QUICK, autofuse, run

SCRIPT = Path(__file__).with_name("optimizers.py")
NAMES = ("AdamW", "SGD", "RMSprop", "Adagrad")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    store = folder / "store.sqlite3"
    plain = run(SCRIPT, folder / "plain.pt", *NAMES)
    assert plain.returncode == 0, plain.stderr
    steps_only = (*QUICK, "--set", "capture.min_root_us=1e9")
    result = autofuse("run", "--tune", "wait", "--store", store, *steps_only, SCRIPT, folder / "ours.pt", *NAMES)
    stop_daemon(store)
    assert result.returncode == 0, result.stderr
    with Store.open(store) as opened:
        decisions = [
            d for _, d in opened.results.decisions() if d.candidate.variant in ("eager", "c_multi", "foreach", "fused")
        ]
        kernels = {d.key.fusion_id: d for d in decisions}
    return torch.load(folder / "plain.pt"), torch.load(folder / "ours.pt"), kernels, result, store


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_states_are_those_of_torch(results, name):
    plain, ours, *_ = results
    expected, found = plain[name], ours[name]
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, rtol=1e-4, atol=1e-5)
    assert expected["optimizer"]["param_groups"] == found["optimizer"]["param_groups"]
    assert expected["optimizer"]["state"].keys() == found["optimizer"]["state"].keys()
    for number, state in expected["optimizer"]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(found["optimizer"]["state"][number][key], value, rtol=1e-3, atol=1e-5)


def test_the_daemon_decides_on_steps_and_kernels_run(results):
    _, _, decisions, result, store = results
    label = next(d.key.fusion_id for d in decisions.values() if d.candidate.variant != "eager")[:6]
    won = [d for d in decisions.values() if d.reason == "won" and d.bucket.label == "static"]
    assert won and all(d.speedup > 1.0 for d in won)
    shown = autofuse("report", "--json", "--store", store)
    assert "af_optimizer_adamw" in shown.stdout and "af_optimizer_sgd" in shown.stdout
    name = re.search(rf"af_optimizer_\w+_{label}", shown.stdout)
    assert name is not None
    told = autofuse("explain", "--store", store, name.group())
    assert told.returncode == 0 and "paired rounds" in told.stdout, told.stderr
    assert "Traceback" not in result.stderr
