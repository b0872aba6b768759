"""The values of all settings; the only reader of environment variables and TOML files.

In: command-line values, ``AUTOFUSE_*`` variables, ``autofuse.toml`` or ``[tool.autofuse]`` of the project, the user's
own ``autofuse.toml``, an effort profile, the defaults of ``groups``; the first that names a setting decides. A
project's file may come from anywhere: it must belong to this user or root, must not be above the repository or the
home, and may name no program and no store. Out: a frozen ``Settings`` whose groups are attributes
(``settings.tuner.trials``) and which knows where each value came from (``settings.origin("tuner.trials")``). Guarantee:
an unknown key or a value out of range is a ``SettingsError`` that says what was expected, what was found and what to
type. An unknown ``AUTOFUSE_*`` variable is only a warning, for it may belong to another version; so is a key of an
earlier version in a file, and any error in a file of a folder above. Imports no torch.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from autofuse.errors import SettingsError
from autofuse.private_files import Untrusted, check_file
from autofuse.settings.groups import (
    GONE,
    CacheSettings,
    CaptureSettings,
    FleetSettings,
    FusionSettings,
    Group,
    ObserveSettings,
    ProcessSettings,
    ReplaySettings,
    RunSettings,
    TunerSettings,
)
from autofuse.settings.secrets import SECRETS, has_password, masked

PROFILE_FOLDER = Path(__file__).with_name("profiles")
PROJECT_FILE = "autofuse.toml"
_IS_GONE = "is a setting of an earlier version and does nothing; remove it"
# A project must not choose which programs run, which store is trusted, which server learns what is tuned, and what that
# server forgets.
OWN_CHOICE = (
    "run.cc",
    "run.store",
    "fleet.url",
    "fleet.keep_days",
    "fleet.keep_keys",
    "fleet.keep_measurements",
)


def as_text(value: Any) -> str:
    """A value as a person types it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# ---- the result ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingSpec:
    """What there is to know about a setting without its value."""

    name: str  # "tuner.trials"
    kind: str  # for people: "whole number, 1 to 100000", "one of a, b, c"
    unit: str
    default: Any
    help: str
    variables: tuple[str, ...]  # environment variables that set it, strongest first


class Settings(BaseModel):
    """All settings of one process; see the module's docstring for where they come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = Field(default_factory=RunSettings)
    observe: ObserveSettings = Field(default_factory=ObserveSettings)
    capture: CaptureSettings = Field(default_factory=CaptureSettings)
    fusion: FusionSettings = Field(default_factory=FusionSettings)
    tuner: TunerSettings = Field(default_factory=TunerSettings)
    replay: ReplaySettings = Field(default_factory=ReplaySettings)
    process: ProcessSettings = Field(default_factory=ProcessSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    def value(self, name: str) -> Any:
        """The value of ``group.name``."""
        group, _, key = _known_name(name).partition(".")
        return getattr(getattr(self, group), key)

    def origin(self, name: str) -> str:
        """Where the value came from: "default", "profile quick", a file, a variable or "command line"."""
        return self._origins.get(_known_name(name), "default")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines a person should see once, such as a misspelt variable."""
        return self._warnings

    def shown(self, name: str) -> str:
        """The value as text for people and for records, without passwords."""
        text = as_text(self.value(name))
        return masked(text) if name in SECRETS else text

    def as_dict(self) -> dict[str, Any]:
        """Nested dictionary of plain JSON values, for people: without passwords."""
        found = self.model_dump(mode="json")
        for name in SECRETS:
            group, _, key = name.partition(".")
            found[group][key] = masked(found[group][key])
        return found

    def with_values(self, values: Mapping[str, Any], origin: str) -> Settings:
        """A copy with these values, checked, and with their origin."""
        groups = {group: dict(getattr(self, group)) for group in GROUPS}
        for name, value in values.items():
            group, _, key = _known_name(name).partition(".")
            groups[group][key] = _convert(name, _Found(value, origin, f"{name}={{}}", Path.cwd()))
        settings = Settings.model_validate(groups)
        settings._origins = self._origins | dict.fromkeys(values, origin)
        settings._warnings = self._warnings
        return settings

    def changed(self) -> dict[str, Any]:
        """Settings that are not at their default: exactly what another process needs as ``cli`` to agree with us."""
        return {spec.name: self.value(spec.name) for spec in SPECS.values() if self.value(spec.name) != spec.default}

    def for_records(self) -> dict[str, str]:
        """Settings that are not at their default, as a run's record holds them: without passwords."""
        return {n: masked(str(value)) if n in SECRETS else str(value) for n, value in self.changed().items()}

    def as_arguments(self) -> list[str]:
        """``--set NAME=VALUE`` arguments that give a child process these settings.

        Whatever some layer has set is named even where it is the default, for the child reads the same layers.
        Passwords are in `as_variables`: every user of the machine can read a process's arguments.
        """
        names = [n for n in SPECS if n in self._origins or n in ("run.profile", "run.store") or n in self.changed()]
        values = {name: self.value(name) for name in names if SPECS[name].variables[0] not in self.as_variables()}
        return [text for name, value in values.items() for text in ("--set", f"{name}={as_text(value)}")]

    def as_variables(self) -> dict[str, str]:
        """What `as_arguments` leaves out: variables that a child process needs for settings with passwords."""
        return {SPECS[name].variables[0]: self.value(name) for name in SECRETS if has_password(self.value(name))}


