"""Settings: which layer wins, what is refused and in which words, and that every value survives a round trip."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import SettingsError
from autofuse.fusion.config import FusionConfig
from autofuse.observer.config import ObserverConfig
from autofuse.settings import layers as module
from autofuse.settings.groups import GONE, CheckedGroup, FusionSettings, Group, ObserveSettings
from autofuse.settings.layers import (
    GROUPS,
    SPECS,
    Settings,
    disabled_by_environment,
    load,
    parse_assignment,
    profile_names,
)


@pytest.fixture(autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: neither this machine's user settings nor its variables take part."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setattr(module.platformdirs, "user_config_path", lambda name: folder / name)
    return folder / "autofuse"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def refusal(cli: dict[str, Any] | None = None, environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(cli, environ or {}, cwd)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---- whose files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["autofuse.toml", "pyproject.toml"])
def test_a_projects_file_names_no_program_and_no_store(tmp_path: Path, name: str) -> None:
    table = "tool.autofuse." if name == "pyproject.toml" else ""
    text = f"[{table}run]\ncc = '/elsewhere/cc'\nstore = 'theirs.sqlite3'\n[{table}tuner]\ntrials = 5\n"
    write(tmp_path / name, text)
    settings = load({}, {}, tmp_path)
    assert settings.tuner.trials == 5
    assert settings.run.cc == "" and settings.run.store == SPECS["run.store"].default
    assert [line.split(": ")[1].split()[0] for line in settings.warnings] == ["run.cc", "run.store"]
    assert "AUTOFUSE_CC" in settings.warnings[0] and str(tmp_path / name) in settings.warnings[0]


@pytest.mark.parametrize("where", ["here", "above"])
def test_a_file_that_others_may_write_to_is_left_out(tmp_path: Path, where: str) -> None:
    path = tmp_path / "autofuse.toml"
    write(path, "[tuner]\ntrials = 5\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    path.chmod(0o666)
    settings = load({}, {}, tmp_path if where == "here" else inner)
    assert settings.origin("tuner.trials") == "default"
    assert len(settings.warnings) == 1 and f"chmod go-w {path}" in settings.warnings[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="making a file of another user takes root's rights")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_another_user_is_left_out(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / "autofuse.toml"
    write(tmp_path / "ours", "[tuner]\ntrials = 5\n")
    path.symlink_to("ours") if is_link else (tmp_path / "ours").rename(path)
    assert load({}, {}, tmp_path).tuner.trials == 5
    os.chown(path, 2002, 2002, follow_symlinks=False)
    settings = load({}, {}, tmp_path)
    assert settings.origin("tuner.trials") == "default"
    assert [f"{path} belongs to another user" in line for line in settings.warnings] == [True]


@pytest.mark.parametrize("name", ["autofuse.toml", "pyproject.toml"])
def test_a_broken_file_above_is_a_warning_and_one_here_is_an_error(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "[broken")
    inner = tmp_path / "inner"
    inner.mkdir()
    (warning,) = load({}, {}, inner).warnings
    assert str(tmp_path / name) in warning
    assert str(tmp_path / name) in refusal(cwd=tmp_path)


def test_nothing_is_read_beyond_the_repository_and_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "autofuse.toml", "[tuner]\ntrials = 5\n")
    inner = tmp_path / "repository" / "folder"
    inner.mkdir(parents=True)
    assert load({}, {}, inner).tuner.trials == 5
    (tmp_path / "repository" / ".git").mkdir()
    assert load({}, {}, inner).origin("tuner.trials") == "default"
    (tmp_path / "repository" / ".git").rmdir()
    monkeypatch.setenv("HOME", str(tmp_path / "repository"))
    assert load({}, {}, inner).origin("tuner.trials") == "default"
    write(tmp_path / "repository" / "autofuse.toml", "[tuner]\ntrials = 6\n")
    assert load({}, {}, inner).tuner.trials == 6


# ---- precedence -----------------------------------------------------------------------------------


def test_each_layer_beats_the_ones_below(tmp_path: Path, user_folder: Path) -> None:
    project, cwd = tmp_path / "project", tmp_path / "project" / "deep" / "down"
    cwd.mkdir(parents=True)

    def trials(cli: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> tuple[int, str]:
        settings = load(cli, environ or {}, cwd)
        return settings.tuner.trials, settings.origin("tuner.trials")

    default = SPECS["tuner.trials"].default
    assert trials() == (default, "default")
    quick = tomllib.loads((module.PROFILE_FOLDER / "quick.toml").read_text())["tuner"]["trials"]
    assert trials(environ={"AUTOFUSE_PROFILE": "quick"}) == (quick, "profile quick")
    write(user_folder / "autofuse.toml", "[run]\nprofile = 'quick'\n")
    assert trials() == (quick, "profile quick")
    write(user_folder / "autofuse.toml", "[run]\nprofile = 'quick'\n[tuner]\ntrials = 31\n")
    assert trials() == (31, str(user_folder / "autofuse.toml"))
    write(project / "pyproject.toml", "[tool.autofuse.tuner]\ntrials = 32\n")
    assert trials() == (32, str(project / "pyproject.toml"))
    write(project / "autofuse.toml", "[tuner]\ntrials = 33\n")
    assert trials() == (33, str(project / "autofuse.toml"))
    environ = {"AUTOFUSE_TUNER_TRIALS": "34"}
    assert trials(environ=environ) == (34, "environment AUTOFUSE_TUNER_TRIALS")
    assert trials({"tuner.trials": "35"}, environ) == (35, "command line")


def test_layers_are_merged_setting_by_setting(tmp_path: Path, user_folder: Path) -> None:
    write(user_folder / "autofuse.toml", "[tuner]\ntrials = 5\nmargin = 0.1\n")
    write(tmp_path / "autofuse.toml", "[tuner]\ntrials = 6\n")
    settings = load({"run.tune": "off"}, {"AUTOFUSE_FROZEN": "1"}, tmp_path)
    assert (settings.tuner.trials, settings.tuner.margin, settings.run.tune, settings.run.frozen) == (
        6,
        0.1,
        "off",
        True,
    )


def test_the_nearest_project_file_counts_and_others_tools_do_not(tmp_path: Path) -> None:
    write(tmp_path / "autofuse.toml", "[tuner]\ntrials = 5\n")
    write(tmp_path / "inner" / "pyproject.toml", "[tool.ruff]\nline-length = 100\n")
    assert load({}, {}, tmp_path / "inner").tuner.trials == 5
    write(tmp_path / "inner" / "autofuse.toml", "")
    assert load({}, {}, tmp_path / "inner").origin("tuner.trials") == "default"


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.default != ""])  # "" means: not set
def test_every_setting_has_a_variable_and_its_default_can_be_typed(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    text = module.as_text(spec.default)
    settings = load({}, {spec.variables[0]: text}, tmp_path)
    assert settings.value(name) == spec.default
    assert settings.origin(name) == f"environment {spec.variables[0]}"
    assert spec.help.endswith(".")
    assert settings.warnings == ()


def test_short_variables_of_run() -> None:
    names = ["TUNE", "STORE", "PROFILE", "FROZEN", "DISABLE", "DEBUG", "CHECK", "FUEL", "CC"]
    assert {f"AUTOFUSE_{name}" for name in names} <= {v for spec in SPECS.values() for v in spec.variables}


def test_compiler_falls_back_to_cc(tmp_path: Path) -> None:
    assert load({}, {"CC": "clang"}, tmp_path).origin("run.cc") == "environment CC"
    assert load({}, {"CC": "clang", "AUTOFUSE_CC": "gcc"}, tmp_path).run.cc == "gcc"


def test_empty_variables_are_not_set(tmp_path: Path) -> None:
    settings = load({}, {"AUTOFUSE_DEBUG": "", "AUTOFUSE_DISABLE": " "}, tmp_path)
    assert (settings.run.debug, settings.run.disable, settings.origin("run.debug")) == (0, False, "default")


def test_relative_stores_are_relative_to_where_they_are_written(tmp_path: Path, user_folder: Path) -> None:
    inner = tmp_path / "inner"
    write(user_folder / "autofuse.toml", "[run]\nstore = 'kept/here.sqlite3'\n")
    inner.mkdir()
    assert load({}, {}, inner).run.store == user_folder / "kept/here.sqlite3"
    assert load({"run.store": "x.sqlite3"}, {}, inner).run.store == inner / "x.sqlite3"
    assert load({}, {"AUTOFUSE_STORE": "~/x"}, inner).run.store == Path.home() / "x"


# ---- profiles ---------------------------------------------------------------------------------------


def test_profiles_are_valid_and_ordered_by_effort(tmp_path: Path) -> None:
    assert profile_names() == ["quick", "default", "thorough"]
    by_effort = [load({"run.profile": name}, {}, tmp_path) for name in profile_names()]
    for name in ("trials", "budget_seconds", "job_seconds", "rounds"):
        values = [getattr(settings.tuner, name) for settings in by_effort]
        assert values == sorted(values) and values[0] < values[-1], name
    assert by_effort[1].changed() == {}


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tuner.trials", "0"),
        ("tuner.trials", "1.5"),
        ("tuner.trials", "many"),
        ("tuner.trials", True),
        ("tuner.nice", 20),
        ("tuner.margin", "nan"),
        ("tuner.margin", "inf"),
        ("run.tune", "sometimes"),
        ("run.debug", "7"),
        ("run.fuel", "-1"),
        ("run.check", "perhaps"),
        ("run.profile", "extreme"),
        ("capture.held_out_share", "0.6"),
        ("fusion.min_fusion_benefit", "0"),
        ("process.threads", "0"),
    ],
)
def test_values_out_of_range_say_expected_found_and_what_to_type(name: str, value: Any, tmp_path: Path) -> None:
    message = refusal({name: value}, cwd=tmp_path)
    assert message.startswith(f"{name}: expected {SPECS[name].kind}")
    assert f"found {module.as_text(value)!r}" in message
    assert f"--set {name}=" in message


def test_refusals_name_the_place_to_mend(tmp_path: Path, user_folder: Path) -> None:
    assert "AUTOFUSE_TUNER_TRIALS=24" in refusal(environ={"AUTOFUSE_TUNER_TRIALS": "-3"}, cwd=tmp_path)
    write(tmp_path / "autofuse.toml", "[tuner]\ntrials = -3\n")
    assert f"[tuner] trials = 24 in {tmp_path / 'autofuse.toml'}" in refusal(cwd=tmp_path)
    write(tmp_path / "autofuse.toml", "[tuner\n")
    assert str(tmp_path / "autofuse.toml") in refusal(cwd=tmp_path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tuner.trails", "tuner.trials"),
        ("trials", "tuner.trials"),
        ("tunr.trials", "tuner.trials"),
        ("tune", "run.tune"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(written: str, meant: str, tmp_path: Path) -> None:
    assert f"Did you mean {meant}?" in refusal({written: 1}, cwd=tmp_path)
    with pytest.raises(SettingsError, match=f"Did you mean {meant}"):
        parse_assignment(f"{written}=1")


@pytest.mark.parametrize("text", ["[tuner]\ntrails = 3\n", "trials = 3\n", "[tunr]\ntrials = 3\n", "tuner = 3\n"])
def test_unknown_keys_of_files_are_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path / "autofuse.toml", text)
    message = refusal(cwd=tmp_path)
    assert str(tmp_path / "autofuse.toml") in message
    assert "tuner" in message


def test_unknown_variables_are_warned_of_and_not_fatal(tmp_path: Path) -> None:
    settings = load({}, {"AUTOFUSE_TUNER_TRAILS": "3", "AUTOFUSE_ZZZ": "1", "OTHER": "1"}, tmp_path)
    first, second = settings.warnings
    assert "AUTOFUSE_TUNER_TRAILS" in first and "AUTOFUSE_TUNER_TRIALS" in first
    assert "AUTOFUSE_ZZZ" in second


def test_set_without_equals_is_refused() -> None:
    with pytest.raises(SettingsError, match="NAME=VALUE"):
        parse_assignment("tuner.trials")


# ---- the object -----------------------------------------------------------------------------------------


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Valid values of a setting."""
    info = GROUPS[name.partition(".")[0]].model_fields[name.partition(".")[2]]
    low = next((m.ge for m in info.metadata if hasattr(m, "ge")), 0)
    high = next((m.le for m in info.metadata if hasattr(m, "le")), low + 10**6)
    kind = SPECS[name].kind
    if kind.startswith("one of "):
        return st.sampled_from(kind.removeprefix("one of ").split(", "))
    if kind.startswith("whole number"):
        return st.integers(int(low), int(high)) | (st.none() if kind.endswith("or none") else st.nothing())
    if kind.startswith("number"):
        return st.floats(low, high)
    if kind == "true or false":
        return st.booleans()
    if kind.startswith("path"):
        paths = st.sampled_from([Path("/a/b.sqlite3"), Path("/tmp/ü x.db")])
        return paths | (st.none() if kind.endswith("or none") else st.nothing())
    if kind.startswith("names"):
        return st.none() | st.lists(st.sampled_from(["a", "b_c"]), min_size=1).map(tuple)
    return st.sampled_from(["gcc", "/usr/bin/clang -m64"])


