"""What was decided about a run's nodes on its requests, and decisions that do not hold for it.

In: the store's decisions. Out: how many kernels were promoted and which were given up; nodes that were decided for
other versions only, as before an upgrade of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autofuse.db.rows import StoredDecision
from autofuse.ir.records import EAGER, Decision, NodeUse
from autofuse.report import wording


@dataclass(frozen=True)
class GivenUp:
    """A kernel that had won its race, and was slower than eager in the script."""

    node: str  # label
    fusion_id: str
    bucket: str
    detail: str  # both times


@dataclass(frozen=True)
class Decided:
    """Of the nodes that a run used."""

    promoted: int  # nodes and buckets for which a kernel has won, on requests of this run
    given_up: tuple[GivenUp, ...]  # in this run
    expired: int  # nodes whose decisions are all of other versions
    expired_versions: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """``31 kernels promoted, 1 given up; 12 nodes were decided for torch 2.12 only``; "" where there is nothing."""
        counts = [
            f"{wording.plural(self.promoted, 'kernel')} promoted" if self.promoted else "",
            f"{len(self.given_up):,} given up" if self.given_up else "",
        ]
        found = ", ".join(text for text in counts if text)
        if self.expired:
            versions = " or ".join(self.expired_versions)
            old = f"{wording.plural(self.expired, 'node was', 'nodes were')} decided for {versions} only"
            found = f"{found}; {old}" if found else old
        return found


def decided_of(
    history: Sequence[StoredDecision],
    uses: Iterable[NodeUse],
    decided: Mapping[str, Collection[Decision]],
    others: Mapping[str, Collection[Decision]],
) -> Decided:
    """``history``: of the run's requests, oldest first; ``decided``: what holds for the run, by node; ``others``: what
    holds for other versions."""
    labels = {use.fusion_id: use.label for use in uses}
    last = {row.decision.key.digest: row.decision for row in history}
    expired = [fusion_id for fusion_id in labels if fusion_id not in decided and fusion_id in others]
    versions = {decision.key.versions for fusion_id in expired for decision in others[fusion_id]}
    return Decided(
        promoted=sum(decision.candidate.variant != EAGER for decision in last.values()),
        given_up=tuple(
            GivenUp(labels.get(d.key.fusion_id, d.key.fusion_id[:12]), d.key.fusion_id, d.bucket.label, d.detail)
            for d in last.values()
            if d.reason == "slower_live"
        ),
        expired=len(expired),
        expired_versions=tuple(sorted(versions)),
    )
