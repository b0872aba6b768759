"""What other hosts of a fleet have decided, in this host's store until a request asks for it; and how far rows went.

In: decisions of a fleet's server. Out: the proposal for a key, once a script here asks for that key.
Guarantee: a proposal never replaces a decision of this host, and counts for nothing until it was built, checked and
raced here. What became of it stands beside it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, or_, select, update

from autofuse.db import models
from autofuse.db.base import Database, as_tuples, clean, now, put_keys, upsert
from autofuse.ir.records import Candidate, Decision, DecisionKey

# "adopted": it won here too; "overridden": it lost here, so eager stays; "refused": it could not run here or gave wrong
# results, so this host searched by itself
Verdict = Literal["adopted", "overridden", "refused"]
_OF_THIS_STORE = ""
_NAME = "name"
PIECE = 500  # proposals that are deleted in one transaction


@dataclass(frozen=True)
class Proposal:
    """A candidate that another host has chosen for a key."""

    candidate: Candidate
    reason: str  # of that host's decision
    speedup: float  # there

    @classmethod
    def of(cls, decision: Decision) -> Self:
        return cls(decision.candidate, decision.reason, decision.speedup)


class Proposals:
    """The proposals in one store."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def put(self, proposals: Mapping[DecisionKey, Proposal]) -> int:
        """Keep proposals for keys on which this store has no decision; how many."""
        by_key = {key.digest: (key, proposal) for key, proposal in proposals.items()}
        table, decided = models.ProposalRow, models.DecisionRow
        with self._file.write() as connection:
            closed = select(table.key).where(table.key.in_(by_key), table.status != "open")
            known = select(decided.key).where(decided.key.in_(by_key))
            for digest in connection.execute(closed.union(known)).scalars().all():
                del by_key[digest]
            put_keys(connection, (key for key, _ in by_key.values()))
            rows = [
                {
                    "key": digest,
                    "variant": proposal.candidate.variant,
                    "config": [list(pair) for pair in proposal.candidate.config],
                    "reason": proposal.reason,
                    "speedup": proposal.speedup,
                    "status": "open",
                    "message": "",
                    "at": now(),
                }
                for digest, (_, proposal) in by_key.items()
            ]
            upsert(connection, table, rows, ["key"], ["variant", "config", "reason", "speedup", "at"])
        return len(by_key)

    def get(self, key: DecisionKey) -> Proposal | None:
        """The open proposal for a key."""
        table = models.ProposalRow
        with self._file.read() as connection:
            row = connection.execute(select(table).where(table.key == key.digest, table.status == "open")).first()
        if row is None:
            return None
        return Proposal(Candidate(row.variant, as_tuples(row.config)), row.reason, row.speedup)

    def close(self, key: DecisionKey, verdict: Verdict, message: str) -> None:
        """Note what became of a proposal, with a line for people."""
        table = models.ProposalRow
        values = {"status": verdict, "message": clean(message), "at": now()}
        with self._file.write() as connection:
            connection.execute(update(table).where(table.key == key.digest).values(**values))

    def forget(self, days: float, most: int) -> int:
        """Delete proposals that nothing here has asked for in so many days, and all but the newest ``most``; how many.

        Verdicts stay, as decisions do. A piece is a transaction: nobody waits for long.
        """
        table, gone = models.ProposalRow, 0
        newest = select(table.at).where(table.status == "open").order_by(table.at.desc()).limit(1).offset(most)
        is_old = or_(table.at < now() - days * 86_400.0, table.at <= func.coalesce(newest.scalar_subquery(), 0.0))
        some = select(table.key).where(table.status == "open", is_old).order_by(table.key).limit(PIECE)
        while True:
            with self._file.read() as connection:
                if connection.execute(some).first() is None:
                    return gone
            with self._file.write() as connection:
                keys = connection.execute(some).scalars().all()
                connection.execute(delete(table).where(table.key.in_(keys)))
                connection.execute(delete(models.DecisionKeyRow).where(_is_unused(keys)))
            gone += len(keys)

    def verdicts(self, keys: Iterable[DecisionKey]) -> dict[str, str]:
        """The status of the proposals for some keys, by digest."""
        table = models.ProposalRow
        query = select(table.key, table.status).where(table.key.in_([key.digest for key in keys]))
        with self._file.read() as connection:
            return {row.key: row.status for row in connection.execute(query)}

    def counts(self) -> dict[str, int]:
        """How many proposals there are of each status."""
        table = models.ProposalRow
        with self._file.read() as connection:
            rows = connection.execute(select(table.status, func.count()).group_by(table.status))
            return {row[0]: row[1] for row in rows}

    def line(self, key: DecisionKey) -> str:
        """What became of the proposal for a key, in words; "" where nothing has yet."""
        table = models.ProposalRow
        with self._file.read() as connection:
            found = connection.execute(select(table.message).where(table.key == key.digest)).scalar_one_or_none()
        return found or ""


class FleetMarks:
    """This store's name among others, and how far it has exchanged rows with each server."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def own_name(self) -> str:
        """A name that no other store has; it says nothing of the host."""
        with self._file.write() as connection:
            found = _value(connection, _OF_THIS_STORE, _NAME)
            if not found:
                found = secrets.token_hex(16)
                _put(connection, _OF_THIS_STORE, {_NAME: found})
        return found

    def get(self, server: str, name: str) -> int:
        """The id of the last row of a kind that was exchanged with a server; 0 where none was."""
        with self._file.read() as connection:
            return int(_value(connection, server, name) or 0)

    def put(self, server: str, name: str, value: int) -> None:
        with self._file.write() as connection:
            _put(connection, server, {name: str(value)})


def _is_unused(keys: Sequence[str]) -> ColumnElement[bool]:
    """Of these keys, those that nothing names."""
    key = models.DecisionKeyRow
    named = (models.Request, models.CandidateRow, models.DecisionRow)
    return key.digest.in_(keys) & and_(*(~exists().where(table.key == key.digest) for table in named))


def _value(connection: Connection, server: str, name: str) -> str:
    table = models.FleetMark
    query = select(table.value).where(table.server == server, table.name == name)
    return connection.execute(query).scalar_one_or_none() or ""


def _put(connection: Connection, server: str, values: dict[str, str]) -> None:
    rows = [{"server": server, "name": name, "value": value} for name, value in values.items()]
    upsert(connection, models.FleetMark, rows, ["server", "name"], ["value"])
