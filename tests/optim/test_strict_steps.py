"""Optimizer steps of strict runs: no variant wins that differs from what the script asked for in a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.codegen.knobs import CONTRACT, printed
from autofuse.ir.records import DecisionKey
from autofuse.ir.strict import strictly
from autofuse.optim.c_printer import print_step
from autofuse.optim.candidate import StepCandidate
from autofuse.optim.form import StepForm
from autofuse.optim.step_bench import compare_bits
from autofuse.optim.tune_step import C_MULTI, StepTuning
from autofuse.tuner.backends import CBackend
from autofuse.tuner.node_bench import CpuRunner
from tests.optim.test_c_printer import FLAGS, SIZES
from tests.optim.test_tune_step_on_gpus import FORM, LIMITS, request

CPU = CpuRunner()


def of_kernel(form: StepForm, contract: bool = False) -> StepCandidate:
    config, toolchain = (("chunk", 4096), (CONTRACT.name, contract)), find_toolchain()
    source = print_step(form, printed(config))
    return StepCandidate(C_MULTI, compile_source(source.text, toolchain, flags_for(toolchain, config)), source.name)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="eager rounds otherwise there")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("flags", FLAGS["sgd"], ids=lambda flags: "-".join(flags) or "plain")
def test_a_step_of_sgd_is_torchs_to_the_bit(flags: tuple[str, ...], dtype: str) -> None:
    form = StepForm("sgd", flags, dtype, SIZES)
    assert compare_bits(form, of_kernel(form), 1, CPU) == ""


def test_what_the_script_asked_for_agrees_with_itself_and_a_difference_is_told() -> None:
    form = StepForm("adam", ("amsgrad",), "float32", SIZES)
    assert compare_bits(form, StepCandidate("eager"), 1, CPU) == ""
    said = compare_bits(form, of_kernel(StepForm("adam", (), "float32", SIZES)), 1, CPU)
    assert said.startswith("output ") and "other bits" in said and "gradients, after" in said


class Given:
    """A worker whose candidates are all right; ``differing`` variants are not torch's to the bit."""

    pid = 1

    def __init__(
        self,
        differing: set[str],
        seconds: dict[str, float],
        dropped: frozenset[str] = frozenset(),
        threads: int = 0,
    ) -> None:
        """``seconds`` of the variants that were ``dropped`` were measured in few rounds, which say little."""
        self.differing = differing
        self.dropped = dropped
        self.threads = threads
        self.seconds = seconds
        self.asked: list[str] = []

    def start(self) -> None:
        pass

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "compare_step_bits":
            is_other = arguments["candidate"]["variant"] in self.differing
            return {"difference": "output 0 has other bits" if is_other else ""}
        if do == "race_steps":
            raced = [candidate["variant"] for candidate in arguments["candidates"]]
            samples = [[self.seconds[variant]] * (3 if variant in self.dropped else 40) for variant in raced]
            dropped = [False, *(variant in self.dropped for variant in raced)]
            return {"samples": [[9e-6] * 40, *samples], "dropped": dropped, "device": [], "threads": self.threads}
        return {"error_ratio": 1.0}


def tuned(worker: Given, is_for_strict_run: bool = True) -> Any:
    asked = request(FORM, "cpu:test")
    key: DecisionKey = asked.key
    if is_for_strict_run:
        key = replace(key, versions=strictly(key.versions))
    found = StepTuning(replace(asked, key=key), FORM, CBackend(find_toolchain()), worker, LIMITS)  # type: ignore[arg-type]
    outcome = found.run()
    return outcome.decisions, outcome


TIMES = {"foreach": 6e-6, "fused": 4e-6, C_MULTI: 3e-6}


def test_the_fastest_that_is_torchs_to_the_bit_wins() -> None:
    (decision,), outcome = tuned(Given({C_MULTI, "fused"}, TIMES))
    assert (decision.reason, decision.candidate.variant, decision.compile_key) == ("won", "foreach", None)
    assert decision.detail.endswith("c_multi would be 3.00x as fast as eager, but output 0 has other bits")
    states = {m.candidate.variant: m.status for m in outcome.measurements}
    assert states == {"foreach": "ok", "fused": "not_bit_equal", C_MULTI: "not_bit_equal"}


def test_where_all_differ_or_gain_nothing_the_step_stays_torchs() -> None:
    (decision,), _ = tuned(Given({C_MULTI, "fused", "foreach"}, TIMES))
    assert (decision.reason, decision.candidate.variant) == ("not_bit_equal", "eager")
    (decision,), _ = tuned(Given({C_MULTI}, {**TIMES, "foreach": 1e-5, "fused": 1e-5}))
    assert (decision.reason, decision.speedup) == ("not_bit_equal", pytest.approx(3.0))
    (decision,), _ = tuned(Given({C_MULTI}, dict.fromkeys(TIMES, 1e-5)))
    assert decision.reason == "no_gain"


def test_usual_runs_do_not_ask_for_bits() -> None:
    worker = Given({C_MULTI}, TIMES)
    (decision,), _ = tuned(worker, is_for_strict_run=False)
    assert decision.candidate.variant == C_MULTI and "compare_step_bits" not in worker.asked
