"""The stages in order, each a named call.

A captured graph goes in, a routed graph comes out. What happens later (tuning in the daemon, decisions
through the store, a new plan between two calls) reaches the same routed graph through the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import fx

from autofuse.capture.backend import as_it_is, boxed, compile_with, has_no_work, readable
from autofuse.capture.dynamo import CAPTURE_ERRORS, note_trace
from autofuse.capture.graph_import import ImportedGraph, import_graph
from autofuse.capture.guarded_call import plain_call
from autofuse.capture.passes.random_ops import regenerate_dropout, restore_dropout, split_dropout
from autofuse.capture.traced import OF_THE_LOSS, being_traced
from autofuse.debug import Level, tell
from autofuse.errors import ShapeError
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.gpu.devices import CPU
from autofuse.ir.optable import is_librarys
from autofuse.ir.records import Refusal
from autofuse.preserve_rng import untouched
from autofuse.runtime.graphs.debug_texts import plan_text
from autofuse.runtime.graphs.plan_cache import Planned
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.roots.repeated_values import graph_shares_values, graph_updates_state, has_other_ranks
from autofuse.runtime.roots.user_graphs import Sizes
from autofuse.runtime.session import Session, current_session
from autofuse.strategies.joint_attention import AttentionPass
from autofuse.wrapper.graph_call import Program
from autofuse.wrapper.graph_call_builder import build_program


def route_graph(module: fx.GraphModule, phase: str, session: Session, times: int = 1) -> Callable[[list[Any]], Any]:
    """One aten graph of AOTAutograd as a routed call; ``times`` it is called in a step.

    Any failure of ours leaves the graph as it is.
    """
    began, name = perf_counter(), phase
    phase = "backward" if name == OF_THE_LOSS else name
    traced = being_traced()
    try:
        with untouched():  # a backward graph is compiled in a backward pass of the script's
            draws, refusals = bool(split_dropout(module)), len(session.context.refusals)
            if draws:
                session.draws.prepare_generator()
            planned = _plan(module, session, phase)
            router = GraphRouter(
                planned.program, session, phase, perf_counter, session.make_timer, times, session.replay
            )
            described = session.planner.add_router(router, planned.graph, planned.nodes, planned.halves)
            found, sums = tuple(session.context.refusals[refusals:]), session.planner.engine.get_fusion_stats
            tell(Level.PLAN, lambda: plan_text(name, planned.nodes, found, sums()))
            tell(Level.GRAPHS, lambda: f"{name} graph, as planned:\n{readable(module)}")
        if traced is not None:
            traced.plans[name] = Planned(router, described, found, draws)
        if phase == "backward":
            for half in planned.halves:
                half.pair.is_ready = True
        return router
    except Exception as error:
        if traced is not None:
            traced.spoil(f"a {phase} graph that was not planned")
        session.context.report_fallback("graph_not_planned", f"a {phase} graph runs on eager's kernels", error)
        module.recompile()
        return boxed(module.forward)
    finally:
        session.context.planning_seconds += perf_counter() - began


@dataclass(frozen=True)
class _Planned:
    graph: FusionGraph
    nodes: list[FusionNode]  # those of groups too
    halves: list[AttentionPass]
    program: Program


def _plan(module: fx.GraphModule, session: Session, phase: str) -> _Planned:
    drawn = regenerate_dropout(module, session.draws.draws_as_eager)
    try:
        return _plan_as_it_is(module, session, phase)
    except ShapeError:
        if not drawn:
            raise
    # Draws that would not keep their order inside of nodes: eager's own dropout then.
    restore_dropout(module)
    return _plan_as_it_is(module, session, phase)


def _plan_as_it_is(module: fx.GraphModule, session: Session, phase: str) -> _Planned:
    # Races are against what a library says that its operator computes, which need not be the operator to the bit.
    imported = import_graph(module, with_libraries=not session.context.settings.run.strict)
    session.context.refusals.extend(imported.refusals)
    if any(is_librarys(op.target) for op in imported.operations):
        session.prepare_own_kernels()
    for refused in imported.refusals:
        if refused.code == "unfused_form":
            what = f"{refused.operations} runs as the library has it, unfused: {refused.detail}"
            session.context.say_once("unfused_refused", what)
    for device in dict.fromkeys(imported.devices.values()):
        session.kernels.use_device(device)
    graph = imported.for_fusion()
    halves = session.planner.plan_joint_attention(imported, phase)
    if halves:
        try:
            return _plan_nodes(imported, graph, halves, session, phase)
        except ShapeError as error:
            session.context.refusals.append(Refusal("attention", False, f"{len(halves)} attentions", str(error)))
    return _plan_nodes(imported, graph, [], session, phase)


def _plan_nodes(
    imported: ImportedGraph, graph: FusionGraph, halves: list[AttentionPass], session: Session, phase: str
) -> _Planned:
    """Raises ShapeError where no program can be made."""
    nodes = session.planner.plan_nodes(graph, [half.names for half in halves])
    groups = session.planner.plan_groups(graph, nodes, halves)
    is_backward, reuses = (
        phase == "backward",
        not session.context.settings.run.check,
    )  # a check runs both on the same inputs
    try:
        program = build_program(imported, nodes, groups, halves, is_backward, reuses)
    except ShapeError as error:  # draws or writes whose order no group may disturb
        if not groups:
            raise
        session.context.refusals.append(Refusal("groups_in_a_circle", False, f"{len(groups)} groups", str(error)))
        groups = []
        program = build_program(imported, nodes, groups, halves, is_backward, reuses)
    return _Planned(graph, [*nodes, *(group.node for group in groups)], halves, program)


def traced_root_backend(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The same as `root_backend`, of a graph that Dynamo has traced for a root."""
    note_trace(module)
    return root_backend(module, example_inputs)


