"""The rights in the guide are enough for a daemon, and no more than it needs."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.codegen.version import versions
from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_retention import Bounds, FleetRetention
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store
from autofuse.errors import FleetError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Candidate, Decision, Measurement
from tests.postgres import PASSWORD, Postgres
from tests.tuner.nodes import chain_form, request

GUIDE = Path(__file__).parents[2] / "docs/guides/fleet.md"


def statements(block: str) -> list[str]:
    return [statement.strip() for statement in block.split(";") if statement.strip()]


@pytest.fixture(scope="session")  # as the server: a worker may come back to this module
def url(postgres: Postgres) -> str:
    """The fleet's database as a host sees it, set up as the guide says."""
    make, rights, forget, *_ = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    postgres.sql(*statements(make))
    for role in ("fleet_owner", "fleet_host"):
        postgres.sql(f"ALTER ROLE {role} PASSWORD '{PASSWORD}'")
    with contextlib.closing(FleetServer(postgres.url("fleet", user="fleet_owner"))) as server:
        assert server.upgrade()
        with server.write() as connection:
            for statement in statements(rights) + statements(forget):
                connection.exec_driver_sql(statement)
    return postgres.url("fleet", user="fleet_host")


def test_the_rights_are_enough(url: str, tmp_path: Path) -> None:
    asked = [request(chain_form(length), (700,)) for length in (2, 3)]
    with (
        Store.open(tmp_path / "store.db") as store,
        contextlib.closing(FleetServer(url)) as server,
    ):
        exchange = FleetExchange(store, server, cpu_device(), [versions()])
        store.queue.add(asked)
        store.results.put_measurements(asked[0].key, [Measurement(Candidate("c_generic"), "ok", (700,))])
        exchange.push()
        store.queue.add([replace(asked[0], calls=99)])
        leased = exchange.queue.lease("one", exchange.run_id, [cpu_device().key], [versions()])
        assert leased is not None
        assert exchange.queue.renew("one", leased.key) and exchange.queue.give_back("one", leased.key, "requeued")
        store.results.put_decision(Decision.of(None, asked[0], Candidate("eager"), "no_gain", ""))
        while exchange.push():
            pass
        assert exchange.queue.length().done == 1 and exchange.queue.length().queued == 1
    with (
        Store.open(tmp_path / "other.db") as store,
        contextlib.closing(FleetServer(url)) as server,
    ):
        other = FleetExchange(store, server, cpu_device(), [versions()])
        assert other.pull() == 1
        other.note_seen()
        retention = FleetRetention(server, Bounds(days=30.0, keys=1, measurements=1))
        assert retention.begin() and retention.step() == 1


def test_a_role_that_may_not_delete_does_all_the_rest(url: str, postgres: Postgres, tmp_path: Path) -> None:
    forget = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)[2]
    again = statements(forget)
    withdrawn = [re.sub("^GRANT", "REVOKE", statement).replace(" TO ", " FROM ") for statement in again]
    postgres.sql(*withdrawn, database="fleet")
    with contextlib.closing(FleetServer(url)) as server, Store.open(tmp_path / "store.db") as store:
        FleetExchange(store, server, cpu_device(), [versions()]).note_seen()
        retention = FleetRetention(server, Bounds(days=30.0, keys=1, measurements=1))
        assert not retention.begin() and retention.step() == 0
    postgres.sql(*again, database="fleet")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM alembic_version",
        "DELETE FROM fleet_marks",
        "UPDATE runs SET machine = ''",
        "UPDATE decisions SET variant = 'eager'",
        "UPDATE measurements SET speedup = 9",
        "UPDATE alembic_version SET version_num = '0999'",
        "INSERT INTO kernels DEFAULT VALUES",
        "TRUNCATE requests",
        "CREATE TABLE mine (id int)",
        "DROP TABLE requests",
    ],
)
def test_the_rights_are_no_more_than_that(url: str, statement: str) -> None:
    with (
        contextlib.closing(FleetServer(url)) as server,
        pytest.raises(FleetError, match=r"(permission denied|must be owner)"),
        server.share() as connection,
    ):
        connection.exec_driver_sql(statement)


def test_without_them_the_line_says_where_they_are(url: str, postgres: Postgres) -> None:
    postgres.sql("CREATE ROLE stranger LOGIN", f"ALTER ROLE stranger PASSWORD '{PASSWORD}'")
    with (
        contextlib.closing(FleetServer(url.replace("fleet_host", "stranger"))) as server,
        pytest.raises(FleetError, match=r"permission denied .*; grant this role the rights that docs/guides/fleet.md"),
    ):
        server.check()
