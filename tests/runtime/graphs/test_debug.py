"""``run.debug``: each level tells what is said of it and what the lower ones tell, on stderr alone; level 0 nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autofuse import debug
from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.debug import Level, set_level, tell
from autofuse.errors import CompilerError
from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.runtime.kernels.catalogue import KernelShelf
from autofuse.sessions import start_session
from autofuse.settings.groups import RunSettings
from autofuse.settings.layers import load

AT_ONCE = {
    "run.tune": "off",
    "capture.at_once": True,
    "capture.min_inference_root_us": 0.0,
    "capture.held_out_share": 0.0,
    "capture.keep_graphs": False,
}


class Model(nn.Module):
    """One node, and one operation that is none."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x * 2.0 + 1.0, -1), x.neg()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    texts: list[str] = []
    monkeypatch.setattr(debug, "say", texts.append)
    yield texts
    set_level(0)


def run(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool = False) -> None:
    """A module is captured and called, each call timed; one more failure is reported."""
    monkeypatch.setattr("autofuse.runtime.graphs.step_records.TIMED_ONE_IN", 1)
    monkeypatch.setattr("autofuse.runtime.run_context.say", lambda text: None)
    torch._dynamo.reset()
    values = AT_ONCE | {"run.debug": level, "run.quiet": quiet, "run.store": tmp_path / "store.sqlite3"}
    session = start_session(load(values, {}, tmp_path), "test")
    try:
        model, x = Model().eval(), torch.randn(8, 16)
        with torch.no_grad():
            for _ in range(4):
                model(x)
        session.context.report_fallback("no_peaks", "a failure", ValueError("of the test"))
    finally:
        session.finish(None)
        torch._dynamo.reset()


# What begins a text, or is in it, by its level.
SIGNS = {
    Level.ROUTES: (
        "Model: observing, now captured: captured at its first call, as asked for (capture.at_once is set)",
        "inference graph: fused 0 of 1\n  af_",
        ": eager, not decided yet",
    ),
    Level.TIMINGS: (" calls, ", " us, eager"),
    Level.PLAN: (
        *("inference graph, nodes: 1\n  af_", "  not fused: ", "ValueError: of the test"),
        *("fused in this run so far: kernels 1, ", "fused in this process: kernels "),
    ),
    Level.SOURCE: ("generated call of a graph:\n", "def call("),
    Level.GRAPHS: ("Dynamo's graph:\n", "inference graph of AOTAutograd:\n", "inference graph, as planned:\n"),
    Level.COMPILER: (),
}


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4, 5])
def test_a_level_tells_what_is_said_of_it_and_of_the_lower_ones(
    level: int, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(level, tmp_path, monkeypatch)
    text = "\n".join(told)
    for of, signs in SIGNS.items():
        assert all((sign in text) == (of <= level) for sign in signs), (of, text)
    assert bool(told) == bool(level)
    assert capfd.readouterr().out == ""


def test_quiet_is_quiet(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(6, tmp_path, monkeypatch, quiet=True)
    assert not told


@pytest.mark.parametrize("level", [3, 4])
def test_the_source_of_a_kernel_is_told_when_it_is_loaded(level: int, told: list[str]) -> None:
    set_level(level)
    shelf = KernelShelf(lambda record, device: lambda *args: None)
    shelf.add("d" * 64, KernelRecord(CompileKey("s", "cc", "", "t"), "af_relu", "void af_relu(void) {}", b""))
    for _ in range(2):
        shelf.entry("d" * 64, torch.device("cpu"))
    assert told == ([f"kernel af_relu ({'d' * 12}):\nvoid af_relu(void) {{}}"] if level >= Level.SOURCE else [])


@pytest.mark.parametrize("tend", [None, lambda process: 0.0], ids=["plain", "tended"])
@pytest.mark.parametrize("level", [5, 6])
def test_what_the_compiler_says_is_told(level: int, tend: Callable[[int], float] | None, told: list[str]) -> None:
    toolchain = find_toolchain()
    set_level(level)
    with pytest.raises(CompilerError):
        compile_source("int broken(", toolchain, ("-shared",), tend=tend)
    assert len(told) == (level >= Level.COMPILER)
    assert all("kernel.c" in text and "exit code 1\n" in text and "error: " in text for text in told)


def test_no_text_is_made_below_its_level_and_a_text_that_fails_is_left_out(told: list[str]) -> None:
    made: list[int] = []
    for level in range(7):
        set_level(level)
        for of in Level:
            tell(of, lambda of=of: made.append(of) or f"{of.name}")  # type: ignore[misc]
        assert made == [of.value for of in Level if of <= level] == [Level[text].value for text in told]
        made.clear()
        told.clear()
    tell(Level.ROUTES, lambda: str(1 / 0))
    assert not told


def test_the_setting_says_what_the_levels_are() -> None:
    words = ("routes", "timings", "plan with reasons", "source", "graphs", "compiler output")
    expected = ", ".join(f"{level.value} {name}" for level, name in zip(Level, words, strict=True))
    assert expected in str(RunSettings.model_fields["debug"].description)
