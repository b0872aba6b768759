"""Writes the documents that are made from code: the settings, their annotated file, the reason codes, a schema.

In: `autofuse.settings` and the tables of words in `autofuse.report`. Out: `PAGES`, a text for each file of the
repository; run as a script it writes them. Guarantee: the texts do not depend on this machine or user, and nothing here
imports torch. `tests/docs/test_generated.py` compares the files with these texts.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import TypeAdapter

from autofuse.report import wording
from autofuse.report.json_types import SCHEMA_VERSION, JsonReport
from autofuse.settings.layers import GROUPS, OWN_CHOICE, SPECS, SettingSpec, as_text, group_help, profile_names

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "docs/demo.json"  # what scripts/demo left in build/demo/figures.json, and a remark
DEMO_BEGIN, DEMO_END = "<!-- demo -->", "<!-- /demo -->"
COMMAND = "scripts/generate_docs.py"
STORE = "~/.local/share/autofuse/store.sqlite3"  # where XDG_DATA_HOME is not set; the real default names a home


def _default(spec: SettingSpec) -> str:
    return STORE if spec.name == "run.store" else as_text(spec.default)


def _is_own(name: str) -> str:
    """What a project's own file may not say."""
    return " Not read from a project's file." if name in OWN_CHOICE else ""


def _by_group() -> Iterator[tuple[str, list[SettingSpec]]]:
    for group in GROUPS:
        yield group, [spec for name, spec in SPECS.items() if name.startswith(f"{group}.")]


# ---- settings -----------------------------------------------------------------------------------


def settings_page() -> str:
    """docs/reference/settings.md."""
    lines = [
        "# Settings",
        "",
        f"Written by `{COMMAND}` from `autofuse/settings/groups.py`.",
        "",
        "The first of these that names a setting decides:",
        "",
        "1. the command line: `--set tuner.trials=40`;",
        "2. a variable: `AUTOFUSE_TUNER_TRIALS=40`; settings of the group `run` have a short one too, `AUTOFUSE_TUNE`;",
        "3. the project's `autofuse.toml`, or `[tool.autofuse]` in its `pyproject.toml`;",
        "4. your own `autofuse.toml` in `~/.config/autofuse`;",
        f"5. the effort profile, `--profile` {', '.join(profile_names())};",
        "6. the default.",
        "",
        "`autofuse config` shows each value and where it came from. `configs/autofuse.toml` is a file to copy from: it",
        "lists all settings, commented out.",
    ]
    for group, specs in _by_group():
        lines += [
            "",
            f"## {group}",
            "",
            group_help(group),
            "",
            "| setting | default | values | what it does |",
            "|---|---|---|---|",
        ]
        for spec in specs:
            kind = f"{spec.kind} ({spec.unit})" if spec.unit else spec.kind
            default = _default(spec) or "(empty)"
            lines.append(f"| `{spec.name}` | `{default}` | {kind} | {spec.help}{_is_own(spec.name)} |")
    return "\n".join(lines) + "\n"


def _toml(spec: SettingSpec) -> str:
    """The default as TOML writes it; ``"none"`` stands for no value, which TOML has not."""
    value: Any = spec.default
    if spec.name == "run.store":
        return f'"{STORE}"'
    if isinstance(value, bool):
        return as_text(value)
    if isinstance(value, int | float):
        return repr(value)
    return f'"{as_text(value)}"'


def annotated_toml() -> str:
    """configs/autofuse.toml."""
    lines = [
        f"# Every setting with its default. Written by {COMMAND}; held by a test.",
        "# Copy this file to ~/.config/autofuse/autofuse.toml (for you) or into a project's folder (for its scripts),",
        "# take the # off in front of a [group] and of the lines that you change. Nothing here applies by itself.",
    ]
    for group, specs in _by_group():
        lines += ["", f"# [{group}]", f"## {group_help(group)}"]
        for spec in specs:
            unit = f", in {spec.unit}" if spec.unit else ""
            lines += [f"## {line}" for line in textwrap.wrap(f"{spec.help}{_is_own(spec.name)}", 116)]
            lines += [f"## {spec.kind}{unit}", f"# {spec.name.partition('.')[2]} = {_toml(spec)}"]
    return "\n".join(lines) + "\n"


# ---- reasons ------------------------------------------------------------------------------------

