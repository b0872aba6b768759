"""What the benchmark of whole scripts makes of its runs: totals, stalls, losses; and each script runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import forked

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def foreign() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("foreign", BENCHMARKS / "foreign.py")
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules["foreign"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("foreign", None)


def a_run(foreign: Any, kind: str, steps: list[float], losses: list[float] | None = None, **more: Any) -> Any:
    """Steps of so many seconds, after a launch of 2 s."""
    at = [2.0 + sum(steps[: number + 1]) for number in range(len(steps))]
    values = losses or [1.0] * len(steps)
    return foreign.Run("some", 0, kind, len(steps), at, values, at[-1] + 0.5, 0, **more)


def report(**root: Any) -> dict[str, Any]:
    known = {"name": "Net", "state": "captured", "reason": "paid_off", "capture_seconds": 0.0}
    return {"totals": {"paused_seconds": 0.0}, "roots": [known | {"predicted_capture_seconds": 0.0} | root]}


def test_the_true_cost_is_what_steps_lost_from_the_first_stall_on(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 30)
    # A sampled step before the capture, the capture, a slow step after it, then twice as fast.
    slow = [0.1] * 5 + [0.19] + [0.1] * 4 + [1.1, 0.4] + [0.05] * 18
    cold = a_run(foreign, "cold", slow, report=report(capture_seconds=1.2, predicted_capture_seconds=1.0))
    found = foreign.compare(plain, cold, plain)
    assert found.captured_at == 11
    assert found.true_seconds == pytest.approx(1.3)
    assert (found.predicted_seconds, found.reported_seconds) == (1.0, 1.2)
    assert found.steady == pytest.approx(2.0)
    assert found.worst_total == pytest.approx((2.0 + sum(slow[:12])) / (2.0 + 1.2))
    assert found.loss_difference == 0.0 and found.within_bound


def test_nothing_captured_is_no_capture_however_slow_a_step_was(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 12)
    cold = a_run(foreign, "cold", [0.1] * 6 + [0.5] + [0.1] * 5, report=report(state="observing"))
    assert foreign.compare(plain, cold, plain).captured_at == 0


def test_losses_may_differ_as_reordered_sums_do_and_no_more(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 3, [1.0, 1.0, 1.0])
    reordered = a_run(foreign, "reordered", [0.1] * 3, [1.0, 1.0 + 1e-5, 1.0])
    near = a_run(foreign, "warm", [0.1] * 3, [1.0, 1.0 + 1e-4, 1.0 + 1.9e-4])
    far = a_run(foreign, "warm", [0.1] * 3, [1.0 + 2.1e-4, 1.0, 1.0])
    broken = a_run(foreign, "warm", [0.1] * 3, [1.0, float("nan"), 1.0])
    assert foreign.compare(plain, near, reordered).within_bound
    assert not foreign.compare(plain, far, reordered).within_bound
    assert not foreign.compare(plain, broken, reordered).within_bound


def test_reordered_sums_may_drift_later(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 4)
    reordered = a_run(foreign, "reordered", [0.1] * 4, [1.0, 1.0, 1.0, 1.0 + 1e-5])
    near = a_run(foreign, "warm", [0.1] * 4, [1.0, 1.0 + 1.9e-4, 1.0, 1.0])
    far = a_run(foreign, "warm", [0.1] * 4, [1.0 + 1.9e-4, 1.0, 1.0, 1.0])
    assert foreign.compare(plain, near, reordered).within_bound
    assert not foreign.compare(plain, far, reordered).within_bound


def test_beyond_the_reordered_run_the_bound_stays(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 4)
    reordered = a_run(foreign, "reordered", [0.1] * 2, [1.0, 1.0 + 1e-5])
    near = a_run(foreign, "warm", [0.1] * 4, [1.0, 1.0, 1.0, 1.0 + 1.9e-4])
    far = a_run(foreign, "warm", [0.1] * 4, [1.0, 1.0, 1.0, 1.0 + 2.1e-4])
    assert foreign.compare(plain, near, reordered).within_bound
    assert not foreign.compare(plain, far, reordered).within_bound


def test_a_run_that_ended_early_is_no_comparison(foreign: Any) -> None:
    plain = a_run(foreign, "plain", [0.1] * 4)
    short = a_run(foreign, "cold", [0.1] * 4, errors="boom")
    short.at.pop()
    with pytest.raises(ValueError, match=r"cold: 3 of 4 steps.*boom"):
        foreign.compare(plain, short, plain)


@pytest.mark.parametrize("name", [path.stem for path in sorted((BENCHMARKS / "foreign_scripts").glob("*.py"))])
def test_each_script_prints_a_line_a_step(foreign: Any, name: str) -> None:
    script = next(s for s in foreign.TABLE if s.name == name)
    if script.needs and importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"needs {script.needs}")
    done = forked.run(*script.command(2))
    assert done.returncode == 0, done.stderr
    assert [int(m[1]) for line in done.stdout.splitlines() if (m := foreign.LINE.match(line))] == [1, 2]
