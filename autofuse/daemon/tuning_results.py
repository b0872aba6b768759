"""What tuning has found so far: written to the store, and looked up before more is tried.

In: a job's `Outcome`. Out: rows in the store; winners of the other buckets of a node, kernels of a node's parts; what
another host of the fleet proposes.
Guarantee: a kernel is stored before the decision that names it, and what became of a proposal before the decision that
follows from it, which is not sent to others. What a node's past says is read from the store once.
"""

from __future__ import annotations

from autofuse.daemon.devices import Devices
from autofuse.daemon.open_runs import OpenRuns
from autofuse.db.proposals import Proposal, Verdict
from autofuse.db.store import Store
from autofuse.ir.records import Bucket, Config, Decision, DecisionKey, KernelRecord, TuneRequest
from autofuse.tuner.benchmark_provider import LETHAL
from autofuse.tuner.outcome import Outcome
from autofuse.tuner.strategy_provider import STRATEGY


class TuningResults:
    """Results of one store."""

    def __init__(self, store: Store, devices: Devices, runs: OpenRuns) -> None:
        self._results = store.results
        self._kernels = store.kernels
        self._proposals = store.proposals
        self._verdicts: dict[str, tuple[Verdict, str]] = {}  # on proposals, by keys' digests, until they are written
        self._devices = devices
        self._runs = runs
        self._winners: dict[str, dict[Bucket, Config]] = {}  # by family of keys

    def write(self, request: TuneRequest, outcome: Outcome) -> None:
        """Store what a job has found. Raises StoreError."""
        for kernel in outcome.kernels:
            self._kernels.put(kernel)
        self._results.put_measurements(request.key, outcome.measurements)
        if request.key.digest in self._verdicts:
            self._proposals.close(request.key, *self._verdicts.pop(request.key.digest))
        for decision in outcome.decisions:
            self._results.put_decision(decision, request.run_id)
            if decision.reason == "won":
                self._runs.note(decision)
            _note_winner(self._winners.setdefault(request.key.family, {}), decision)

    def proposal(self, key: DecisionKey) -> Proposal | None:
        """What another host of the fleet has chosen for a key that this one has not decided on."""
        return self._proposals.get(key)

    def note_failures(self, key: DecisionKey, outcome: Outcome) -> None:
        """Store what became of a proposed candidate that could not be used, before this host searches by itself."""
        self._results.put_measurements(key, outcome.measurements)

    def judge(self, key: DecisionKey, verdict: Verdict, message: str) -> None:
        """Note what has become of a proposal; it is stored with the results of its request."""
        self._verdicts[key.digest] = (verdict, message)

    def winners(self, key: DecisionKey) -> dict[Bucket, Config]:
        """The winner of each bucket of the node so far. The first call also notes kernels that have killed a worker."""
        family = key.family
        if family not in self._winners:
            self._winners[family] = {}
            for stored in self._results.history(key.fusion_id):
                if stored.decision.key.family == family:
                    _note_winner(self._winners[family], stored.decision)
            for row in self._results.measurements(key.fusion_id):
                if row.measurement.status in LETHAL and row.measurement.compile_key:
                    self._devices.provider(key.device).lethal.add(row.measurement.compile_key)
        return self._winners[family]

    def kernel_of(self, decision: Decision) -> KernelRecord | None:
        """The kernel that a decision names; None where it names none, or the store has lost it."""
        return self._kernels.get(decision.compile_key) if decision.compile_key else None

    def last_decision(self, key: DecisionKey, bucket: Bucket) -> Decision | None:
        """The latest decision for a key in a bucket; None where there is none."""
        found = [
            stored.decision
            for stored in self._results.history(key.fusion_id)
            if stored.decision.key == key and stored.decision.bucket == bucket
        ]
        return found[-1] if found else None


def _note_winner(winners: dict[Bucket, Config], decision: Decision) -> None:
    if decision.reason == "won" and decision.candidate.variant != STRATEGY:
        winners[decision.bucket] = decision.candidate.config
