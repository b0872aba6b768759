"""A block under autofuse, with a report, and eager behind it; the doors of notebooks, trainers and trackers."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofuse
from autofuse.errors import SettingsError
from autofuse.integrations import ipython, sinks, trainers
from autofuse.integrations.watched import Watched, metrics_of, watched
from autofuse.report.report import load_report
from autofuse.runtime.session import running_session
from tests.report.report_records import fill, open_store


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(torch.nn.functional.gelu(self.layer(x)) * 2.0 + x) * 0.5).tanh()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    assert running_session() is None
    yield tmp_path
    assert running_session() is None


def steps(model: nn.Module, count: int = 12) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [model(torch.randn(32, 256)).detach() for _ in range(count)]


def test_a_block_is_watched_and_what_comes_behind_is_eager(folder: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = steps(model)
    store = folder / "store.sqlite3"
    with autofuse.session(store=store, tune="off") as part:
        assert running_session() is not None
        autofuse.optimize(model)
        found = steps(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with open_store(store) as opened:
        report = load_report(opened, part.run_id)
    assert {root.name: root.state for root in report.roots} == {"Net": "captured"}
    assert report.run is not None and report.run.totals.exit_code == 0 and report.run.finished_at is not None
    assert f"Run {part.run_id}: " in part.report()
    again = steps(model)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_an_error_of_the_block_is_the_blocks(folder: Path) -> None:
    store = folder / "store.sqlite3"
    part = autofuse.session(store=store, tune="off")
    with pytest.raises(ZeroDivisionError), part:
        1 / 0  # noqa: B018
    with open_store(store) as opened:
        assert opened.runs.get(part.run_id or 0).totals.exit_code == 1


def test_two_blocks_one_after_the_other_are_two_runs(folder: Path) -> None:
    numbers = []
    for _ in range(2):
        with autofuse.session(store=folder / "store.sqlite3", tune="off") as part:
            steps(Net(), 2)
        numbers.append(part.run_id)
    assert len(set(numbers)) == 2


def test_a_session_that_goes_on_is_used_and_left(folder: Path) -> None:
    with autofuse.session(store=folder / "outer.sqlite3", tune="off") as outer:
        session = running_session()
        with autofuse.session(store=folder / "inner.sqlite3") as inner:
            assert running_session() is session
        assert running_session() is session
        assert not (folder / "inner.sqlite3").exists()
    assert inner.run_id == outer.run_id


def test_switched_off_it_is_nothing(folder: Path) -> None:
    with autofuse.session(store=folder / "store.sqlite3", run__disable=True) as part:
        assert running_session() is None
    assert "switched off" in part.report() and part.metrics() == {} and not (folder / "store.sqlite3").exists()


def test_a_session_that_cannot_begin_leaves_the_block_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from autofuse import sessions

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "start_session", lambda *args: 1 / 0)
        with autofuse.session(store=folder / "store.sqlite3") as part:
            done = steps(Net(), 1)
    assert len(done) == 1 and part.run_id is None
    assert "the code runs without autofuse (ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("given", [{"tune": "sometimes"}, {"tuner__no_such": 1}])
def test_settings_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        autofuse.session(**given)


# ---- notebooks ---------------------------------------------------------------------------------------------


class Shell:
    """As much of IPython's shell as the extension uses."""

    def __init__(self) -> None:
        self.magics: dict[tuple[str, str], Any] = {}
        self.names: dict[str, Any] = {}

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_kind, magic_name] = function

    def run_cell(self, cell: str) -> Any:
        try:
            exec(cell, self.names)
        except Exception:
            return types.SimpleNamespace(success=False)
        return types.SimpleNamespace(success=True)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr(ipython, "_last", [])
    made = Shell()
    autofuse.load_ipython_extension(made)
    return made


