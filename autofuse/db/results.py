"""What tuning found: measurements of candidates, and decisions.

In: the daemon's records. Out: the same records, for the script's snapshot, for seeding neighbours, for people.
Guarantee: measurements and decisions are only ever appended; the newest decision of a key stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select

from autofuse.db import models
from autofuse.db.base import (
    Database,
    as_tuples,
    clean,
    key_of,
    key_text,
    now,
    put_keys,
    ranges_json,
    stored_bucket,
    upsert,
)
from autofuse.db.decision_file import read_decisions
from autofuse.db.rows import NamedDecisions, StoredDecision, StoredMeasurement
from autofuse.ir.records import Candidate, Decision, DecisionKey, Measurement

KEYS_AT_ONCE = 500  # in one statement: SQLite takes only so many values
_PLAIN_MEASURED = [item.name for item in fields(Measurement) if item.name not in ("candidate", "symbol_values")]
_PLAIN_DECIDED = [item.name for item in fields(Decision) if item.name not in ("key", "bucket", "candidate")]


class TuneResults:
    """Measurements and decisions, which the daemon writes and scripts read."""

    def __init__(self, file: Database) -> None:
        self._file = file

    # ---- measurements ---------------------------------------------------------------------------

    def put_measurements(self, key: DecisionKey, measurements: Iterable[Measurement]) -> None:
        """Append measurements of candidates for ``key``."""
        with self._file.write() as connection:
            insert_measurements(connection, key, list(measurements))

    def measurements(self, fusion_id: str) -> list[StoredMeasurement]:
        """All measurements of a node in all buckets, on all devices, in the order in which they were made."""
        with self._file.read() as connection:
            rows = connection.execute(_measurements().where(models.DecisionKeyRow.fusion_id == fusion_id))
            return [_measurement_of(row) for row in rows]

    def measurements_since(self, since_id: int, most: int) -> list[tuple[int, StoredMeasurement]]:
        """Measurements of all nodes with ids above ``since_id``, at most so many, by growing id."""
        table = models.MeasurementRow
        with self._file.read() as connection:
            rows = connection.execute(_measurements().where(table.id > since_id).limit(most))
            return [(row.id, _measurement_of(row)) for row in rows]

    # ---- decisions ------------------------------------------------------------------------------

    def put_decision(self, decision: Decision, run_id: int | None = None) -> int:
        """Append a decision, which stands from now on; return its id.

        ``run_id``: the run whose request it answers; by default the one that has asked for this very key. A part of a
        group has a key that no run asks for.
        """
        with self._file.write() as connection:
            digest = decision.key.digest
            put_keys(connection, [decision.key])
            asked = select(models.Request.run_id).where(models.Request.key == digest)
            if run_id is not None:
                asked = select(models.Run.id).where(models.Run.id == run_id)  # nothing, if it was deleted meanwhile
            return insert_decision(connection, decision, connection.execute(asked).scalar_one_or_none())

    def decisions(
        self, device_key: str | None = None, versions: str | None = None, since_id: int = 0, most: int | None = None
    ) -> list[tuple[int, Decision]]:
        """The standing decisions with ids above ``since_id``, by growing id: so a reader asks only for what is new.

        ``most``: so many, the others when asked again.
        """
        query = decision_rows().where(models.DecisionRow.id > since_id)
        query = query.where(models.DecisionRow.id.in_(_standing(query_since=since_id)))
        if device_key is not None:
            query = query.where(models.DecisionKeyRow.device == device_key)
        if versions is not None:
            query = query.where(models.DecisionKeyRow.versions == versions)
        if most is not None:
            query = query.limit(most)
        with self._file.read() as connection:
            return [(row.id, decision_of(row)) for row in connection.execute(query)]

    def named_in(self, path: Path) -> NamedDecisions:
        """The decisions that a file of ``autofuse export`` names, as this store has them: with kernels.

        Those that newer ones have replaced count too. A file names a key once; where it does more often, the last
        line counts. Raises StoreError where the file cannot be used.
        """
        wanted = {decision.key: decision.candidate for decision in read_decisions([path])}
        found: dict[DecisionKey, tuple[int, Decision]] = {}
        digests = [key.digest for key in wanted]
        with self._file.read() as connection:
            for first in range(0, len(digests), KEYS_AT_ONCE):
                piece = digests[first : first + KEYS_AT_ONCE]
                for row in connection.execute(decision_rows().where(models.DecisionRow.key.in_(piece))):
                    decision = decision_of(row)
                    if decision.candidate == wanted.get(decision.key):
                        found[decision.key] = row.id, decision
        missing = tuple(key for key in wanted if key not in found)
        return NamedDecisions(tuple(sorted(found.values(), key=lambda row: row[0])), missing)

    def history(
        self, fusion_id: str | None = None, run_id: int | None = None, newest: int | None = None
    ) -> list[StoredDecision]:
        """Decisions ever made, oldest first: of a node, of a run's requests, the ``newest`` so many."""
        query = decision_rows()
        if fusion_id is not None:
            query = query.where(models.DecisionKeyRow.fusion_id == fusion_id)
        if run_id is not None:
            query = query.where(models.DecisionRow.run_id == run_id)
        if newest is not None:
            last = select(models.DecisionRow.id).order_by(models.DecisionRow.id.desc()).limit(newest)
            query = query.where(models.DecisionRow.id.in_(last))
        with self._file.read() as connection:
            rows = connection.execute(query)
            return [StoredDecision(row.id, decision_of(row), row.run_id, row.at) for row in rows]


