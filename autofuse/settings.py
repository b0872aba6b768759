"""Every setting of autofuse, declared once; the only reader of environment variables and TOML files.

In: command-line values, ``AUTOFUSE_*`` variables, ``autofuse.toml`` or ``[tool.autofuse]`` of the project, the user's
own ``autofuse.toml``, an effort profile, the defaults below; the first that names a setting decides.
Out: a frozen ``Settings`` whose groups are attributes (``settings.tuner.trials``) and which knows where each value
came from (``settings.origin("tuner.trials")``).
Guarantee: an unknown key or a value out of range is a ``SettingsError`` that says what was expected, what was found and
what to type; an unknown ``AUTOFUSE_*`` variable is only a warning, for it may belong to another version.
Imports neither torch nor anything else of ours but the errors.
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

PROFILE_FOLDER = Path(__file__).with_name("configs")
PROJECT_FILE = "autofuse.toml"

# ---- declarations -------------------------------------------------------------------------------


def declare(default: Any, doc: str, *, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """One setting: default, help, unit, and the inclusive range of a number."""
    return Field(default=default, description=doc, ge=low, le=high, json_schema_extra={"unit": unit})


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def default_store() -> Path:
    """Where results are kept unless told otherwise."""
    return platformdirs.user_data_path("autofuse") / "store.sqlite3"


class RunSettings(_Group):
    """How a script is run."""

    tune: Literal["background", "wait", "after", "off"] = declare(
        "background",
        "When kernels are tuned: beside the running script, by pausing it, when it has ended, or never.",
    )
    frozen: bool = declare(False, "Use stored decisions only; nothing is queued for tuning.")
    disable: bool = declare(False, "Run the script as if autofuse were not there.")
    store: Path = Field(default_factory=default_store, description="The SQLite file that keeps all results.")
    cc: str = declare("", "C compiler; empty looks for cc, gcc and clang. CC is read where AUTOFUSE_CC is not set.")
    debug: int = declare(
        0, "1 routes, 2 timings, 3 plan with reasons, 4 source, 5 graphs, 6 compiler output.", low=0, high=6
    )
    check: bool = declare(False, "Compare every routed call with eager. Slow; for hunting a wrong kernel.")
    fuel: int | None = declare(
        None, "At most this many fusions, to find a wrong one by halving; none: no limit.", low=0
    )
    quiet: bool = declare(False, "Print nothing of our own on stderr.")
    profile: str = declare("default", "Effort: quick, default or thorough.")


class ObserveSettings(_Group):
    """How operators and shapes are watched."""

    enabled: bool = declare(True, "Watch operators and shapes; without it nothing new is learnt.")
    sample_every: int = declare(16, "One of this many calls of a module is observed in full.", unit="calls", low=1)
    min_samples: int = declare(2, "Observed calls before a module can be captured.", unit="calls", low=1)
    max_overhead_percent: float = declare(
        1.0, "The observer slows down or stops beyond this share of run time.", unit="%", low=0.0, high=100.0
    )
    max_shapes: int = declare(
        64, "Distinct shapes kept per operator and per module; the rest is only counted.", unit="shapes", low=1
    )


class CaptureSettings(_Group):
    """When a module is captured as a graph."""

    predicted_seconds_per_op: float = declare(
        0.02, "Expected cost of capture per operator, until measured.", unit="s", low=0.0
    )
    max_seconds: float = declare(
        120.0, "A module whose capture is expected to take longer stays eager.", unit="s", low=0.0
    )
    min_root_us: float = declare(500.0, "Modules faster than this per call stay eager.", unit="µs", low=0.0)
    max_failures: int = declare(
        1, "Failed captures of one module before it stays eager for good.", unit="failures", low=1
    )
    release_factor: float = declare(
        1.05, "A captured module this much slower than held-out eager is released to eager.", unit="x", low=1.0
    )
    held_out_share: float = declare(
        0.015, "Share of calls that keep running the original module, so that gain is measured.", low=0.0, high=0.5
    )
    recompile_limit: int = declare(
        8, "Graphs kept for one module before further shapes run eager.", unit="graphs", low=1
    )


class FusionSettings(_Group):
    """Which operators are fused."""

    enabled: bool = declare(True, "Fuse at all.")
    enable_elementwise: bool = declare(True, "Chains of element-wise operators.")
    enable_reduction: bool = declare(True, "Reductions, softmax and normalisations with the work around them.")
    enable_matmul: bool = declare(False, "Matrix products with their bias and activation; not generated yet.")
    enable_conv: bool = declare(False, "Convolutions with normalisation and activation; not generated yet.")
    enable_attention: bool = declare(False, "Attention as one kernel; not generated yet.")
    max_fusion_size: int = declare(
        32, "Operators in one fused kernel at most, views not counted.", unit="operators", low=2, high=256
    )
    min_fusion_benefit: float = declare(
        1.0, "Estimated speedup below which a fusion is not tried.", unit="x", low=0.01, high=100.0
    )
    min_tensor_size: int = declare(0, "Fusions whose largest tensor is smaller are not made.", unit="elements", low=0)
    cpu_fusion: bool = declare(True, "Fuse what runs on the CPU.")
    cuda_fusion: bool = declare(True, "Fuse what runs on a GPU.")
    enabled_patterns: tuple[str, ...] | None = declare(
        None, "Names of the custom patterns that apply, separated by commas; none: all of them."
    )


class TunerSettings(_Group):
    """How much effort the search for kernels may take."""

    trials: int = declare(24, "Configurations tried per node and bucket.", unit="trials", low=1, high=100_000)
    budget_seconds: float = declare(
        120.0, "Tuning time per run: how long 'wait' pauses and how long the daemon works on it.", unit="s", low=0.0
    )
    job_seconds: float = declare(15.0, "Tuning time for one node in one bucket.", unit="s", low=0.0)
    cpu_percent: float = declare(
        50.0, "Share of one core that the daemon may use beside a running script.", unit="%", low=1.0, high=100.0
    )
    memory_bytes: int = declare(2 << 30, "Memory that the tuning worker may use.", unit="bytes", low=64 << 20)
    margin: float = declare(0.03, "Gain over eager that a kernel must show to win.", low=0.0, high=1.0)
    rounds: int = declare(
        15, "Interleaved timing rounds for the candidates that survive screening.", unit="rounds", low=3
    )
    idle_exit_seconds: float = declare(300.0, "The daemon ends after this long without work.", unit="s", low=0.0)
    compile_timeout_seconds: float = declare(
        60.0, "A compiler run that takes longer counts as failed.", unit="s", low=0.1
    )
    worker_timeout_seconds: float = declare(
        60.0, "A candidate that takes longer is killed and recorded as a timeout.", unit="s", low=0.1
    )
    nice: int = declare(19, "Scheduling priority of daemon and worker; 19 yields to everything.", low=0, high=19)


class ProcessSettings(_Group):
    """What is set for the whole process; measured and reported apart from fusion."""

    malloc: Literal["auto", "on", "off"] = declare(
        "auto", "Keep freed memory instead of returning it (glibc); auto: where it was measured to win."
    )
    threads: int | None = declare(
        None, "Threads that torch computes with; none leaves torch's own choice.", unit="threads", low=1
    )


class CacheSettings(_Group):
    """How much the store keeps."""

    max_bytes: int = declare(
        512 << 20, "Kernels kept in the store; the least used go first.", unit="bytes", low=1 << 20
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
    process: ProcessSettings = Field(default_factory=ProcessSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)

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

    def as_dict(self) -> dict[str, Any]:
        """Nested dictionary of plain JSON values."""
        return self.model_dump(mode="json")

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

    def changed_as_json(self) -> dict[str, Any]:
        """``changed()`` as plain JSON values, for the store."""
        nested = self.as_dict()
        return {name: nested[name.partition(".")[0]][name.partition(".")[2]] for name in self.changed()}

    def as_arguments(self) -> list[str]:
        """``--set NAME=VALUE`` arguments that give a child process these settings.

        Whatever some layer has set is named even where it is the default, for the child reads the same layers.
        """
        names = [n for n in SPECS if n in self._origins or n in ("run.profile", "run.store") or n in self.changed()]
        values = {name: self.value(name) for name in names}
        return [text for name, value in values.items() for text in ("--set", f"{name}={as_text(value)}")]


def _groups() -> dict[str, type[_Group]]:
    found: dict[str, type[_Group]] = {}
    for name, info in Settings.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, _Group)
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
    """The effort profiles that come with autofuse, least effort first."""
    order = {"quick": 0, "default": 1, "thorough": 2}
    return sorted((p.stem for p in PROFILE_FOLDER.glob("*.toml")), key=lambda name: (order.get(name, 9), name))


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
    layers = [
        {_known_name(k): _Found(v, "command line", f"--set {k}={{}}", here) for k, v in (cli or {}).items()},
        _read_environment(variables, here),
        _read_project(here),
        _read_user(),
    ]
    chosen = _first_of(layers)
    chosen |= {name: found for name, found in _read_profile(chosen).items() if name not in chosen}
    values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, found in chosen.items():
        group, _, key = name.partition(".")
        values[group][key] = _convert(name, found)
    settings = Settings.model_validate(values)
    settings._origins = {name: found.origin for name, found in chosen.items()}
    settings._warnings = tuple(_unknown_variables(variables))
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


def _read_project(here: Path) -> dict[str, _Found]:
    """The nearest ``autofuse.toml``, or ``pyproject.toml`` with ``[tool.autofuse]``, in this folder or a parent."""
    for folder in (here, *here.resolve().parents):
        if (folder / PROJECT_FILE).is_file():
            return _flatten(_parse_toml(folder / PROJECT_FILE), folder / PROJECT_FILE)
        if (folder / "pyproject.toml").is_file():
            tools = _parse_toml(folder / "pyproject.toml").get("tool", {})
            if "autofuse" in tools:
                return _flatten(tools["autofuse"], folder / "pyproject.toml", "tool.autofuse.")
    return {}


def _read_user() -> dict[str, _Found]:
    path = platformdirs.user_config_path("autofuse") / PROJECT_FILE
    return _flatten(_parse_toml(path), path) if path.is_file() else {}


def _read_profile(chosen: Mapping[str, _Found]) -> dict[str, _Found]:
    asked = chosen.get("run.profile")
    name = str(asked.value) if asked else str(SPECS["run.profile"].default)
    if name not in profile_names():
        assert asked is not None
        raise _refusal("run.profile", asked)
    path = PROFILE_FOLDER / f"{name}.toml"
    return {
        key: _Found(found.value, f"profile {name}", found.place, found.base)
        for key, found in _flatten(_parse_toml(path), path).items()
    }


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: expected a readable TOML file, found: {error}. Mend or remove it.") from error


def _flatten(tables: Any, path: Path, prefix: str = "") -> dict[str, _Found]:
    """``{"tuner": {"trials": 40}}`` as ``{"tuner.trials": 40}``; every key is checked."""
    found: dict[str, _Found] = {}
    for group, table in tables.items() if isinstance(tables, dict) else []:
        if group not in GROUPS or not isinstance(table, dict):
            raise SettingsError(f"{path}: {_unknown(group)} Settings stand in tables, such as [{prefix}tuner].")
        for key, value in table.items():
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
    lines = []
    for variable in sorted(environ):
        if variable.startswith("AUTOFUSE_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; 'autofuse config' lists all settings."
            lines.append(f"the variable {variable} is not a setting of autofuse and does nothing{hint}")
    return lines


def disabled_by_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch is thrown; answers even where the other settings cannot be read."""
    variables = os.environ if environ is None else environ
    return variables.get("AUTOFUSE_DISABLE", "").strip().lower() in ("1", "true", "yes", "on")
