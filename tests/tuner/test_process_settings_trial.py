"""A trial of malloc's thresholds on recorded nodes, in real processes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from autofuse.db.store import Store
from autofuse.errors import AutofuseError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import NodeUse, ObservedShape, RunStart
from autofuse.settings import Settings, load
from autofuse.tuner.buckets import bucket_of
from autofuse.tuner.process_settings_trial import REASON, REPEATS, measure_process_settings, step_of
from tests.tuner.nodes import chain_form, request

FORM = chain_form(4)


def use(values: tuple[int, ...], calls: int) -> NodeUse:
    fusion_id = request(FORM, values).key.fusion_id
    shapes = (ObservedShape(values, calls),)
    return NodeUse(fusion_id, FORM.to_json(), "af_x", "mul + add", bucket_of(values), calls, 0, 10.0, 0.5, shapes)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({"run.store": tmp_path / "store.sqlite3"}, environ={}, cwd=tmp_path)


def test_a_step_repeats_what_layers_share_and_fits_in_memory() -> None:
    rows = step_of([use((8,), 10), use((64,), 40), use((16,), 10_000), use((10**6,), 99)], 1 << 30)
    assert [(values, times) for _, values, times in rows] == [((16,), REPEATS), ((64,), 4), ((8,), 1)]


def test_nothing_recorded(settings: Settings) -> None:
    with pytest.raises(AutofuseError, match="autofuse run"):
        measure_process_settings(settings)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_trial_is_measured_and_stored(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(settings.run.store) as store:
        run_id = store.start_run(RunStart("train.py --x", cpu_device(), "v", "wait", 1))
        store.put_node_uses(run_id, [use((512,), 40)])
        store.start_run(RunStart("other.py", cpu_device(), "v", "wait", 1))
    trial = measure_process_settings(settings)
    assert trial.workload == "train.py --x" and trial.device == cpu_device().key
    assert trial.baseline_us > 0 and trial.low <= trial.ratio <= trial.high
    assert trial.decision in ("on", "off") and trial.reason.endswith(REASON)
    with Store.open(settings.run.store) as store:
        assert store.setting_trials(run_id=run_id) == [trial]
