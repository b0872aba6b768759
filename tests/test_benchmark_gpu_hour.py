"""The first hour on a GPU: what counts as a difference, and that it goes on where it stopped."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def hour(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_hour")


def _lines(*values: object) -> str:
    return "".join(f"step {n} loss {value}\nnoise\n" for n, value in enumerate(values, 1))


@pytest.mark.parametrize(
    ("plain", "ours", "says"),
    [
        ((1.0, 2.0), (1.0, 2.0), None),
        ((1.0, 2.0), (1.0, 2.0000001), None),
        ((1.0, 2.0), (1.0, 2.1), "differs by 5.0e-02"),
        ((1.0, 2.0), (1.0,), "1 lines of 2"),
        ((1.0, 2.0), (1.0, float("nan")), "differs by inf"),
        ((float("nan"),), (float("nan"),), None),
        ((0.0,), (0.0,), None),
        ((0.0,), (1e-3,), "differs by 1.0e+06"),
    ],
)
def test_lines_of_a_script_are_compared_with_those_of_plain_python(hour, plain, ours, says):
    found: dict[str, object] = {}
    differs = hour._lines_differ(_lines(*plain), _lines(*ours), "warm", 1e-5, found)
    assert (says is None) == (differs == [])
    assert says is None or says in differs[0]


def test_an_unknown_part_is_refused_by_name(hour):
    with pytest.raises(SystemExit, match=r"expected beginnings of doctor, .*; found nonsense"):
        hour.wanted("doctor,nonsense", "cuda")
    assert [part.name for part in hour.wanted("str,tab", "cuda")] == ["streams", "table"]
    assert "out_of_memory" not in [part.name for part in hour.wanted("", "cpu")]


def test_every_script_of_the_folder_is_a_part_and_there(hour):
    named = {Path(part.arguments[0]).name for part in hour.PARTS if part.compares}
    assert named == {path.name for path in (BENCHMARKS / "gpu_scripts").glob("*.py")}


def test_a_part_with_cuda_graphs_says_where_none_was_replayed(hour, tmp_path):
    (part,) = (part for part in hour.PARTS if part.name == "replays")
    at = hour.Hour(tmp_path, "cuda", False, 0.0)
    line = {"code": "not_replayed", "accepted": False, "count": 3, "example": {"detail": "the graph is no faster"}}

    def missed(*lines, part=part, at=at):
        found: dict[str, object] = {}
        return hour._replays_missed(at, part, "noise\n" + json.dumps({"refusals": lines}), found), found

    assert missed()[0] == ["no graph was replayed: none was recorded"]
    (said,), found = missed(line, {"code": "cycle"})
    assert "no faster" in said and found == {"replays": [line]}
    assert missed(line, line | {"code": "replayed"})[0] == []
    assert missed(at=hour.Hour(tmp_path, "cpu", False, 0.0))[0] == []
    assert missed(part=hour.PARTS[0]) == ([], {})


def test_it_goes_on_where_it_stopped_and_says_what_differed(hour, monkeypatch, tmp_path, capsys):
    made: list[str] = []

    def execute(_, part):
        made.append(part.name)
        differs = ("2 lines of 3",) if part.name == "amp" else ()
        return hour.Outcome(part.name, 1.0, differs, {"seconds": 2.0})

    monkeypatch.setattr(hour, "execute", execute)
    for only in ("amp,host", "amp,host,steps"):
        monkeypatch.setattr(sys, "argv", ["gpu-hour", "--only", only, "--out", str(tmp_path)])
        assert hour.main() == 0
    assert made == ["amp", "host", "steps"]
    assert (tmp_path / "page.txt").read_text() in capsys.readouterr().out
    assert "amp (1 s)\n  - 2 lines of 3" in (tmp_path / "page.txt").read_text()
    kept = json.loads((tmp_path / "hour.json").read_text())
    assert kept["parts"].keys() == {"amp", "host", "steps"}


def test_a_part_that_the_end_of_time_cut_short_is_made_anew(hour, monkeypatch, tmp_path):
    monkeypatch.setattr(hour, "execute", lambda options, part: hour.Outcome(part.name, 1.0, ()))
    monkeypatch.setattr(hour.Hour, "left", iter([10.0, -1.0]).__next__)
    monkeypatch.setattr(sys, "argv", ["gpu-hour", "--only", "amp", "--out", str(tmp_path)])
    assert hour.main() == 0
    assert "Not done yet: amp" in (tmp_path / "page.txt").read_text()


def test_a_process_ends_at_its_limit_with_what_it_printed(hour, tmp_path):
    options = hour.Hour(tmp_path, "cpu", True, hour.time.monotonic() + 60)
    (tmp_path / "logs").mkdir()
    ended = hour.run(options, "x", ["-c", "import time; print('here', flush=True); time.sleep(60)"], 1.5)
    assert (ended.code, ended.output) == (None, "here\n")
    assert hour._end_of(ended, "x") == [f"x: ended after {ended.seconds:.0f} s, its limit"]
    assert "here" in options.log("x").read_text()