# ---- rows -------------------------------------------------------------------------------------------


def insert_measurements(
    connection: Connection, key: DecisionKey, measurements: Sequence[Measurement], origins: Sequence[str] = ()
) -> None:
    """Append measurements of candidates for ``key``; those with an origin that is there already are left out."""
    if not measurements:
        return
    table, at, digest = models.CandidateRow, now(), key.digest
    put_keys(connection, [key])
    candidates = [
        {"key": digest, "variant": item.candidate.variant, "config": key_text(item.candidate.config)}
        for item in measurements
    ]
    # In one order: on a fleet's server two writers could wait for each other.
    ordered = sorted(candidates, key=lambda row: (row["variant"], row["config"]))
    upsert(connection, table, ordered, ["key", "variant", "config"], [])
    found = connection.execute(select(table.variant, table.config, table.id).where(table.key == digest))
    ids = {(variant, config): candidate_id for variant, config, candidate_id in found}
    rows = [
        {
            **{name: getattr(item, name) for name in _PLAIN_MEASURED},
            "message": clean(item.message),
            "symbol_values": list(item.symbol_values),
            "candidate_id": ids[candidate["variant"], candidate["config"]],
            "at": at,
        }
        for item, candidate in zip(measurements, candidates, strict=True)
    ]
    if origins:
        rows = [{**row, "origin": origin} for row, origin in zip(rows, origins, strict=True)]
        upsert(connection, models.MeasurementRow, rows, [], [])
    else:
        connection.execute(insert(models.MeasurementRow), rows)


def insert_decision(connection: Connection, decision: Decision, run_id: int | None) -> int:
    """Append a decision whose key is stored; its id."""
    values = {
        "key": decision.key.digest,
        "run_id": run_id,
        "ranges": ranges_json(decision.bucket),
        "variant": decision.candidate.variant,
        "config": [list(pair) for pair in decision.candidate.config],
        **{name: getattr(decision, name) for name in _PLAIN_DECIDED},
        "detail": clean(decision.detail),
        "at": now(),
    }
    statement = insert(models.DecisionRow).values(**values).returning(models.DecisionRow.id)
    return connection.execute(statement).scalar_one()


def _measurements() -> Any:
    table, candidate, key = models.MeasurementRow, models.CandidateRow, models.DecisionKeyRow
    return (
        select(table, candidate.variant, candidate.config, key)
        .join(candidate, table.candidate_id == candidate.id)
        .join(key, candidate.key == key.digest)
        .order_by(table.id)
    )


def _measurement_of(row: Row[Any]) -> StoredMeasurement:
    measurement = Measurement(
        candidate=Candidate(row.variant, as_tuples(json.loads(row.config))),
        symbol_values=tuple(row.symbol_values),
        **{name: getattr(row, name) for name in _PLAIN_MEASURED},
    )
    return StoredMeasurement(key=key_of(row), measurement=measurement, at=row.at)


def _standing(query_since: int) -> Any:
    table = models.DecisionRow
    return select(func.max(table.id)).where(table.id > query_since).group_by(table.key)


def decision_rows() -> Any:
    """A query for decisions with the fields of their keys, in the order in which they were made."""
    table, key = models.DecisionRow, models.DecisionKeyRow
    return select(table, key).join(key, table.key == key.digest).order_by(table.id)


def decision_of(row: Row[Any]) -> Decision:
    """The decision in a row of `decision_rows`."""
    return Decision(
        key=key_of(row),
        bucket=stored_bucket(row.ranges),
        candidate=Candidate(row.variant, as_tuples(row.config)),
        **{name: getattr(row, name) for name in _PLAIN_DECIDED},
    )