def _groups() -> dict[str, type[Group]]:
    found: dict[str, type[Group]] = {}
    for name, info in Settings.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, Group)
        found[name] = info.annotation
    return found


GROUPS = _groups()
_FIELDS: dict[str, FieldInfo] = {
    f"{group}.{key}": info for group, model in GROUPS.items() for key, info in model.model_fields.items()
}


def group_help(group: str) -> str:
    """What a group of settings is about, in a sentence."""
    return (GROUPS[group].__doc__ or "").strip()


def _variables(name: str) -> tuple[str, ...]:
    group, _, key = name.partition(".")
    long = f"AUTOFUSE_{group}_{key}".upper()
    short = (f"AUTOFUSE_{key}".upper(),) if group == "run" else ()
    return (*short, long, *(("CC",) if name == "run.cc" else ()))


def _without_none(annotation: Any) -> Any:
    """``int`` of ``int | None``."""
    if get_origin(annotation) is UnionType and NoneType in get_args(annotation):
        return next(a for a in get_args(annotation) if a is not NoneType)
    return annotation


def _describe_kind(info: FieldInfo) -> str:
    """Type and range for people."""
    annotation = _without_none(info.annotation)
    optional = annotation is not info.annotation
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "names separated by commas, or none"
    words = {int: "whole number", float: "number", bool: "true or false", Path: "path", str: "text"}
    text = words[annotation] if annotation in words else str(annotation)
    low = next((m.ge for m in info.metadata if hasattr(m, "ge")), None)
    high = next((m.le for m in info.metadata if hasattr(m, "le")), None)
    if low is not None:
        text += f", {as_text(low)} to {as_text(high)}" if high is not None else f", at least {as_text(low)}"
    return text + (", or none" if optional else "")


def _spec(name: str, info: FieldInfo) -> SettingSpec:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    kind = "one of " + ", ".join(profile_names()) if name == "run.profile" else _describe_kind(info)
    return SettingSpec(
        name=name,
        kind=kind,
        unit=str(extra.get("unit", "")),
        default=info.get_default(call_default_factory=True, validated_data={}),
        help=info.description or "",
        variables=_variables(name),
    )


def profile_names() -> list[str]:
    """The effort profiles that come with autofuse, least effort first; the annotated list beside them is none."""
    order = {"quick": 0, "default": 1, "thorough": 2}
    names = (path.stem for path in PROFILE_FOLDER.glob("*.toml") if path.name != PROJECT_FILE)
    return sorted(names, key=lambda name: (order.get(name, 9), name))


SPECS: dict[str, SettingSpec] = {name: _spec(name, info) for name, info in _FIELDS.items()}

# ---- reading the layers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A value as some layer wrote it."""

    value: Any
    origin: str  # for ``Settings.origin``
    place: str  # how a person would write it there, with {} for the value
    base: Path  # what a relative path is relative to