TABLES = {
    "DECISION_REASONS": ("Decisions on a node", "Why a node runs its kernel, or eager's operators, in one bucket."),
    "ROOT_REASONS": ("Roots", "Why a module was captured, was released, or stays in eager."),
    "REFUSALS": ("Refused fusions", "Why operators were fused, or were not."),
    "SETTING_REASONS": ("Trials of process settings", "What `autofuse tune --process-settings` decided."),
    "NOTICES": ("Notices", "What a run says once on stderr and keeps as a note."),
    "STATUSES": ("Candidates", "What became of one configuration in a search."),
    "VARIANTS": ("Variants", "What a node may run."),
    "STRATEGIES": ("Strategies", "Programs of several kernels, or with a library's kernel, that a group may run."),
}


def tables_of(module: ModuleType) -> dict[str, dict[str, str]]:
    """The module's tables from a code to its words."""
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    }


def reasons_page() -> str:
    """docs/reference/reasons.md."""
    found = tables_of(wording)
    if set(found) != set(TABLES):
        raise LookupError(f"{wording.__name__} has the tables {sorted(found)}; TABLES here has {sorted(TABLES)}")
    lines = [
        "# Reason codes",
        "",
        f"Written by `{COMMAND}` from `autofuse/ir/reasons.py` and `autofuse/report/wording.py`.",
        "",
        "Every decision and every refusal is stored as a code. `autofuse report` and `autofuse explain` print the",
        "words beside it here; `autofuse report --json` prints the code.",
    ]
    for name, (title, about) in TABLES.items():
        lines += ["", f"## {title}", "", about, "", "| code | meaning |", "|---|---|"]
        lines += [f"| `{code}` | {words} |" for code, words in found[name].items()]
    return "\n".join(lines) + "\n"


# ---- the report for programs ----------------------------------------------------------------------


def report_schema() -> str:
    """autofuse/report/report.schema.json, in draft 2020-12 of JSON Schema."""
    schema = _closed(TypeAdapter(JsonReport).json_schema(mode="serialization"))
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


def _closed(schema: Any) -> Any:
    """Of each object all keys are required, and there are no others; names alone are no titles."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(item) for name, item in schema.items() if name != "default" and not _is_title(name, item)}
    if isinstance(schema.get("properties"), dict):
        found |= {"required": list(schema["properties"]), "additionalProperties": False}
    return found


def _is_title(name: str, item: Any) -> bool:
    return name == "title" and isinstance(item, str)


# ---- the demo's figures in the README ---------------------------------------------------------------


def readme() -> str:
    """README.md, with docs/demo.json between its marks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head, _, rest = text.partition(DEMO_BEGIN)
    _, _, tail = rest.partition(DEMO_END)
    return f"{head}{DEMO_BEGIN}\n{demo_table(json.loads(DEMO.read_text(encoding='utf-8')))}{DEMO_END}{tail}"


def demo_table(demo: dict[str, Any]) -> str:
    """The figures of the two runs, and of malloc's thresholds, as Markdown."""
    runs = [demo["first"], demo["second"]]
    rows = {
        "speed of hot steps against held-out eager steps": [_gain(run) for run in runs],
        "capture": [wording.seconds(run["capture_seconds"]) for run in runs],
        "waiting for tuning": [wording.seconds(run["paused_seconds"]) for run in runs],
        "saved": [wording.seconds(run["seconds_saved"]) for run in runs],
        "losses, against plain Python's": [f"within {run['loss_error']:.0e}" for run in runs],
    }
    lines = [";\n".join(filter(None, (f"{demo['machine']}; {demo['versions']}", demo.get("remark")))) + ".", ""]
    lines += ["| | first run | again, on the warm store |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    malloc = demo["malloc"]
    if malloc is not None:
        ratio = (
            f"{wording.times(malloc['speedup'])} ({wording.interval(malloc['speedup_low'], malloc['speedup_high'])})"
        )
        lines += ["", f"Malloc's thresholds, measured in separate processes and never counted as fusion: {ratio}."]
    return "\n".join(lines) + "\n"


def _gain(run: dict[str, Any]) -> str:
    span = wording.interval(run["low"], run["high"])
    return wording.times(run["median"]) + (f" ({span})" if span else "")


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/settings.md": settings_page,
    "docs/reference/reasons.md": reasons_page,
    "configs/autofuse.toml": annotated_toml,
    "autofuse/report/report.schema.json": report_schema,
    "README.md": readme,
}


if __name__ == "__main__":
    for path, text in PAGES.items():
        (ROOT / path).write_text(text(), encoding="utf-8")
        print(f"wrote {path}")
