"""Groups: matmuls, convolutions and attentions with the nodes around them, which together have several strategies.

In: a graph and its nodes. Out: `Group`s, each with the operations of some nodes and the matmuls between them.
Guarantee: groups do not overlap, and contracting each to a point leaves the graph acyclic. A group is an alternative:
until one of its strategies has won, its nodes and matmuls run one by one, as without the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autofuse.fusion.analyzer import build_node
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import BYTES_PER_ELEMENT, Operation, ValueRef
from autofuse.ir.optable import FUSIBLE, TORCH_ATTENTIONS, OpKind, info
from autofuse.ir.records import Refusal
from autofuse.ir.shape import free_symbols
from autofuse.strategies.channels_last import CONVOLUTIONS, DEEPEST_NET, LARGEST_NET, LEAST_NET, keeps_images, layouts
from autofuse.strategies.enumeration import (
    GENERATED,
    GENERATED_CONVOLUTION,
    GENERATED_ROWS,
    LEAST_FLOPS,
    TILED,
    generated_names,
    tiles_of,
)
from autofuse.strategies.rewrites import LONE, rewrites
from autofuse.strategies.sdpa_match import find_attention

PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm"])
LINEARS = frozenset(["mm", "addmm"])
GRADIENTS = "convolution_backward"
# In no group: opaque operations, ours that draw, and libraries', which no worker can call beside a library's matmul.
_ALONE = ("opaque.", "autofuse.philox", "autofuse.bernoulli", "library.")


@dataclass(frozen=True)
class Group:
    """Operations with several strategies."""

    node: FusionNode  # all operations of the group, with the graph's names
    members: tuple[int, ...]  # indices of the nodes that are part of the group
    kind: str  # "matmul", "conv", "net" or "attention"

    @property
    def operations(self) -> frozenset[str]:
        """The names of the group's operations, without views."""
        return frozenset(op.name for op in self.node.kernels)