choices = st.dictionaries(st.sampled_from(sorted(SPECS)), st.none(), max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)


@given(chosen=choices)
def test_any_settings_reach_a_child_process_unchanged(chosen: dict[str, Any]) -> None:
    parent = load(chosen, {}, "/")
    assert {name: parent.value(name) for name in chosen} == chosen
    arguments = parent.as_arguments()
    assert arguments[::2] == ["--set"] * (len(arguments) // 2)
    child = load(dict(map(parse_assignment, arguments[1::2])), {"AUTOFUSE_PROFILE": "thorough"}, "/")
    assert child.as_dict() == parent.as_dict()


@given(chosen=choices)
def test_changed_settings_restore_the_rest(chosen: dict[str, Any]) -> None:
    settings = load(chosen, {}, "/")
    assert load({**settings.changed(), "run.profile": settings.run.profile}, {}, "/").as_dict() == settings.as_dict()


def test_a_setting_of_an_earlier_version_is_warned_about_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.autofuse.observe]\nmin_samples = 4\nsample_every = 9\n")
    settings = load({}, {"AUTOFUSE_OBSERVE_MIN_SAMPLES": "4"}, tmp_path)
    assert settings.observe.sample_every == 9
    assert settings.warnings == (
        "the variable AUTOFUSE_OBSERVE_MIN_SAMPLES is a setting of an earlier version and does nothing; remove it",
        f"{tmp_path / 'pyproject.toml'}: observe.min_samples is a setting of an earlier version and does nothing; "
        "remove it",
    )
    with pytest.raises(SettingsError, match=r"There is no setting 'observe\.min_samples'"):
        load({"observe.min_samples": "4"}, {}, tmp_path)
    assert not set(GONE) & set(SPECS)


