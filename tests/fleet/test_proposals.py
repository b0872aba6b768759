"""What a daemon makes of another host's decision: adopted, overridden, or refused and searched for by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autofuse.daemon.loop import TuningLoop
from autofuse.db.proposals import Proposal
from autofuse.db.store import Store
from autofuse.errors import CompilerNotReady
from autofuse.ir.records import EAGER, Bucket, Candidate, Decision, TuneRequest, make_config
from autofuse.optim.form import StepForm
from autofuse.strategies.bundle import is_bundle
from autofuse.strategies.enumeration import PARTS
from autofuse.tuner.benchmark_provider import Built, NodeBenchmarks
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.outcome import Outcome
from autofuse.tuner.strategy_provider import STRATEGY, StrategyBenchmarks
from autofuse.tuner.worker_process import CandidateProblem, NotReady
from tests.tuner.loops import count_searches, quick_loop, slow_candidates
from tests.tuner.nodes import chain_form, group_form, request


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TuningLoop]:
    """One loop for all: its worker imports torch once."""
    with quick_loop(tmp_path_factory.mktemp("host"), is_urgent=True) as made:
        yield made


@pytest.fixture
def store(loop: TuningLoop) -> Iterator[Store]:
    with Store.open(loop.settings.run.store) as opened:
        yield opened


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each search that was begun."""
    return count_searches(monkeypatch)


Work = Callable[[TuneRequest, Decision], Decision]


@pytest.fixture
def work(loop: TuningLoop, store: Store) -> Work:
    def work(asked: TuneRequest, proposed: Decision) -> Decision:
        """The decision of this host on a request for which there is a proposal."""
        assert store.proposals.put({asked.key: Proposal.of(proposed)}) == 1
        store.queue.add([asked])
        assert loop.drain(lambda done, total: None).failed == 0
        return next(d for _, d in store.results.decisions() if d.key == asked.key)

    return work


def ask(length: int, width: int = 512) -> TuneRequest:
    return request(chain_form(length, width), (700,), calls=1)


def proposal(asked: TuneRequest, candidate: Candidate, reason: str = "won", speedup: float = 2.0) -> Decision:
    """A decision that another host has made."""
    made = Decision.of(None, asked, candidate, reason, "on another host")
    return replace(made, speedup=speedup)


@pytest.fixture(scope="module")
def usual(loop: TuningLoop) -> Candidate:
    """What a search finds for such chains."""
    asked = ask(8, 256)
    with Store.open(loop.settings.run.store) as store:
        store.queue.add([asked])
        loop.drain(lambda done, total: None)
        found = next(d for _, d in store.results.decisions() if d.key == asked.key)
    assert found.reason == "won" and found.candidate.variant == "c_generic"
    return found.candidate


def test_what_wins_here_too_is_adopted_without_a_search(
    work: Work, store: Store, usual: Candidate, searches: list[int]
) -> None:
    asked = ask(7)
    found = work(asked, proposal(asked, usual))
    assert searches == [] and found.trials == 1 and found.candidate == usual and found.reason == "won"
    assert found.detail.startswith("as another host of the fleet found, where it gained 2.00x; ")
    assert found.compile_key is not None and store.kernels.get(found.compile_key) is not None, "compiled here"
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "adopted"


def test_eager_is_adopted_as_it_is(work: Work, store: Store, searches: list[int]) -> None:
    asked = ask(6)
    found = work(asked, proposal(asked, Candidate(EAGER), "no_gain", 0.9))
    assert searches == [] and found.candidate.variant == EAGER and found.reason == "no_gain" and found.trials == 0
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "adopted"


