"""Threads share compile processes: as many as ask at once, each for one source at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from autofuse.codegen.triton.source import NOTHING_ASSUMED, TritonSource
from autofuse.tuner import compiler_pool
from autofuse.tuner.compiler_pool import CompilerPool, process_count
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.worker_process import CandidateProblem
from tests.codegen.triton.sources import elementwise, row_softmax, two_passes


class Slow(TritonCompiler):
    """Compiles only while as many threads do as the barrier asks for."""

    together = threading.Barrier(1)

    def compile(self, source, target, assumptions, reads_code=False):  # type: ignore[no-untyped-def]
        self.together.wait(30.0)
        return super().compile(source, target, assumptions, reads_code)


@pytest.fixture
def made() -> list[Slow]:
    return []


@pytest.fixture
def pool(made: list[Slow]) -> Iterator[CompilerPool]:
    def make() -> TritonCompiler:
        made.append(Slow(lambda key: None, lambda key, files: None))
        return made[-1]

    pool = CompilerPool(make, 2)
    yield pool
    pool.close()


def _compile(pool: CompilerPool, source: TritonSource) -> str:
    return pool.compile(source, "cuda:90", [NOTHING_ASSUMED]).source.name


def test_one_thread_keeps_to_one_process(pool, made, monkeypatch):
    monkeypatch.setattr(Slow, "together", threading.Barrier(1))
    for source in (row_softmax(), elementwise()):
        _compile(pool, source)
    assert sorted(compiler.generation for compiler in made) == [0, 1]


def test_threads_compile_side_by_side_and_get_their_own(pool, made, monkeypatch):
    monkeypatch.setattr(Slow, "together", threading.Barrier(2))  # passed only by two at once
    sources = [row_softmax(), elementwise(), two_passes(), row_softmax()]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda source: _compile(pool, source), sources)) == [s.name for s in sources]
    assert [compiler.generation for compiler in made] == [1, 1]


def test_processes_outlive_the_threads_that_asked_for_them(pool, made, monkeypatch):
    """The parent of a process is a thread, and with `PR_SET_PDEATHSIG` a process ends with its parent."""
    monkeypatch.setattr(Slow, "together", threading.Barrier(2))
    for sources in ([row_softmax(), elementwise()], [two_passes(), elementwise(3.0)], [row_softmax(7), row_softmax(9)]):
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda source: _compile(pool, source), sources)) == [s.name for s in sources]
        time.sleep(0.2)
    assert [compiler.generation for compiler in made] == [1, 1]
    assert all(compiler.pid is not None and psutil.pid_exists(compiler.pid) for compiler in made)


def test_a_process_that_failed_is_used_again(pool, made, monkeypatch):
    monkeypatch.setattr(Slow, "together", threading.Barrier(1))
    with pytest.raises(CandidateProblem, match="expected a target"):
        pool.compile(row_softmax(), "cuda:nonsense", [NOTHING_ASSUMED])
    for _ in made:  # all are free again
        assert _compile(pool, row_softmax()) == row_softmax().name


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (4, 2), (16, 4), (200, 4)])
def test_cores_are_left_for_the_script(cores, count, monkeypatch):
    monkeypatch.setattr(compiler_pool.os, "sched_getaffinity", lambda _: range(cores))
    assert process_count() == count