def test_settings_are_frozen_and_copies_are_checked(tmp_path: Path) -> None:
    settings = load({}, {}, tmp_path)
    with pytest.raises(ValueError):
        settings.tuner.trials = 3  # type: ignore[misc]
    copy = settings.with_values({"process.malloc": "on"}, origin="measured")
    assert (copy.process.malloc, copy.origin("process.malloc")) == ("on", "measured")
    assert settings.process.malloc == "auto"
    with pytest.raises(SettingsError):
        settings.with_values({"process.malloc": "maybe"}, origin="measured")


def test_fusion_settings_are_those_of_the_planner(tmp_path: Path) -> None:
    assert FusionConfig.of(load({}, {}, tmp_path).fusion) == FusionConfig()
    assert FusionConfig.of(load({"fusion.max_fusion_size": 7}, {}, tmp_path).fusion).max_fusion_size == 7
    assert {name for name in SPECS if name.startswith("fusion.")} == {
        f"fusion.{name}" for name in FusionConfig.model_fields
    }


@pytest.mark.parametrize(("config", "settings"), [(FusionConfig, FusionSettings), (ObserverConfig, ObserveSettings)])
def test_what_the_planner_and_the_observer_read_is_declared_once(
    config: type[CheckedGroup], settings: type[Group]
) -> None:
    assert not set(config.__annotations__) & set(settings.model_fields)
    for name, info in settings.model_fields.items():
        assert config.model_fields[name].default == info.default
        assert config.model_fields[name].metadata == info.metadata, "another range"
    with pytest.raises(SettingsError, match=r"expected one of enabled, .*found 'nothing_of_the_kind'"):
        config(nothing_of_the_kind=1)


@pytest.mark.parametrize(("text", "thrown"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_kill_switch(text: str, thrown: bool) -> None:
    assert disabled_by_environment({"AUTOFUSE_DISABLE": text}) is thrown


def test_settings_model_has_help_for_every_group() -> None:
    assert set(GROUPS) == set(Settings.model_fields)
    assert all(module.group_help(group).endswith(".") for group in GROUPS)