def root_backend(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The Dynamo backend of roots, which decide for themselves what a call runs."""
    session = current_session(traced_root_backend)
    if session is None or has_no_work(module):  # no session: switched off
        return as_it_is(module)
    if _must_stay_equal(session) and graph_updates_state(module.graph, example_inputs):
        return as_it_is(module)
    with untouched():
        return compile_with(
            module,
            example_inputs,
            lambda graph, phase, times: route_graph(graph, phase, session, times),
            session.context.settings.capture.min_blocks,
            session.context.keeper,
            session.context.settings.run.strict,
        )


def backend(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The Dynamo backend of users: ``torch.compile(model, backend="autofuse")``."""
    session = current_session(traced_root_backend)
    if session is None or has_no_work(module):
        return as_it_is(module)
    try:
        return _watched(module, example_inputs, session)
    except CAPTURE_ERRORS:  # Dynamo's own affair: it may trace once more
        raise
    except Exception as error:
        session.context.report_fallback(
            "capture_failed", "a graph of torch.compile stays eager: it could not be captured", error
        )
        return as_it_is(module)


def _must_stay_equal(session: Session) -> bool:
    """Whether what this rank repeats of other ranks' work must stay in eager."""
    return not session.context.settings.run.strict and has_other_ranks()


def _watched(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor], session: Session) -> Callable[..., Any]:
    session.context.store_thread.wait_ready(2.0)  # what earlier runs found out is known by then
    sizes = Sizes(example_inputs)
    watched = session.roots.user_graph(module, example_inputs, sizes)
    original = as_it_is(module)
    if _must_stay_equal(session) and (
        graph_shares_values(module.graph, example_inputs) or graph_updates_state(module.graph, example_inputs)
    ):
        watched.keep_equal()
        return original
    if watched.is_lost:
        return original
    began, paused = perf_counter(), session.context.paused_seconds
    captured = plain_call(root_backend(module, example_inputs))
    seconds = perf_counter() - began - (session.context.paused_seconds - paused)
    watched.capture_seconds += seconds
    session.context.capture_seconds += seconds
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    has_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    device = next((t.device for t in tensors if t.device.type == "cuda"), CPU)
    return watched.around(captured, original, sizes, has_gradients, device)
