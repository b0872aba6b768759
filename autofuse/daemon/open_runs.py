"""The scripts of this machine whose runs are in the store: which process asks, and what its kernels have saved it.

In: runs in the store, scripts that have announced themselves. Out: process numbers, seconds saved.
Guarantee: a run of another machine is never taken for a process here that has the same number by chance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from autofuse.daemon.peers import Peers, Script
from autofuse.daemon.process_id import start_ticks, this_machine
from autofuse.db.history import LONGEST_RUN_SECONDS
from autofuse.db.node_log import NodeLog
from autofuse.db.rows import RunRow
from autofuse.db.run_log import RunLog
from autofuse.ir.records import Decision

RECENT_RUNS = 32


class OpenRuns:
    """Runs that have not ended, as one daemon sees them."""

    def __init__(self, runs: RunLog, nodes: NodeLog, peers: Peers) -> None:
        self.asking: int | None = None  # the run whose request is in work
        self._runs = runs
        self._nodes = nodes
        self._peers = peers
        self._gains: dict[tuple[str, str], tuple[float, float]] = {}  # by node and bucket: when, us saved a call

    def asking_pid(self) -> int | None:
        """The process whose request is in work, None where it has ended or runs on another machine."""
        here = {script.pid for script in self._peers.scripts()}
        return next((run.pid for run in self._here() if run.id == self.asking and run.pid in here), None)

    def note(self, decision: Decision, at: float | None = None) -> None:
        """Count what the kernel of a decision saves, from now on or from ``at`` (UTC epoch seconds)."""
        gain = decision.unfused_us - decision.fused_us
        self._gains[decision.key.fusion_id, decision.bucket.label] = time.time() if at is None else at, gain

    def saved(self, scripts: Sequence[Script]) -> dict[int, float]:
        """Seconds that kernels have saved each script, by process number; only kernels decided while it ran count."""
        began = {script.pid: script.began for script in scripts}
        found = {}
        for run in self._here() if self._gains else ():
            if run.pid in began:
                calls = self._nodes.fused_calls(run.id)
                late = {key: gain for key, (at, gain) in self._gains.items() if at > began[run.pid]}
                found[run.pid] = sum(calls.get(key, 0) * gain for key, gain in late.items()) / 1e6
        return found

    def _here(self) -> list[RunRow]:
        """Recent runs of this machine that have not ended: process numbers of other machines mean nothing here."""
        here = this_machine()
        return [run for run in self._runs.recent(RECENT_RUNS) if run.finished_at is None and run.machine == here]


def may_go_on(run: RunRow) -> bool:
    """Whether a run's process may still write to the store; of another machine's, whether it is young enough."""
    if run.finished_at is not None:
        return False
    if run.machine == this_machine():
        return start_ticks(run.pid) >= 0
    return time.time() - run.started_at < LONGEST_RUN_SECONDS
