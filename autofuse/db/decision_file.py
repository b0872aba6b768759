"""Decisions as lines of JSON, by which they travel from one store to another without a server. They hold no code.

In: decisions of a store; or a file's lines. Out: lines; or decisions, to be put as proposals. Guarantee: a line that is
not what it should be raises StoreError with its number, the field, what was expected and what was found; nothing of the
file is used then. Paths, scripts and hosts are not part of a line. What a candidate's knobs mean is checked where the
candidate is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from autofuse.db.base import ranges_json
from autofuse.errors import StoreError
from autofuse.ir.records import Bucket, Candidate, Decision, DecisionKey
from autofuse.ir.validation import is_name

FORMAT = 1
# Reasons that say something about other hosts of the kind; a crash or a full memory may be this host's own.
MEASURED = ("won", "no_gain", "below_margin", "device_slower", "not_bit_equal")
LONGEST_TEXT = 200
_HEAD = "autofuse_decisions"
_TEXTS = ("fusion_id", "device", "versions", "variant", "reason")
_NUMBERS = ("unfused_us", "fused_us", "speedup", "speedup_low", "speedup_high", "tuning_seconds")


@dataclass(frozen=True)
class Fit:
    """How many decisions are for which device and versions, and whether these are this machine's."""

    device: str
    versions: str
    count: int
    fits: bool


def lines_of(decisions: Iterable[Decision]) -> Iterator[str]:
    """A head, and a line for each decision that says something about other machines of its kind."""
    yield json.dumps({_HEAD: FORMAT})
    for decision in decisions:
        if decision.reason in MEASURED:
            yield json.dumps(_row(decision))


def _row(decision: Decision) -> dict[str, Any]:
    key, candidate = decision.key, decision.candidate
    return {
        "fusion_id": key.fusion_id,
        "ranges": ranges_json(decision.bucket),
        "device": key.device,
        "threads": key.threads,
        "versions": key.versions,
        "variant": candidate.variant,
        "config": [list(pair) for pair in candidate.config],
        "reason": decision.reason,
        **{name: getattr(decision, name) for name in _NUMBERS},
        "trials": decision.trials,
    }


def read_decisions(sources: Iterable[Path], standard_input: TextIO | None = None) -> list[Decision]:
    """The decisions of files, of all ``*.jsonl`` of a folder, and of ``standard_input`` for "-". Raises StoreError."""
    found: list[Decision] = []
    for source in sources:
        paths = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
        if not paths:
            raise StoreError(f"expected files *.jsonl in {source}, found none")
        for path in paths:
            try:
                text = standard_input.read() if standard_input and str(path) == "-" else path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise StoreError(f"expected a file of 'autofuse export', found {path}: {error}") from None
            found += decisions_of(text.splitlines(), str(path))
    return found


def decisions_of(lines: Iterable[str], name: str) -> list[Decision]:
    """The decisions of a file; ``name``: of the file, for errors. Raises StoreError."""
    found: list[Decision] = []
    has_head = False
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(text)
        except ValueError:
            raise StoreError(
                f"{place}: expected a line of JSON as 'autofuse export' writes it, found other text"
            ) from None
        if not isinstance(row, dict):
            raise StoreError(f"{place}: expected an object, found {_short(row)}")
        if not has_head:
            _check_head(row, place)
            has_head = True
        else:
            found.append(_decision(row, place))
    if not has_head:
        raise StoreError(f"{name}: expected decisions as 'autofuse export' writes them, found an empty file")
    return found


def _check_head(row: Mapping[str, Any], place: str) -> None:
    if _HEAD not in row:
        raise StoreError(f"{place}: expected the head {{{_HEAD!r}: {FORMAT}}}, found {_short(dict(row))}")
    if row[_HEAD] != FORMAT:
        raise StoreError(
            f"{place}: expected format {FORMAT}, found {_short(row[_HEAD])}; export it again with this autofuse, or "
            "import it with the one that wrote it"
        )


def _decision(row: Mapping[str, Any], place: str) -> Decision:
    def field(name: str, is_right: bool, expected: str) -> Any:
        if not is_right:
            raise StoreError(f"{place}: expected {name} to be {expected}, found {_short(row.get(name))}")
        return row[name]

    texts = {}
    for name in _TEXTS:
        value = row.get(name)
        is_text = isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable()
        texts[name] = field(name, is_text, "a short text")
    field("reason", texts["reason"] in MEASURED, f"one of {', '.join(MEASURED)}")
    numbers = {}
    for name in _NUMBERS:
        value = row.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        numbers[name] = float(field(name, is_number, "a number of 0 or more"))
    counts = {}
    for name in ("threads", "trials"):
        value = row.get(name)
        counts[name] = field(name, type(value) is int and 0 <= value < 1 << 31, "a whole number")
    pairs = field("ranges", _are_pairs(row.get("ranges"), _is_range), "pairs of sizes")
    bucket = Bucket(tuple((low, high) for low, high in pairs))
    config = field("config", _are_pairs(row.get("config"), _is_setting), "pairs of a knob's name and its value")
    key = DecisionKey(texts["fusion_id"], bucket.label, texts["device"], counts["threads"], texts["versions"])
    candidate = Candidate(texts["variant"], tuple((knob, value) for knob, value in config))
    values: dict[str, Any] = {**numbers, "reason": texts["reason"], "trials": counts["trials"]}
    return Decision(key, bucket, candidate, compile_key=None, **values)


def _are_pairs(value: Any, is_right: Any) -> bool:
    is_list = isinstance(value, list) and len(value) <= 100
    return is_list and all(isinstance(pair, list) and len(pair) == 2 and is_right(*pair) for pair in value)


def _is_range(low: Any, high: Any) -> bool:
    return type(low) is int and type(high) is int and 0 <= low <= high < 1 << 63


def _is_setting(knob: Any, value: Any) -> bool:
    return isinstance(knob, str) and is_name(knob) and isinstance(value, int | str | bool)


def fits_of(decisions: Iterable[Decision], device: str, versions: Iterable[str]) -> list[Fit]:
    """Which devices and versions decisions are for; those of ``device`` and ``versions`` first."""
    known, counts = set(versions), dict[tuple[str, str], int]()
    for decision in decisions:
        place = decision.key.device, decision.key.versions
        counts[place] = counts.get(place, 0) + 1
    found = [Fit(*place, count, place[0] == device and place[1] in known) for place, count in counts.items()]
    return sorted(found, key=lambda fit: (not fit.fits, -fit.count, fit.device))


def _short(value: object) -> str:
    return repr(value)[:60]
