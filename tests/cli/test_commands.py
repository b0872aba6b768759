"""The command line itself: help, errors with their exit codes, and what a command must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autofuse.cli.app import COMMANDS, parse
from autofuse.cli.job import RunJob
from autofuse.daemon.loop import Drained
from autofuse.settings.layers import SPECS

DAEMON_COMMANDS = ["start", "stop", "status", "logs"]
HELPS = [[], *([name] for name in COMMANDS), *(["daemon", name] for name in DAEMON_COMMANDS)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run in an empty folder, with the store in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_help_has_an_example_and_fits_the_terminal(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {' '.join(['autofuse', *command])}")
    assert "Example" in text
    example = next(line for line in text.split("Example")[1].splitlines()[1:] if line.strip())
    assert example.strip().startswith(" ".join(["autofuse", *command]))
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_first_line_of_the_command_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse([name, "--help"])
    assert COMMANDS[name].summary in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reprot"], ["reprot", "Did you mean 'repro' or 'report'?"]),
        (["train.py"], ["autofuse run train.py"]),
        (["xyzzy"], ["Commands: run, report"]),
        (["report", "--jsn"], ["--jsn", "--json"]),
        (["report", "--run", "zero"], ["zero"]),
        (["run", "--tune", "sometimes", "x.py"], ["sometimes", "background"]),
        (["run", "--quite", "x.py"], ["--quite", "--quiet"]),
        (["run", "nosuch.py"], ["nosuch.py"]),
        (["run"], ["SCRIPT"]),
        (["daemon", "strat"], ["strat", "start"]),
        (["config", "tunr"], ["tunr", "tuner"]),
        (["config", "--set", "tuner.trails=3"], ["tuner.trails", "tuner.trials"]),
        (["config", "--set", "tuner.trials=0"], ["expected whole number, 1 to", "found '0'", "--set tuner.trials=24"]),
        (["config", "--set", "tuner.trials"], ["NAME=VALUE"]),
        (["config", "--profile", "extreme"], ["quick, default, thorough"]),
        (["tune", "x.py"], ["autofuse run x.py"]),
        (["tune", "--process-settings"], ["SCRIPT"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)
def test_wrong_usage_ends_with_2_and_says_what_to_type(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert parse(arguments) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert all(word in output.err for word in words), output.err


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["explain"], ["explain", "af_x"]])
def test_without_a_store_reports_say_how_to_get_one(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(command) == 1
    assert "autofuse run SCRIPT.py" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py", "--steps", "3"], "can't open the script 'missing.py'"),
        (["a", "b"], "expected one name, found 2"),
    ],
)
def test_explain_refuses_what_is_neither_a_script_nor_a_name(
    command: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parse(["explain", *command]) == 2
    assert message in capfd.readouterr().err


def test_explain_does_not_run_a_script_while_switched_off(
    clean_environment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (clean_environment / "script.py").write_text("print('ran')")
    monkeypatch.chdir(clean_environment)
    monkeypatch.setenv("AUTOFUSE_DISABLE", "1")
    assert parse(["explain", "script.py"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "found it switched off. Type: AUTOFUSE_DISABLE=0 autofuse explain script.py" in err


def test_garbage_for_a_store_is_one_line(clean_environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (clean_environment / "store.sqlite3").write_bytes(b"garbage" * 1000)
    assert parse(["report"]) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert (clean_environment / "store.sqlite3").read_bytes() == b"garbage" * 1000


def test_config_shows_values_and_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_TUNER_MARGIN", "0.05")
    assert parse(["config", "--json", "--set", "tuner.trials=40", "--profile", "quick"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == list(SPECS)
    assert (rows["tuner.trials"]["value"], rows["tuner.trials"]["origin"]) == (40, "command line")
    assert rows["tuner.margin"]["origin"] == "environment AUTOFUSE_TUNER_MARGIN"
    assert rows["tuner.rounds"]["origin"] == "profile quick"
    assert rows["capture.held_out_share"] | {"help": ""} == {
        "value": 0.02,
        "unit": "",
        "origin": "default",
        "default": 0.02,
        "expected": "number, 0 to 0.5",
        "variable": "AUTOFUSE_CAPTURE_HELD_OUT_SHARE",
        "help": "",
    }


def test_config_for_people_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["config"]) == 0
    overview = capsys.readouterr().out
    assert parse(["config", "tuner", "--set", "tuner.trials=40"]) == 0
    group = capsys.readouterr().out
    for name in SPECS:
        assert f"  {name.partition('.')[2]} " in overview
        assert (f"  {name} = " in group) is name.startswith("tuner.")
    assert "tuner.trials = 40 trials   from command line" in group
    assert all(len(line.rstrip()) <= 80 for line in overview.splitlines())


def test_unknown_variable_is_a_warning(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFUSE_TUNER_TRAILS", "3")
    assert parse(["config", "cache"]) == 0
    assert "did you mean AUTOFUSE_TUNER_TRIALS?" in capfd.readouterr().err


def test_run_hands_over_what_follows_the_script(clean_environment: Path) -> None:
    (clean_environment / "x.py").write_text("")
    job = parse(["run", "--tune", "wait", "--set", "tuner.trials=3", "--frozen", "x.py", "--tune", "--", "-m"])
    assert isinstance(job, RunJob) and job.settings is not None
    assert job.target.arguments == ("--tune", "--", "-m")
    assert job.target.command == "x.py --tune -- -m"
    assert (job.settings.run.tune, job.settings.run.frozen, job.settings.tuner.trials) == ("wait", True, 3)


@pytest.mark.parametrize("variable", ["AUTOFUSE_DISABLE", "AUTOFUSE_RUN_DISABLE"])
def test_disabled_means_no_settings_at_all(
    variable: str, clean_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean_environment / "x.py").write_text("")
    monkeypatch.setenv(variable, "1")
    job = parse(["run", "x.py"])
    assert isinstance(job, RunJob) and job.settings is None


def test_kill_switch_works_where_settings_are_broken(clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean_environment / "x.py").write_text("")
    (clean_environment / "autofuse.toml").write_text("[broken")
    assert parse(["run", "x.py"]) == 2
    monkeypatch.setenv("AUTOFUSE_DISABLE", "1")
    assert isinstance(parse(["run", "x.py"]), RunJob)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["report"], ["explain"], ["config"], ["daemon", "status"], ["daemon", "logs"]],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    code = f"import sys; from autofuse.cli.app import parse; parse({arguments!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m autofuse config --json | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_module_beside_the_user_does_not_replace_ours(clean_environment: Path) -> None:
    (clean_environment / "click.py").write_text("raise RuntimeError('not this one')")
    done = subprocess.run([sys.executable, "-m", "autofuse", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("autofuse ")


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.sqlite3.daemon.log").write_bytes(b"old\none \x1b]0;title\x07\ntwo \x1b[2J \xff\n")
    assert parse(["daemon", "logs", "-n", "2", "--store", str(tmp_path / "s.sqlite3")]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == ["one", "two"] and "title" in text
    assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        (Drained(2, 0, 0), 0, "2 requests tuned; the queue is empty."),
        (Drained(0, 1, 0), 1, "0 requests tuned; 1 failed, try anew with: autofuse tune --again; the queue is empty."),
        (Drained(1, 0, 3), 0, "1 request tuned; 3 wait for another device, version or budget."),
    ],
)
def test_tune_tells_what_failed_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Drained, code: int, text: str
) -> None:
    asked = []
    monkeypatch.setattr(
        "autofuse.daemon.control.drain", lambda settings, on_progress, *, again: asked.append(again) or found
    )
    assert parse(["tune", "--again"]) == code
    assert capsys.readouterr().out.startswith(text) and asked == [True]
