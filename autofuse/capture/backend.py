"""Compiles graphs of Dynamo with AOTAutograd.

In: a graph from Dynamo, and a function that makes a callable of an aten graph. Out: the compiled callable, which runs
forward, backward and inference graphs in aten operators. Importing this module imports what only a trace needs: 0.2 s
more than `dynamo` (torch 2.13). Guarantee: no decomposition is applied, so the unfused graph runs exactly the kernels
that eager runs (some element-wise ones twice, see ``recompute``), dropout included, and gradients are right by
construction.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._functorch.aot_autograd import make_boxed_func

from autofuse.capture.corrections.aliased_inputs import Writes, refuse_checkpointed_writes, unseen, written_statistics
from autofuse.capture.corrections.double_backward import Alone, replayed
from autofuse.capture.corrections.dynamo_patches import not_of_our_traces
from autofuse.capture.corrections.eagers_kernels import eagers_kernels
from autofuse.capture.corrections.shared_elements import writes_shared_elements
from autofuse.capture.corrections.sparse_gradients import has_sparse_gradients
from autofuse.capture.dynamo import note_read
from autofuse.capture.guarded_call import (
    has_subclasses,
    is_plain_graph,
    note_plain_graph,
    note_plain_training,
    plain_call,
)
from autofuse.capture.passes.joint_graph import refuse_views_given_out
from autofuse.capture.passes.loss_alone import loss_alone
from autofuse.capture.passes.random_ops import pass_idle_dropout
from autofuse.capture.passes.recompute import partition
from autofuse.capture.passes.repeated_blocks import take_apart
from autofuse.capture.passes.simplify import simplify
from autofuse.capture.passes.statistics_dtypes import correct_statistics
from autofuse.capture.traced import OF_THE_LOSS, Keeper, being_traced
from autofuse.debug import Level, tell
from autofuse.preserve_rng import untouched

if TYPE_CHECKING:
    from autofuse.capture.corrections.double_backward import Replay
    from autofuse.capture.kept.graph_cache import GraphCache

log = logging.getLogger(__name__)

Call = Callable[[list[Any]], Any]
CompileGraph = Callable[[fx.GraphModule, str, int], Call]
CompilePhase = Callable[[fx.GraphModule, str, bool | None], tuple[Call, bool]]  # see `graph_cache.GraphCache`


def compile_with(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    min_blocks: int = 0,
    keeper: Keeper | None = None,
    is_strict: bool = False,
) -> Callable[..., Any]:
    """``compile_graph(aten graph, phase, times)`` gets "forward", "backward", `OF_THE_LOSS` or "inference".

    ``times``: calls of the graph in one call of the whole. With at least ``min_blocks`` equal blocks in a row (0:
    never), one block is compiled for all of them. ``keeper``: the cache of graphs of earlier runs; None for no cache.
    ``is_strict``: nothing is simplified that changes the sign of a zero.
    """
    tell(Level.GRAPHS, lambda: f"Dynamo's graph:\n{readable(module)}")
    problem = _why_eager(module)
    if problem:
        if (traced := being_traced()) is not None:
            traced.spoil(problem)
        log.info("a graph stays in eager: %s", problem)
        return as_it_is(module)
    pass_idle_dropout(module)
    if min_blocks and not has_subclasses(module, example_inputs):
        try:
            pieces = take_apart(module, example_inputs, min_blocks)
            if pieces is not None:
                if (traced := being_traced()) is not None:
                    traced.spoil("equal blocks")
                return pieces.compile(
                    lambda piece, inputs, times: plain_call(
                        _compile_whole(piece, inputs, _Phases(piece, inputs, compile_graph, times, is_strict), keeper)
                    )
                )
        except RestartAnalysis:  # Dynamo traces once more
            raise
        except Exception as error:
            log.debug("equal blocks are captured one by one: %s", error)
    phases = _Phases(module, example_inputs, compile_graph, 1, is_strict)
    return _compile_whole(module, example_inputs, phases, keeper)


def _why_eager(module: fx.GraphModule) -> str:
    """What AOTAutograd would get wrong in a graph of Dynamo's, in words; "" for nothing."""
    if writes_shared_elements(module):
        return "a write to elements that share memory"
    return "a sparse gradient" if torch.is_grad_enabled() and has_sparse_gradients(module) else ""


