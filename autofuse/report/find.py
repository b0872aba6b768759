"""Finds a node or a module by a name that a person typed, and collects all stored data of it.

In: a store and a name: a node's label, its fusion_id, the beginning or (labels end in a hash) the end of either, or a
module's class name or key. Out: a ``NodeStory`` or a ``RootStory``. Errors: UsageError with the nearest names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse.db.rows import KernelSource, NodeRow, RequestRow, RootChange, StoredDecision, StoredMeasurement
from autofuse.db.store import Store
from autofuse.errors import UsageError
from autofuse.ir.records import Decision, DecisionKey, DimHistogram, NodeUse, RootRecord

ELLIPSIS = "…"  # in the middle of labels that reports have cut, which are found as well


@dataclass(frozen=True)
class BucketStory:
    """Everything that is stored of a node under one decision key."""

    key: DecisionKey
    decisions: tuple[StoredDecision, ...]  # oldest first, the last one stands
    measurements: tuple[StoredMeasurement, ...]
    request: RequestRow | None
    kernel: KernelSource | None = None  # the kernel of the standing decision
    miss: str = ""  # without a decision: how the node's nearest decision key differs


@dataclass(frozen=True)
class NodeStory:
    """Everything that is stored of a node."""

    node: NodeRow
    uses: tuple[NodeUse, ...]  # one for each run and bucket
    buckets: tuple[BucketStory, ...]


@dataclass(frozen=True)
class RootStory:
    """Everything that is stored of a module that may be captured."""

    root: RootRecord
    changes: tuple[RootChange, ...]  # oldest first
    histograms: tuple[DimHistogram, ...]  # of the newest run in which its state changed


def name_of(node: NodeRow) -> str:
    return node.label or f"node_{node.fusion_id[:12]}"


def cut(name: str, width: int = 48) -> str:
    """A label cut in the middle to ``width`` characters: its end, a hash, tells it from others."""
    if len(name) <= width:
        return name
    tail = name[name.rfind("_") :]
    return name[: max(8, width - len(tail) - 1)] + ELLIPSIS + tail


def find(store: Store, name: str) -> NodeStory | RootStory:
    """The node or module called ``name``. Errors: UsageError if none or several nodes match."""
    nodes, roots = store.nodes.known(), list(store.roots.known().values())
    found = _matching(name, nodes)
    if len(found) == 1:
        return node_story(store, found[0])
    if len(found) > 1:
        some = ", ".join(name_of(node) for node in found[:5])
        raise UsageError(f"expected the name of one node, found {len(found)} for {name!r}; type one of: {some}")
    named = [root for root in roots if name in (root.name, root.root)]
    named = named or [root for root in roots if name and root.root.startswith(name)]
    if named:
        return root_story(store, max(named, key=lambda root: root.eager_seconds + root.capture_seconds))
    raise UsageError(_not_found(name, nodes, roots))


def _matching(name: str, nodes: Sequence[NodeRow]) -> list[NodeRow]:
    """The nodes that a name matches: exactly, else by a beginning, a cut label, or an ending."""
    if not name:
        return []
    head, _, tail = name.partition(ELLIPSIS)
    tests = (
        lambda node: name in (name_of(node), node.fusion_id),
        lambda node: name_of(node).startswith(name) or node.fusion_id.startswith(name.removeprefix("node_")),
        lambda node: ELLIPSIS in name and name_of(node).startswith(head) and name_of(node).endswith(tail),
        lambda node: name_of(node).endswith(f"_{name}"),
    )
    for test in tests:
        found = [node for node in nodes if test(node)]
        if found:
            return found
    return []


def _not_found(name: str, nodes: Iterable[NodeRow], roots: Iterable[RootRecord]) -> str:
    known = {name_of(node) for node in nodes} | {root.name for root in roots}
    if not known:
        return f"expected the name of a node, found {name!r} and a store without nodes; type: autofuse run SCRIPT.py"
    ranked = sorted((-_likeness(name, other), other) for other in known)
    near = [other for likeness, other in ranked[:3] if -likeness >= 0.6]
    hint = f"did you mean {' or '.join(near)}? List all" if near else "list them"
    return f"expected the name of a node or module in this store, found {name!r}; {hint} with: autofuse explain"


def _likeness(name: str, other: str) -> float:
    """How like a name is to another, 0 to 1; a beginning of a long label is as good as the label."""
    return max(
        difflib.SequenceMatcher(None, name.lower(), text.lower()).ratio() for text in (other, other[: len(name) + 1])
    )


def node_story(store: Store, node: NodeRow) -> NodeStory:
    decisions = store.results.history(node.fusion_id)
    measurements = store.results.measurements(node.fusion_id)
    requests = {row.key: row for row in store.queue.requests(node.fusion_id)}
    keys = dict.fromkeys([row.decision.key for row in decisions] + [row.key for row in measurements] + list(requests))
    return NodeStory(
        node=node,
        uses=tuple(store.nodes.uses(fusion_id=node.fusion_id)),
        buckets=tuple(
            BucketStory(
                key=key,
                decisions=tuple(row for row in decisions if row.decision.key == key),
                measurements=tuple(row for row in measurements if row.key == key),
                request=requests.get(key),
                kernel=_kernel(store, [row.decision for row in decisions if row.decision.key == key]),
                miss=miss_of(key, [row.decision.key for row in decisions]),
            )
            for key in keys
        ),
    )


def miss_of(key: DecisionKey, decided: Iterable[DecisionKey]) -> str:
    """How a node's nearest decision key differs from ``key``; "" where ``key`` itself is decided, or nothing is."""
    names = ("bucket", "device", "threads", "versions")
    misses: list[list[str]] = [
        [
            f"{name} {getattr(other, name)} in place of {getattr(key, name)}"
            for name in names
            if getattr(other, name) != getattr(key, name)
        ]
        for other in decided
        if other.fusion_id == key.fusion_id
    ]
    nearest = min(misses, key=len) if misses else []
    return "; ".join(nearest)


def _kernel(store: Store, decisions: Sequence[Decision]) -> KernelSource | None:
    digest = decisions[-1].compile_key if decisions else None
    return store.kernels.source(digest) if digest else None


def root_story(store: Store, root: RootRecord) -> RootStory:
    changes = store.roots.changes(root.root)
    histograms = store.profiles.dims(changes[-1].run_id) if changes else []
    return RootStory(root, tuple(changes), tuple(item for item in histograms if item.owner == root.root))