@dataclass
class _Finder:
    graph: FusionGraph
    nodes: Sequence[FusionNode]
    config: FusionConfig
    taken: frozenset[str]  # operations of attentions in training
    groups: list[Group] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)  # operation -> its node
    unit: dict[str, frozenset[str]] = field(default_factory=dict)  # operation -> all operations of its node

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            names = frozenset(op.name for op in node.kernels)
            self.home.update(dict.fromkeys(names, index))
            self.unit.update(dict.fromkeys(names, names))

    def run(self) -> None:
        if self.config.enable_attention:
            for names in self._attentions():
                self._try(names, "attention")
        if self.config.enable_conv:
            for names in self._nets():
                self._try(names, "net")
        for op in self.graph.operations:
            if op.short_name in CONVOLUTIONS and self.config.enable_conv:
                self._try(self._around(op), "conv")
            elif op.short_name in PRODUCTS and self.config.enable_matmul:
                self._try(self._around(op), "matmul")
        # Matmuls without an epilogue: a library's kernel, or a generated one, may be faster than aten's.
        for op in self.graph.operations:
            lone = PRODUCTS if op.outputs and op.outputs[0].device == "cpu" else LINEARS
            if op.short_name in lone and self.config.enable_matmul and self._is_long(op):
                self._try({op.name}, "matmul")
            elif op.short_name in (*CONVOLUTIONS, GRADIENTS) and self.config.enable_conv:
                self._try({op.name}, "conv")  # aten's calls have a high fixed cost
            elif op.target in TORCH_ATTENTIONS and self.config.enable_attention:
                self._try({op.name}, "attention")

    def _is_long(self, op: Operation) -> bool:
        """Whether a matmul takes, or in later calls may take, long enough to be worth a race.

        Sizes that vary may have been small when the graph was captured. `is_large` looks at those that come.
        """
        varies = any(free_symbols(dim) for ref in op.inputs for dim in self.graph.spec(ref).shape)
        return varies or self.graph.operation_flops(op) >= LEAST_FLOPS

    # ---- candidates

    def _attentions(self) -> Iterator[set[str]]:
        for node in self.nodes:
            softmax = next((op for op in node.kernels if op.short_name == "_softmax"), None)
            if softmax is None or softmax.name in self.taken:
                continue
            found = find_attention(self.graph, self.graph.by_name[softmax.name])
            if found == "":
                continue
            if isinstance(found, str):
                self.refusals.append(
                    Refusal("attention", False, node.operation_names, found, source=softmax.source or "")
                )
                continue
            names = {op.name for op in node.kernels} | {op.name for op in found.chain}
            products = [op for op in found.chain if op.short_name in PRODUCTS]
            names |= {name for op in products for name in self._copies_before(op)}
            # A group takes whole nodes: operations in one kernel with a copy come along.
            yield {n for name in names if not self._is_view(name) for n in self.unit.get(name, {name})}

    def _copies_before(self, product: Operation) -> Iterator[str]:
        """Copies that only this matmul reads: of its operands, to make heads contiguous."""
        for producer in self.graph.producers(product):
            readers = {r.name for r in self.graph.readers[producer.name]}
            if producer.short_name == "clone" and readers == {product.name} and not self._leaves(producer):
                yield producer.name

    def _around(self, anchor: Operation) -> set[str]:
        """A matmul or convolution, the only node that reads it, and others that only this node reads."""
        units = {self.unit.get(reader.name, frozenset([reader.name])) for reader in self.graph.readers[anchor.name]}
        if len(units) != 1:
            return set()
        (names,) = units
        if any(info(self.graph.by_name[name].target).kind not in FUSIBLE for name in names):
            return set()
        around = {anchor.name, *names}
        for name in names:
            for producer in self.graph.producers(self.graph.by_name[name]):
                alone = all(r.name in names for r in self.graph.readers[producer.name])
                if producer.short_name in {*PRODUCTS, *CONVOLUTIONS} and alone:
                    around.add(producer.name)
        return around

    def _nets(self) -> list[set[str]]:
        """Chains of convolutions that read each other's results, through operations on NCHW tensors.

        Only where few values escape: each escaping value must have eager's strides, and in training all values escape.
        """
        nets: list[set[str]] = []
        for op in self.graph.operations:
            unit = self.unit.get(op.name, frozenset([op.name]))
            # Look at a node at its last operation: all its inputs exist by then.
            if self._is_view(op.name) or op.name != max(unit, key=self.graph.position.__getitem__):
                continue
            members = [self.graph.by_name[name] for name in unit]
            if not any(map(keeps_images, members)) or not all(
                keeps_images(member) or info(member.target).kind in FUSIBLE for member in members
            ):
                continue
            read = {producer.name for member in members for producer in self.graph.producers(member)}
            before = [net for net in nets if net & read]
            # The last chain alone: skip connections may come from a chain that is full.
            for joining in (before, before[-1:], []):
                joined = unit.union(*joining)
                if not joining or (self._count(joined) <= LARGEST_NET and self._is_convex(joined)):
                    break
            nets = [*(net for net in nets if net not in joining), set(joined)]
        return [
            net
            for net in nets
            if self._count(net) >= LEAST_NET
            and self._leaving(net) < self._count(net)
            and self._depth(net) <= DEEPEST_NET
        ]

    def _count(self, names: Iterable[str]) -> int:
        return sum(self.graph.by_name[name].short_name in CONVOLUTIONS for name in names)

    def _depth(self, names: Collection[str]) -> int:
        """The depth of the longest chain of convolutions."""
        depth: dict[str, int] = {}
        for op in self.graph.operations:
            if op.name in names:
                before = [depth[producer.name] for producer in self.graph.producers(op) if producer.name in depth]
                depth[op.name] = max(before, default=0) + (op.short_name in CONVOLUTIONS)
        return max(depth.values(), default=0)

    def _leaving(self, names: Collection[str]) -> int:
        """The number of escaping values."""
        found = {ref for ref in self.graph.leaving if ref.name in names}
        found |= {ref for ref, by in self.graph.value_readers.items() if ref.name in names and not {*by} <= {*names}}
        return len(found)

    # ---- acceptance

    def _try(self, names: set[str], kind: str) -> None:
        if not names or names & self.taken or any(names & group.operations for group in self.groups):
            return
        operations = sorted((self.graph.by_name[n] for n in names), key=lambda op: self.graph.position[op.name])
        if not self._is_sound(operations) or not self._is_convex(names):
            return
        # Sizes that convolutions derive are written in those of the inputs too.
        node = build_node(self.graph, operations).in_inputs(self.graph.derived)
        names_of_ways = [r.name for r in rewrites(node.form)]
        if kind == "net":
            last = [r.name for r in layouts(node.form)]
            if not last:
                return
            names_of_ways += last
        if operations[0].outputs[0].device == "cpu":
            names_of_ways += generated_names(node.form)
        elif tiles_of(node.form) is not None:
            names_of_ways.append(TILED)
        alone = {*LONE, GENERATED, GENERATED_CONVOLUTION, GENERATED_ROWS}
        if not names_of_ways or (len(node.kernels) > 1 and {*names_of_ways} <= alone):
            return  # the matmul alone has the same strategies, and its readers' node is tuned too
        members = tuple(sorted({self.home[n] for n in names if n in self.home}))
        self.groups.append(Group(node, members, kind))
        self.unit.update(dict.fromkeys(names, frozenset(names)))
        detail = f"{len(node.kernels)} operations with several ways to run them: " + ", ".join(names_of_ways)
        self.refusals.append(Refusal("grouped", True, node.operation_names, detail, source=operations[0].source or ""))

    def _is_sound(self, operations: Sequence[Operation]) -> bool:
        """Whether all values have known dtypes and are on one enabled type of device, and no operation is opaque or one
        of ours that draws random numbers."""
        specs = [spec for op in operations for spec in op.outputs]
        specs += [self.graph.spec(ref) for op in operations for ref in op.inputs]
        return (
            len({spec.device for spec in specs}) == 1
            and all(self.config.device_enabled(spec.device) and spec.dtype in BYTES_PER_ELEMENT for spec in specs)
            and not any(op.target.startswith(_ALONE) for op in operations)
        )

    def _is_convex(self, names: Collection[str]) -> bool:
        """Whether no operation outside must run between two of these."""
        return self.graph.can_fuse(names, lambda name: self.unit.get(name, frozenset([name])))

    def _is_view(self, name: str) -> bool:
        return info(self.graph.by_name[name].target).kind is OpKind.VIEW

    def _leaves(self, op: Operation) -> bool:
        return ValueRef(op.name) in self.graph.leaving


def find_groups(
    graph: FusionGraph,
    nodes: Sequence[FusionNode],
    config: FusionConfig,
    taken: Iterable[Collection[str]] = (),
) -> tuple[list[Group], list[Refusal]]:
    """The groups of a planned graph, in program order, and the reasons for attentions that were not taken.

    ``taken``: operations that have other strategies already.
    """
    finder = _Finder(graph, nodes, config, frozenset().union(*taken))
    if config.enabled:
        finder.run()
    position = graph.position
    groups = sorted(finder.groups, key=lambda g: position[g.node.kernels[0].name])
    return groups, finder.refusals