class _Phases:
    """Compiles the graphs that AOTAutograd makes of one of Dynamo's.

    AOTAutograd holds this object until the backward graph is compiled, so it must not hold the inputs: a whole batch.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[torch.Tensor],
        compile_graph: CompileGraph,
        times: int,
        is_strict: bool,
    ) -> None:
        has_gradients = any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
        switches = (torch.is_grad_enabled() and has_gradients) or torch._C._is_any_autocast_enabled()
        self.of_subclasses = has_subclasses(module, example_inputs)
        self.is_strict = is_strict
        self.replay: Replay | None = None
        self._module = module
        self._compile_graph = compile_graph
        self._times = times
        self._inputs = len(example_inputs)
        self._needs_wrapper = switches or self.of_subclasses
        self._writes = Writes(example_inputs)
        self._statistics: list[int] = []
        self._plain: list[Call] = []

    def compile(self, graph: fx.GraphModule, phase: str, is_plain: bool | None) -> tuple[Call, bool]:
        """As `GraphCache.compile_graph`."""
        tell(Level.GRAPHS, lambda: f"{phase} graph of AOTAutograd:\n{readable(graph)}")
        if phase == "forward" and self.replay is not None:
            self.replay.note_graph(graph)
        alone = None
        if phase == "backward" and self.replay is not None:
            self.replay.note_backward(graph)
            alone = loss_alone(graph) if self._times == 1 else None
        if phase != "backward":
            refuse_checkpointed_writes(self._module)
            self._writes.note(graph)
            self._statistics.extend(written_statistics(graph))
        if phase == "forward":
            refuse_views_given_out(graph)
        if phase == "inference":  # the other two were simplified as one
            correct_statistics(graph.graph)
            simplify(graph.graph, self.is_strict)
            graph.recompile()
        if is_plain is not None:
            note_read(phase)
        else:
            is_plain = phase == "inference" and not self._needs_wrapper and is_plain_graph(graph, self._inputs)
        call = self._compile_graph(graph, phase, self._times)
        if self.replay is not None and alone is not None:
            self.replay.alone = Alone(alone.tangent, self._compile_graph(alone.graph, OF_THE_LOSS, self._times))
        if is_plain and not self._needs_wrapper:
            self._plain.append(call)
        return call, is_plain

    def finish(self, compiled: Callable[..., Any], example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Wrap AOTAutograd's callable with what AOTAutograd does not handle."""
        replay, traced = self.replay, being_traced()
        if replay is not None:
            replay.refuse_lost_outputs(example_inputs)
        if len(self._plain) == 1:
            note_plain_graph(compiled, self._plain[0])
        if replay is not None and replay.apply is not None:
            note_plain_training(compiled, replay.apply, replay.inputs)
        if self._writes.are_watched and traced is not None:
            traced.spoil("inputs that are written to")
        if traced is not None:
            traced.statistics = tuple(self._statistics)
        whole = replay.around(plain_call(compiled)) if replay is not None and replay.reach.parted else compiled
        module = self._module
        return self._writes.around(unseen(whole, self._statistics), lambda: as_it_is(module))


def _compile_whole(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    phases: _Phases,
    keeper: Keeper | None,
) -> Callable[..., Any]:
    keeping = _keeping(phases.compile, None if phases.of_subclasses else keeper)

    def compiler(phase: str) -> Any:
        if keeping is not None:
            return keeping.compiler(phase)
        return lambda graph, examples: phases.compile(graph, phase, None)[0]

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=functools.partial(partition, is_strict=phases.is_strict),
    )
    # A donated buffer would be lost for a second backward pass (retain_graph=True), and none of our kernels takes one.
    with (
        torch._functorch.config.patch(donated_buffer=False),
        eagers_kernels(),
        replayed(module) as replay,
        contextlib.ExitStack() as stack,
    ):
        phases.replay = replay
        if (traced := being_traced()) is not None:
            if traced.replay is not None:
                traced.spoil("more than one graph")
            traced.replay = replay
        if keeping is not None:  # torch's cache warns of each file that it cannot read or write
            stack.enter_context(not_of_our_traces.active())
            stack.enter_context(keeping.active())
        compiled: Callable[..., Any] = backend(module, example_inputs)
    return phases.finish(compiled, example_inputs)


def _keeping(compile_phase: CompilePhase, keeper: Keeper | None) -> GraphCache | None:
    """The cache for graphs of this compilation; it needs parts of torch that other versions may lack."""
    if keeper is None:
        return None
    try:
        with untouched():
            from autofuse.capture.kept.graph_cache import IS_SUPPORTED, GraphCache
    except ImportError as error:
        log.debug("graphs are not kept with this torch: %s", error)
        return None
    return GraphCache(compile_phase, keeper.folder, keeper.report) if IS_SUPPORTED else None


def as_it_is(module: fx.GraphModule) -> Callable[..., Any]:
    """Dynamo's graph, operator by operator in eager."""
    if hasattr(module, "real_recompile"):  # else each call of a lazy one asks whether it is compiled
        module.real_recompile()
    forward: Callable[..., Any] = module.forward
    return forward


def has_no_work(module: fx.GraphModule) -> bool:
    """Whether Dynamo's graph only detaches; the code after a call of ``backward()`` often does no more."""
    return all(
        node.op in ("placeholder", "output") or (node.op == "call_method" and node.target == "detach")
        for node in module.graph.nodes
    )


def readable(module: fx.GraphModule) -> str:
    """Its graph as code, with dtypes and shapes."""
    return str(module.print_readable(print_output=False)).strip()


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of positional arguments as one of a list, which AOTAutograd calls."""
    result: Callable[[list[Any]], Any] = make_boxed_func(function)
    return result