def test_a_cell_runs_in_the_notebooks_names_and_reports(
    shell: Shell, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.magics["line", "autofuse"]("")
    assert "Nothing has run under autofuse yet" in capsys.readouterr().out
    shell.magics["cell", "autofuse"](f"--tune off --store {folder / 'n.sqlite3'}", "value = 6 * 7")
    assert shell.names["value"] == 42 and "Run 1: " in capsys.readouterr().out
    shell.magics["line", "autofuse"]("")
    assert "Run 1: " in capsys.readouterr().out


def test_a_cell_that_raises_prints_no_report(shell: Shell, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell.magics["cell", "autofuse"](f"--tune off --store {folder / 'n.sqlite3'}", "1 / 0")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", ["--tune never", "more words", "--store"])
def test_options_of_a_cell(shell: Shell, line: str) -> None:
    with pytest.raises(ValueError, match=r"expected %%autofuse \[--store FILE\] \[--tune MODE\]"):
        shell.magics["cell", "autofuse"](line, "x = 1")


# ---- trainers and trackers -----------------------------------------------------------------------------------


def test_numbers_for_trackers(tmp_path: Path) -> None:
    with open_store(tmp_path / "store.sqlite3") as store:
        fill(store)
        numbers = metrics_of(load_report(store))
    assert numbers["autofuse/steps"] == 400 and 1.2 < numbers["autofuse/speedup"] < 1.5
    assert "autofuse/seconds_saved" in numbers and all(isinstance(value, float) for value in numbers.values())


def test_sinks_write_what_they_are_given() -> None:
    wrote: list[Any] = []
    writer = types.SimpleNamespace(add_scalar=lambda *args: wrote.append(args), flush=lambda: wrote.append("flushed"))
    sinks.tensorboard(writer)({"autofuse/speedup": 1.3}, 7)
    sinks.mlflow(types.SimpleNamespace(log_metrics=lambda numbers, step: wrote.append((numbers, step))))(
        {"a/b": 1.0}, 8
    )
    sinks.wandb(types.SimpleNamespace(log=lambda numbers, step: wrote.append((numbers, step))))({"a/b": 2.0}, None)
    assert wrote == [("autofuse/speedup", 1.3, 7), "flushed", ({"a.b": 1.0}, 8), ({"a/b": 2.0}, None)]


def test_lightnings_callback(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    package, inner = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    inner.Callback = object  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "lightning", package)
    monkeypatch.setitem(__import__("sys").modules, "lightning.pytorch", inner)
    logged: list[tuple[Mapping[str, float], int]] = []
    logger = types.SimpleNamespace(log_metrics=lambda numbers, step: logged.append((numbers, step)))
    callback = trainers.lightning_callback(folder / "l.sqlite3", "off")
    trainer = types.SimpleNamespace(logger=logger, global_step=5)
    callback.on_fit_start(trainer, None)
    steps(Net(), 2)
    callback.on_fit_end(trainer, None)
    callback.on_exception(trainer, None, ValueError())  # a second end is none
    assert [step for _, step in logged] == [5] and logged[0][0]["autofuse/steps"] >= 0
    assert "Nothing ran fused" in capfd.readouterr().err


def test_hugging_faces_callback(folder: Path) -> None:
    pytest.importorskip("transformers")
    callback = trainers.transformers_callback(folder / "t.sqlite3", "off")
    state = types.SimpleNamespace(log_history=[], global_step=9)
    callback.on_train_begin(None, state, None)
    assert running_session() is not None
    callback.on_train_end(None, state, None)
    assert state.log_history[-1]["step"] == 9 and "autofuse/steps" in state.log_history[-1]


def test_a_report_that_fails_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Watched, "report", lambda self: 1 / 0)
        part = trainers._Part(folder / "x.sqlite3", "off")
        part.begin()
        part.end()
    assert "the run's report could not be made (ZeroDivisionError" in capfd.readouterr().err


def test_watched_takes_a_path_of_either_kind(folder: Path) -> None:
    assert watched(str(folder / "a.sqlite3"))._settings.run.store == folder / "a.sqlite3"
