"""Plans captured graphs: which nodes, halves of attention and groups, and which kernels may draw random numbers.

In: graphs of a session, its settings and patterns. Out: nodes and groups for `build_program`; refusals, estimates and
metrics for the report. Guarantee: what cannot be lowered is no node; patterns that cannot be read are said once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.passes import backward_of
from autofuse.capture.random_ops import use_generator
from autofuse.codegen.c.bernoulli import make_bernoulli
from autofuse.codegen.in_place import in_place
from autofuse.errors import AutofuseError, LoweringError
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import MATMULS, FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import registered_patterns
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Event, Refusal
from autofuse.pattern_file import read_patterns
from autofuse.runtime.gpu import philox
from autofuse.runtime.graph_log import GraphLog
from autofuse.runtime.halves import Half, find_halves, halves_of
from autofuse.runtime.router import GraphRouter
from autofuse.say import say
from autofuse.ways.groups import Group, find_groups

if TYPE_CHECKING:
    from autofuse.runtime.session import Session


@dataclass(frozen=True)
class Described:
    """What reports say of a planned graph."""

    estimates: dict[str, float]  # fusion_id -> estimated speedup
    sources: dict[str, str]  # fusion_id -> first source line
    metrics: dict[str, Any] | None


class Planner:
    """All planning of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = session.settings
        self.graphs = GraphLog()
        self.estimates: dict[str, float] = {}  # fusion_id -> estimated speedup
        self.sources: dict[str, str] = {}  # fusion_id -> first source line
        self._lowered: dict[str, tuple[str, str] | None] = {}
        self._generator_ready = False
        self._draws: dict[tuple[torch.device, torch.dtype], bool] = {}
        config = FusionConfig.from_mapping(session.settings.as_dict()["fusion"])
        self.engine = FusionEngine(
            config, lowerable=self._lowerable, shared_patterns=registered_patterns(), groups_follow=True
        )
        self.load_patterns()

    def load_patterns(self) -> None:
        """Patterns of the file that is set; `autofuse run` has refused a bad one, other ways in go on without."""
        path = self._settings.fusion.patterns
        if path is None:
            return
        try:
            for pattern in read_patterns(path):
                self.engine.register_pattern(pattern)
        except AutofuseError as error:
            self._session.say_once("patterns_unusable", str(error))

    def plan_nodes(self, graph: FusionGraph, apart: Sequence[Collection[str]] = ()) -> list[FusionNode]:
        """Nodes of a graph; those of ``apart`` hold nothing else."""
        before = len(self.engine.refusals)
        nodes = self.engine.fuse(graph, apart)
        self._refuse(self.engine.refusals[before:])
        return nodes

    def plan_halves(self, imported: ImportedGraph, phase: str) -> list[Half]:
        """Attentions of training in a graph (`find_halves`): found with the forward graph, for its backward graph too.

        None where each call is checked against eager: half of one has no counterpart there.
        """
        if not self.engine.enabled or not self.engine.config.enable_attention or self._settings.run.check:
            return []
        if phase == "backward":
            return halves_of(imported.module)
        counterpart = backward_of(imported.module)
        if phase != "forward" or counterpart is None:
            return []
        found = find_halves(imported, counterpart)
        self._refuse(found.refusals)
        return found.forward

    def plan_groups(
        self,
        graph: FusionGraph,
        nodes: Sequence[FusionNode],
        halves: Sequence[Half] = (),
    ) -> list[Group]:
        """Groups of a graph: products and convolutions with the nodes around them (`find_groups`)."""
        if not self.engine.enabled:
            return []
        taken = [half.names for half in halves]
        config = self.engine.config
        refusals: list[Refusal] = []
        precision = torch.get_float32_matmul_precision()
        products = [op for op in graph.operations if op.short_name in MATMULS]
        if config.enable_matmul and products and precision != "highest":
            # Races compare with aten's products in full precision: they would not know what is given up.
            config = replace(config, enable_matmul=False)
            detail = f"torch.set_float32_matmul_precision({precision!r}): products are left to torch"
            refusals = [Refusal("matmul_precision", False, op.short_name, detail) for op in products[:1]]
        groups, found = find_groups(graph, nodes, config, taken)
        self._refuse([*refusals, *found])
        self._refuse(self.engine.cover([*(group.operations for group in groups), *taken]))
        return groups

    def add_router(
        self, router: GraphRouter, graph: FusionGraph, nodes: Sequence[FusionNode], halves: Sequence[Half] = ()
    ) -> Described:
        """A graph is planned and routed from now on."""
        found = [*nodes, *(half.pair.node for half in halves)]
        for node in found:
            if node.fusion_id not in self.estimates:
                self.estimates[node.fusion_id] = self.engine.benefit(node, graph).estimated_speedup
                self.sources[node.fusion_id] = next((op.source for op in node.kernels if op.source), "")
        self._session.add_router(router)
        metrics = self.graphs.add(router, graph, nodes, [half.names for half in halves])
        if self._settings.run.debug >= 3:
            for node in nodes:
                say(f"{router.phase}: {node.label}: {node.operation_names}")
        ids = [node.fusion_id for node in found]
        return Described({i: self.estimates[i] for i in ids}, {i: self.sources[i] for i in ids}, metrics)

    def adopt(self, router: GraphRouter, described: Described) -> None:
        """A graph that an earlier run has planned is routed from now on."""
        self.estimates = described.estimates | self.estimates
        self.sources = described.sources | self.sources
        self._session.add_router(router)
        self.graphs.adopt(router, described.metrics)

    def _refuse(self, refusals: Sequence[Refusal]) -> None:
        self._session.refusals.extend(refusals)

    def _lowerable(self, form: NodeForm) -> tuple[str, str] | None:
        text = form.text()
        if text not in self._lowered:
            try:
                in_place(form)  # lowers it
                self._lowered[text] = None
            except LoweringError as error:
                self._lowered[text] = (error.code, str(error))
        return self._lowered[text]

    # ---- random numbers ------------------------------------------------------------------------------

    def prepare_generator(self) -> None:
        """Dropout's masks from our generator, once it has proved itself bit-equal to aten's."""
        toolchain = self._session.catalogue.toolchain
        if self._generator_ready or toolchain is None:
            return
        self._generator_ready = True
        try:
            with _disable_current_modes():  # capture runs under a fake-tensor mode; the proof needs real tensors
                use_generator(make_bernoulli(toolchain))
        except Exception as error:
            self._session.report_fallback("generator_unusable", "dropout masks come from aten", error)

    def draws_as_eager(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels may draw a dropout's mask on a device: only where eager's numbers are known bit by bit."""
        key = (device, dtype)
        if key not in self._draws:
            self._draws[key] = False
            try:
                with _disable_current_modes():  # the proof needs real tensors
                    self._draws[key] = philox.draws_as_expected(device, dtype)
            except Exception as error:
                self._session.report_fallback("random_unknown", f"dropout on {device} stays eager's own kernel", error)
            if not self._draws[key]:
                message = f"eager draws other numbers than expected on {device} in {dtype}"
                self._session.backstage.post_event(Event("random_differs", message))
        return self._draws[key]
