"""Fixtures of the tests of CUDA graphs."""

from __future__ import annotations

import pytest

from tests.runtime.replays.bench import Bench, inputs, net, one_by_one, settle, weights


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


@pytest.fixture
def settled(bench):
    """A router whose calls are replayed, its weights, and what it should give."""
    w, b = weights()
    router = bench.router(net, inputs(0), w, b)
    plain = one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    if bench.failures:
        raise bench.failures[0][2]
    assert bench.codes == ["replayed"], bench.refusals
    return router, w, b, plain