def load(
    cli: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> Settings:
    """Settings from all layers. ``cli`` maps ``group.name`` to values, as text or typed.

    Raises ``SettingsError`` for unknown keys, values out of range and files that are not TOML.
    """
    here = Path(cwd) if cwd is not None else Path.cwd()
    variables = os.environ if environ is None else environ
    warnings: list[str] = []
    layers = [
        {_known_name(k): _Found(v, "command line", f"--set {k}={{}}", here) for k, v in (cli or {}).items()},
        _read_environment(variables, here),
        _read_project(here, warnings),
        _read_user(warnings),
    ]
    chosen = _first_of(layers)
    chosen |= {name: found for name, found in _read_profile(chosen).items() if name not in chosen}
    values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, found in chosen.items():
        group, _, key = name.partition(".")
        values[group][key] = _convert(name, found)
    settings = Settings.model_validate(values)
    settings._origins = {name: found.origin for name, found in chosen.items()}
    settings._warnings = (*_unknown_variables(variables), *warnings)
    return settings


def parse_assignment(text: str) -> tuple[str, str]:
    """``tuner.trials=40`` as a pair; the name is checked."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set expects NAME=VALUE, found {text!r}. Type for example: --set tuner.trials=40")
    return _known_name(name.strip()), value.strip()


def _first_of(layers: Iterable[Mapping[str, _Found]]) -> dict[str, _Found]:
    chosen: dict[str, _Found] = {}
    for layer in layers:
        chosen |= {name: found for name, found in layer.items() if name not in chosen}
    return chosen


def _read_environment(environ: Mapping[str, str], here: Path) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for name, spec in SPECS.items():
        # An empty variable is how shells and CI systems write "not set".
        variable = next((v for v in spec.variables if environ.get(v, "").strip()), None)
        if variable is not None:
            found[name] = _Found(environ[variable].strip(), f"environment {variable}", f"{variable}={{}}", here)
    return found


def _read_project(here: Path, warnings: list[str]) -> dict[str, _Found]:
    """The nearest ``autofuse.toml``, or ``pyproject.toml`` with ``[tool.autofuse]``, in this folder or one above.

    One above that is not to be trusted or read is left out, with a warning; so is what it may not say.
    """
    for folder in _project_folders(here):
        for path, prefix in ((folder / PROJECT_FILE, ""), (folder / "pyproject.toml", "tool.autofuse.")):
            if not path.is_file():
                continue
            try:
                check_file(path)
                tables = read_toml(path)
                if prefix and "autofuse" not in tables.get("tool", {}):
                    continue
                found = _flatten(tables["tool"]["autofuse"] if prefix else tables, path, warnings, prefix)
            except Untrusted as error:
                warnings.append(f"settings left out: {error}")
                continue
            except SettingsError as error:
                if folder == here:
                    raise
                warnings.append(f"settings left out: {error}")
                continue
            for name in OWN_CHOICE:
                if found.pop(name, None) is not None:
                    warnings.append(
                        f"{path}: {name} is not read from a project's file; "
                        f"set {SPECS[name].variables[0]}, or write it into {_user_file()}"
                    )
            return found
    return {}


def _project_folders(here: Path) -> list[Path]:
    """This folder and those above it, up to the repository's root, the home or the end of the file system."""
    found: list[Path] = []
    for folder in (here, *here.resolve().parents):
        try:
            if found and os.stat(folder).st_dev != os.stat(here).st_dev:
                break
            found.append(folder)
            if folder.resolve() == Path.home().resolve() or (folder / ".git").exists():
                break
        except (OSError, RuntimeError):  # a folder that we may not enter; a user without a home
            break
    return found


def _user_file() -> Path:
    return platformdirs.user_config_path("autofuse") / PROJECT_FILE


def _read_user(warnings: list[str]) -> dict[str, _Found]:
    path = _user_file()
    return _flatten(read_toml(path), path, warnings) if path.is_file() else {}


def _read_profile(chosen: Mapping[str, _Found]) -> dict[str, _Found]:
    asked = chosen.get("run.profile")
    name = str(asked.value) if asked else str(SPECS["run.profile"].default)
    if name not in profile_names():
        assert asked is not None
        raise _refusal("run.profile", asked)
    path = PROFILE_FOLDER / f"{name}.toml"
    return {
        key: _Found(found.value, f"profile {name}", found.place, found.base)
        for key, found in _flatten(read_toml(path), path, []).items()
    }


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; raises ``SettingsError`` for one that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: expected a readable TOML file, found: {error}. Mend or remove it.") from error


def _flatten(tables: Any, path: Path, warnings: list[str], prefix: str = "") -> dict[str, _Found]:
    """``{"tuner": {"trials": 40}}`` as ``{"tuner.trials": 40}``; every key is checked, what is gone left out."""
    found: dict[str, _Found] = {}
    for group, table in tables.items() if isinstance(tables, dict) else []:
        if group not in GROUPS or not isinstance(table, dict):
            raise SettingsError(f"{path}: {_unknown(group)} Settings stand in tables, such as [{prefix}tuner].")
        for key, value in table.items():
            if f"{group}.{key}" in GONE:
                warnings.append(f"{path}: {group}.{key} {_IS_GONE}")
                continue
            if f"{group}.{key}" not in SPECS:
                raise SettingsError(f"{path}: {_unknown(f'{group}.{key}')}")
            place = f"[{prefix}{group}] {key} = {{}} in {path}"
            found[f"{group}.{key}"] = _Found(value, str(path), place, path.parent)
    return found


# ---- checking -----------------------------------------------------------------------------------


def _convert(name: str, found: _Found) -> Any:
    """The value in its declared type, or a ``SettingsError``."""
    info, value = _FIELDS[name], found.value
    none_allowed = _without_none(info.annotation) is not info.annotation
    if isinstance(value, str) and none_allowed and value.strip().lower() == "none":
        return None
    if isinstance(value, str) and get_origin(_without_none(info.annotation)) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    # pydantic would read true as 1; in a setting that is a slip.
    if isinstance(value, bool) and info.annotation is not bool:
        raise _refusal(name, found)
    group, _, key = name.partition(".")
    try:
        converted = getattr(GROUPS[group].model_validate({key: value}), key)
    except ValidationError as error:
        raise _refusal(name, found) from error
    if isinstance(converted, Path):
        return Path(os.path.abspath(found.base / converted.expanduser()))
    return converted


def _refusal(name: str, found: _Found) -> SettingsError:
    spec = SPECS[name]
    typed = found.place.format(as_text(spec.default) or '""')
    return SettingsError(
        f"{name}: expected {spec.kind}{f' ({spec.unit})' if spec.unit else ''}, found {as_text(found.value)!r}. "
        f"Type for example {typed}, or leave it out for the default."
    )


def nearest_names(name: str, names: Iterable[str]) -> str:
    """``" Did you mean tuner?"``, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _known_name(name: str) -> str:
    if name not in SPECS:
        raise SettingsError(_unknown(name))
    return name


def _unknown(name: str) -> str:
    """A sentence with the nearest name; a bare ``trials`` finds ``tuner.trials``."""
    by_last = {full.partition(".")[2]: full for full in SPECS}
    near = difflib.get_close_matches(name, SPECS, n=1) or [
        by_last[key] for key in difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1)
    ]
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"There is no setting {name!r}.{hint} 'autofuse config' lists all of them."


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [variable for spec in SPECS.values() for variable in spec.variables]
    gone = {variable for name in GONE for variable in _variables(name)}
    lines = []
    for variable in sorted(environ):
        if variable in gone:
            lines.append(f"the variable {variable} {_IS_GONE}")
        elif variable.startswith("AUTOFUSE_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; 'autofuse config' lists all settings."
            lines.append(f"the variable {variable} is not a setting of autofuse and does nothing{hint}")
    return lines


def disabled_by_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch is thrown; answers even where the other settings cannot be read."""
    variables = os.environ if environ is None else environ
    return variables.get("AUTOFUSE_DISABLE", "").strip().lower() in ("1", "true", "yes", "on")
