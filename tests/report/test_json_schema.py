"""What ``autofuse report --json`` prints is of the schema that ``autofuse report --json-schema`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autofuse.cli.app import parse
from autofuse.db.store import Store
from autofuse.ir.records import GRAPH_METRICS, LIVE_RACES, PEAK_MEMORY, Event, OpProfile, RunStart
from autofuse.report.as_json import SCHEMA
from tests.report.report_records import DEVICE, VERSIONS, fill, open_store

# All that the schema uses, so `wrongs` checks all of it.
KEYWORDS = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "description", "items", "maxItems",
    "minItems", "prefixItems", "properties", "required", "type",
}  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


def wrongs(value: Any, of: dict[str, Any], defs: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Where a value is not of a schema."""
    if "$ref" in of:
        yield from wrongs(value, defs[of["$ref"].removeprefix("#/$defs/")], defs, at)
    if "anyOf" in of and all(any(wrongs(value, one, defs, at)) for one in of["anyOf"]):
        yield f"{at} is none of {of['anyOf']}"
    if "const" in of and value != of["const"]:
        yield f"{at} is not {of['const']}"
    kind = of.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at} is no {kind}: {value!r}"
    elif kind == "array":
        places = of.get("prefixItems") or [of["items"]] * len(value)
        if len(places) != len(value):
            yield f"{at} has {len(value)} items"
        for number, (item, one) in enumerate(zip(value, places, strict=False)):
            yield from wrongs(item, one, defs, f"{at}[{number}]")
    elif kind == "object":
        known, others = of.get("properties", {}), of.get("additionalProperties", True)
        yield from (f"{at} lacks {name}" for name in of.get("required", ()) if name not in value)
        for name, item in value.items():
            if name not in known and others is False:
                yield f"{at} has an unknown key {name}"
            one = known.get(name, others if isinstance(others, dict) else {})
            yield from wrongs(item, one, defs, f"{at}.{name}")


def check(data: Any) -> None:
    assert list(wrongs(data, schema(), schema()["$defs"])) == []


def keywords(of: Any) -> Iterator[str]:
    if isinstance(of, list):
        for item in of:
            yield from keywords(item)
    elif isinstance(of, dict):
        for name, item in of.items():
            yield name
            if name in ("properties", "$defs"):
                yield from (word for one in item.values() for word in keywords(one))
            elif name != "const":
                yield from keywords(item)


def objects(of: Any) -> Iterator[dict[str, Any]]:
    if isinstance(of, list):
        of = dict(enumerate(of))
    if isinstance(of, dict):
        if "properties" in of and "type" in of:
            yield of
        for item in of.values():
            yield from objects(item)


def printed(store: Store, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert parse(["report", "--json", "--store", str(store.path)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def test_the_schema_is_printed_without_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["report", "--json-schema", "--store", str(tmp_path / "none")]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_every_key_is_required_and_no_other_is_allowed() -> None:
    assert set(keywords(schema())) <= KEYWORDS
    found = list(objects(schema()))
    assert len(found) == 1 + len(schema()["$defs"])
    for item in found:
        assert item["required"] == list(item["properties"]) and item["additionalProperties"] is False
        assert item["description"]


def test_a_full_report_is_of_it(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run = fill(store)
    size = dict.fromkeys(("nodes", "edges", "depth", "kernels", "flops", "bytes"), 3)
    graph = {"phase": "forward", "operators": "a", "calls": 3, "before": size, "after": size}
    store.notes.add_event(run, Event(GRAPH_METRICS, "", graph))
    peak = {"root": "r", "name": "GPT", "signature": "", "eager_bytes": 8, "routed_bytes": 6}
    store.notes.add_event(run, Event(PEAK_MEMORY, "", peak))
    verdicts = {"confirmed": 3, "slower": 1, "unsure": 0, "open": 2, "rows": []}
    store.notes.add_event(run, Event(LIVE_RACES, "", verdicts))
    store.profiles.put_ops(
        run, [OpProfile("aten.mm.default", "", "forward", ((2, 2),), ("f",), ((2, 1),), "cpu", 3, 9.0)]
    )
    data = printed(store, capsys)
    check(data)
    empty = [name for name, item in data.items() if item in ([], None)]
    assert empty == ["strict"], "each list of it has been seen"


def test_reports_of_an_empty_store_and_of_a_crashed_strict_run_are_of_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    data = printed(store, capsys)
    check(data)
    assert data["run"] is None
    store.runs.start(RunStart("crashed.py", DEVICE, f"{VERSIONS}, strict", "wait", 1, {"run.strict": "True"}))
    data = printed(store, capsys)
    check(data)
    assert data["run"]["finished_at"] is None and data["strict"] is not None


def test_what_is_not_of_it_is_found(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    for name, changed in (("schema_version", 2), ("queue", None), ("more", 1), ("store", 3)):
        data = printed(store, capsys) | {name: changed}
        assert list(wrongs(data, schema(), schema()["$defs"])), name
    data = printed(store, capsys)
    del data["nodes"][0]["speedup"]
    assert list(wrongs(data, schema(), schema()["$defs"])) == ["$.nodes[0] lacks speedup"]
