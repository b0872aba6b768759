"""What all tests share: Triton imported for its interpreter, random numbers that are a test's own, and a folder in
which their scripts and daemons meet no others of this machine.

`--march` has all C generated for another processor; `--every-state` runs the table of semantics in all states;
`--tenth` runs a tenth of the tests.
Triton comes before torch, which imports it too: kernels for GPUs are checked on CPU tensors. Compilers of Triton run
in processes of their own.
"""

import gc
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autofuse.codegen.c.target import NATIVE, OTHERS, can_run, generated_for
from autofuse.codegen.triton.interpret import import_interpreted
from tests import compiled_once, compiled_statements, forked

# torch, Triton and nine thousand tests are some million objects that live as long as the process. Collections looked
# through them all again and again: a tenth of the CPU time of tests that trace.
gc.disable()
import_interpreted()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if TYPE_CHECKING:
    from tests.postgres import Postgres

_shared = tempfile.TemporaryDirectory(prefix="autofuse-tests-")
os.environ.setdefault("AUTOFUSE_TUNER_SHARED_FOLDER", _shared.name)
_compiled = tempfile.TemporaryDirectory(prefix="autofuse-compiled-")
compiled_once.install(Path(_compiled.name))
compiled_statements.install()
_forms = tempfile.TemporaryDirectory(prefix="autofuse-forms-")
os.environ.setdefault("AUTOFUSE_TUNER_NICE", "0")  # beside another test, a daemon at 19 would take minutes to start
os.environ.setdefault("TEST_FORMS", _forms.name)  # the processes of one session share it

# pytest gives its handlers to loggers that do not propagate, and then torch writes each step of each trace as JSON.
logging.getLogger("torch.__trace").propagate = True

# A machine that others keep busy says nothing about a test's strategy.
settings.register_profile("busy", settings.default, suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")


@pytest.fixture(scope="session")
def postgres() -> "Iterator[Postgres]":
    """A PostgreSQL server of this session's."""
    from tests.postgres import running_postgres  # imports the store, which few tests need

    with running_postgres() as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--march", default=NATIVE, choices=[NATIVE, *OTHERS], help="generate all C for this processor")
    parser.addoption(
        "--every-state", action="store_true", help="run each program of the table of semantics in all states"
    )
    parser.addoption("--tenth", type=int, choices=range(10), help="run the tests of this tenth, 0 to 9; by their names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tenth = config.getoption("--tenth")
    if tenth is not None:
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 10 == tenth]


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected: what they choose among depends on it."""
    march = config.getoption("--march")
    if not can_run(march):
        raise pytest.UsageError(f"expected a processor that runs code for {march}, found another")
    chosen = generated_for(march)
    chosen.__enter__()
    config.add_cleanup(lambda: chosen.__exit__(None, None, None))


def pytest_collection_finish() -> None:
    """From here on the collector looks at what tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    forked.stop()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers whichever tests ran before it in its process; TEST_SEED=n draws others."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + int(os.environ.get("TEST_SEED", "0")))
