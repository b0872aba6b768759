"""What a person or a server has wrong: one line says what to do, and the daemon goes on with its own store.

Decisions that name unknown knobs are in `test_proposals`; what the command line says, in `tests/db/test_fleet_server`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofuse.daemon import fleet as fleet_module
from autofuse.daemon.loop import TuningLoop
from autofuse.daemon.request_tuner import RequestTuner
from autofuse.db.proposals import Proposal
from autofuse.db.store import Store
from autofuse.ir.records import Candidate, Decision
from autofuse.optim.form import form_of_request
from autofuse.settings.layers import load
from tests.postgres import PASSWORD, Postgres
from tests.tuner.nodes import chain_form, request


@pytest.fixture(scope="module")
def urls(postgres: Postgres) -> Iterator[dict[str, str]]:
    """URLs with which something is wrong, by what it is."""
    newer = postgres.new_database()
    postgres.sql("UPDATE alembic_version SET version_num = '0999'", database=newer)
    postgres.sql(f"CREATE ROLE newcomer LOGIN PASSWORD '{PASSWORD}'")
    own = postgres.url(postgres.new_database())
    with postgres.offering_tls() as certificate:  # for another name
        yield {
            "wrong URL": own.replace("+psycopg", ""),
            "newer schema": postgres.url(newer),
            "certificate": f"{own}?sslmode=verify-full&sslrootcert={certificate}",
            "password": own.replace(PASSWORD, "wr0ng"),
            "rights": own.replace("owner:", "newcomer:"),
        }
    postgres.sql("DROP ROLE newcomer")  # the server outlives this module, whose tests one process may begin twice


@pytest.mark.parametrize(
    ("trouble", "advice"),
    [
        ("wrong URL", r"expected fleet\.url=postgresql\+psycopg://USER@HOST/DATABASE"),
        ("newer schema", r"upgrade with: pip install --upgrade autofuse"),
        ("certificate", r"name the server in fleet\.url as its certificate does"),
        ("password", r"mend the password in ~/\.pgpass or PGPASSWORD"),
        ("rights", r"grant this role the rights that docs/guides/fleet\.md lists"),
    ],
)
def test_one_line_says_what_to_do_and_requests_are_answered(
    trouble: str,
    advice: str,
    urls: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(RequestTuner, "_begin", lambda _, asked: form_of_request(asked.node))  # nothing is compiled
    monkeypatch.setattr(fleet_module, "LONGEST_PAUSE_SECONDS", 0.01)
    cli = {"run.store": tmp_path / "store.db", "fleet.url": urls[trouble], "tuner.shared_folder": tmp_path / "shared"}
    asked = request(chain_form(), (700,), calls=1)
    with Store.open(tmp_path / "store.db") as store, caplog.at_level(logging.INFO, "autofuse.daemon"):
        store.proposals.put({asked.key: Proposal.of(Decision.of(None, asked, Candidate("eager"), "no_gain", ""))})
        store.queue.add([asked])
        loop = TuningLoop(load(cli, environ={}, cwd=tmp_path), is_urgent=lambda: True)
        try:
            done = loop.drain(lambda done, total: None)
        finally:
            loop.close()
        assert done.done == 1 and [d.key for _, d in store.results.decisions()] == [asked.key]
    (line,) = [r.getMessage() for r in caplog.records if "goes on with its own store" in r.getMessage()]
    assert re.search(advice, line) and "\n" not in line and PASSWORD not in line and "wr0ng" not in line