def test_what_loses_here_is_overridden_and_leaves_a_measurement(
    work: Work, store: Store, usual: Candidate, searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_candidates(monkeypatch)
    asked = ask(5)
    found = work(asked, proposal(asked, usual))
    assert searches == [] and found.candidate.variant == EAGER and found.reason == "no_gain"
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "overridden"
    rows = [row for row in store.results.measurements(asked.key.fusion_id) if row.key == asked.key]
    assert [row.measurement.speedup is not None and row.measurement.speedup < 1.0 for row in rows] == [True]


def test_what_is_wrong_here_is_not_adopted(
    work: Work, store: Store, usual: Candidate, searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, refused = NodeBenchmarks.check, []

    def judge(self: NodeBenchmarks, built: Built, cases: list[CheckCase], budget: float, least: int) -> float:
        if not refused:  # the proposal comes first
            refused.append(built.candidate)
            raise CandidateProblem("wrong", "an error of 3.1 times eager's")
        return check(self, built, cases, budget, least)

    monkeypatch.setattr(NodeBenchmarks, "check", judge)
    asked = ask(4)
    odd = make_config(dict(usual.config))
    found = work(asked, proposal(asked, Candidate("c_generic", odd)))
    assert refused == [usual] and searches == [1], "this host has searched by itself"
    assert found.trials > 1 or found.reason != "won"
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "refused"
    assert "error of 3.1" in store.proposals.line(asked.key)
    rows = [row.measurement.status for row in store.results.measurements(asked.key.fusion_id)]
    assert rows[0] == "wrong", "what it disagrees about is measured"


@pytest.mark.parametrize(
    ("length", "change"), [(3, {"warp_speed": 9}), (2, {"threads": 10_000})], ids=["unknown knob", "unknown value"]
)
def test_what_this_host_does_not_know_is_refused_in_one_line(
    work: Work,
    usual: Candidate,
    searches: list[int],
    length: int,
    change: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = ask(length)
    strange = Candidate(usual.variant, make_config({**dict(usual.config), **change}))
    with caplog.at_level(logging.INFO, "autofuse.daemon"):
        found = work(asked, proposal(asked, strange))
    assert searches and found.candidate.config != strange.config
    lines = [r.getMessage() for r in caplog.records if "was refused" in r.getMessage()]
    assert len(lines) == 1 and next(iter(change)) in lines[0] and "\n" not in lines[0]
    # On a busy machine a race may be unsure.
    assert lines[0].endswith("; this host searches by itself") and found.reason in ("won", "undecided")


@pytest.mark.parametrize(
    "change",
    [
        {"node": chain_form(11).to_json()},
        {"bucket": Bucket(((1, 10**6),))},
        {"node": {"operations": "none"}},
        {"node": StepForm("sgd", (), "float32", (8,)).node()},
    ],
    ids=["another node", "another bucket", "no node", "a step"],
)
def test_a_request_that_names_another_node_is_not_worked_on(
    loop: TuningLoop, store: Store, searches: list[int], change: dict[str, Any]
) -> None:
    """Else a kernel for it would be stored under the name of a node of this host's scripts."""
    asked = ask(10)
    before = len(store.results.decisions())
    loop.help(replace(asked, **change))
    assert loop._fleet._ended.pop() == (asked.key, "failed", "it does not name the node that it holds")
    assert searches == [] and len(store.results.decisions()) == before


def test_a_request_of_another_host_is_tuned_and_counts_for_no_run_here(loop: TuningLoop, store: Store) -> None:
    asked = replace(ask(12), run_id=77)  # a number on the server
    loop.help(asked)
    assert loop._fleet._ended.pop() == (asked.key, "done", "")
    (found,) = [d for d in store.results.history() if d.decision.key == asked.key]
    assert found.run_id is None
    loop.help(asked)
    assert loop._fleet._ended.pop() == (asked.key, "done", "")
    assert len([d for d in store.results.history() if d.decision.key == asked.key]) == 1, "known already"


def by_parts(asked: TuneRequest) -> Decision:
    """Another host has found that a group is best run by aten's product and one kernel."""
    return proposal(asked, Candidate(STRATEGY, ((STRATEGY, PARTS),)))


def test_a_strategy_that_wins_here_too_is_adopted_alone(work: Work, store: Store) -> None:
    asked = request(group_form(6), (700,), calls=1)
    found = work(asked, by_parts(asked))
    assert found.candidate == by_parts(asked).candidate and found.reason == "won" and found.trials == 1
    assert found.detail.startswith("as another host of the fleet found, where it gained 2.00x; ")
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "adopted"
    kernel = store.kernels.get(found.compile_key or "")
    assert kernel is not None and is_bundle(kernel.binary), "its part was tuned and compiled here"


def test_a_strategy_that_loses_here_is_overridden(work: Work, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    race = StrategyBenchmarks.race

    def slowed(self: StrategyBenchmarks, *arguments: Any) -> Any:
        result = race(self, *arguments)
        return replace(result, samples=[result.samples[0], *([99.0 * s for s in own] for own in result.samples[1:])])

    monkeypatch.setattr(StrategyBenchmarks, "race", slowed)  # of groups alone: its part wins
    asked = request(group_form(4), (700,), calls=1)
    found = work(asked, by_parts(asked))
    assert found.candidate.variant == EAGER and found.reason == "no_gain"
    assert store.proposals.verdicts([asked.key])[asked.key.digest] == "overridden"
    tried = {row.measurement.candidate for row in store.results.measurements(asked.key.fusion_id)}
    assert tried == {by_parts(asked).candidate}, "and no other strategy"


@pytest.mark.parametrize("problem", [NotReady("no GPU"), CompilerNotReady("no gcc"), OSError("no room")])
def test_what_this_host_cannot_do_just_now_is_left_to_others(
    loop: TuningLoop, problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper whose compiler is missing must not fail the requests of the whole fleet one after the other."""
    asked = ask(13)

    def fail(request: TuneRequest) -> Outcome:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(loop._tuner, "tune", fail)
        broken.setattr(loop._devices, "_not_ready", {})
        loop.help(asked)
        assert loop._fleet._ended.pop() == (asked.key, "requeued", "")
        assert loop._devices.lent(lambda key: False) == [], "and it takes no other one for a while"
    assert loop._devices.lent(lambda key: False) == [loop._devices.cpu]


def test_a_strategy_that_is_not_there_is_refused(work: Work, store: Store, searches: list[int]) -> None:
    asked = ask(9)
    found = work(asked, proposal(asked, Candidate(STRATEGY, ((STRATEGY, "magic"),))))
    assert searches and store.proposals.verdicts([asked.key])[asked.key.digest] == "refused" and found.trials >= 1


def test_what_another_host_works_on_goes_last(loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {calls: request(chain_form(n, 96), (900,), calls=calls) for n, calls in ((2, 10), (3, 30), (4, 20))}
    store.queue.add(asked.values())
    monkeypatch.setattr(loop._fleet, "is_elsewhere", lambda key: key == asked[30].key)
    taken = []
    while (found := loop.queue.take()) is not None:
        taken.append(found.calls)
        store.queue.finish(found.key, "done")
    assert taken == [20, 10, 30]
