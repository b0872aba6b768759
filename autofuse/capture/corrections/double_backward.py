"""Gradients of gradients through captured graphs, which AOTAutograd does not have.

In: Dynamo's graph and AOTAutograd's compilation of it. Out: the same compiled graph; where its backward pass is to be
differentiated itself (``create_graph=True``) or vectorised (``is_grads_batched``), Dynamo's graph is run again in eager
and eager's gradients are returned. Guarantee: these gradients are eager's; torch's own would raise, or give zeros where
the graph's saved tensors need no gradient. Of inputs that the graph writes to and reads (the vectors of a spectral
norm) a copy is kept from before. What cannot be run twice are graphs that write to inputs that need a gradient, and
autograd functions of the user's own that `user_functions` cannot run again: their gradients are those of the compiled
backward pass, and raise where they are differentiated. Nothing changes for compilations of the user's own, nor for any
other backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.capture.corrections import anomaly, user_functions
from autofuse.capture.corrections.autograd_function import passes_of, watch
from autofuse.capture.corrections.tied_outputs import Cut, Tied, Ties, cut, cut_for, ties_of
from autofuse.capture.corrections.undefined_gradients import (
    UndefinedGradients,
    filled,
    infinite_values,
    is_watched,
    reach_of,
    tangent_places,
)
from autofuse.capture.training_call import lean_passes, plain_apply
from autofuse.dynamo_skip import mark_all_below
from autofuse.preserve_rng import torchs_states

log = logging.getLogger(__name__)

_DEVICES = ("cpu", "cuda")
_aten = torch.ops.aten
# Operators that, in training, read a running statistic only to update it.
STATISTICS = {_aten._native_batch_norm_legit_functional.default, _aten.copy_.default}
if hasattr(_aten, "_batch_norm_with_update_functional"):
    STATISTICS.add(_aten._batch_norm_with_update_functional.default)
COUNTERS = {_aten.add.Tensor, _aten.copy_.default}  # of batches
_NOT_TWICE = (
    "autofuse: expected a model that can be run again for the gradients of its gradients, found one that writes "
    "to inputs that need a gradient or has an autograd.Function that turns gradients on or off, such as one marked "
    "with @once_differentiable. If it has second gradients in eager, set AUTOFUSE_DISABLE=1 for this script."
)
_OF_BASES = ("alias_of_intermediate", "alias_of_intermediate_save_as_output")


class LostOutputs(RuntimeError):
    """Zeros for outputs that the loss does not use would change gradients, and the graph cannot run twice."""


class CachedReplay(NamedTuple):
    """A `Replay` in its stored form; Dynamo's graph is unpickled only when it must run."""

    graph: bytes
    is_random: bool
    can_run_again: bool
    has_functions: bool
    reads: list[tuple[bool, bool]]
    reach: UndefinedGradients
    alone: int | None  # the tangent of a loss that has a backward graph of its own
    ties: Ties


class Alone(NamedTuple):
    """The backward graph of a loss alone, and which of the whole graph's tangents it reads."""

    tangent: int
    compiled: Callable[[list[Any]], Any]


class Replay:
    """How to run the graph of one compilation a second time."""

    def __init__(self, module: fx.GraphModule | CachedReplay) -> None:
        self._module = module
        self.autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
        self.is_random = False
        self._reads: list[tuple[bool, bool]] = []  # of each input: for more than statistics, than counters
        self._infinite: frozenset[str] = frozenset()  # values of the forward graph that may be
        self.reach = UndefinedGradients()  # once the backward graph is known
        self.alone: Alone | None = None  # likewise
        self.apply: Callable[..., Any] | None = None  # the graph past AOTAutograd's wrapper, see `plain_apply`
        self.inputs = 0  # of the graph, as AOTAutograd has them
        self.metadata: Any = None  # AOTAutograd's, once the graph is compiled for training
        self.has_subclasses = False  # which AOTAutograd takes apart
        self.is_cached = isinstance(module, CachedReplay)  # of a trace of an earlier run, and complete
        if isinstance(module, CachedReplay):
            _, self.is_random, self._can_run_again, self._has_functions, self._reads, self.reach, _, self.ties = module
            return
        self.ties = ties_of(module)
        self._can_run_again = user_functions.can_run_again(module)
        self._has_functions = user_functions.has_functions(module)

    @property
    def module(self) -> fx.GraphModule:
        """Dynamo's graph."""
        if isinstance(self._module, CachedReplay):
            module = GraphPickler.loads(self._module.graph, FakeTensorMode(shape_env=ShapeEnv()))
            assert isinstance(module, fx.GraphModule)
            module.recompile()
            self._module = module
        return self._module

    def kept(self) -> CachedReplay:
        """The stored form. Raises the pickler's error where there is none."""
        graph = self.module
        meta, graph.meta = graph.meta, {}
        try:
            data = GraphPickler.dumps(graph, Options(ops_filter=None, node_metadata_key_filter=lambda key: False))
        finally:
            graph.meta = meta
        alone = None if self.alone is None else self.alone.tangent
        return CachedReplay(
            data, self.is_random, self._can_run_again, self._has_functions, self._reads, self.reach, alone, self.ties
        )

    def note_graph(self, graph: fx.GraphModule) -> None:
        """AOTAutograd's forward graph."""
        nodes = [n for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        self._infinite = infinite_values(graph)
        self.is_random = any(torch.Tag.nondeterministic_seeded in n.target.tags for n in nodes)
        readers = [{user.target for user in n.users} for n in graph.graph.nodes if n.op == "placeholder"]
        self._reads = [(bool(found - STATISTICS), bool(found - COUNTERS)) for found in readers]

    def note_backward(self, graph: fx.GraphModule) -> None:
        """AOTAutograd's backward graph; its forward graph comes first."""
        self.reach = reach_of(graph, self._infinite)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph; Dynamo's in eager where hooks watch inputs that not every loss gives a gradient."""

        def call(*args: Any) -> Any:
            if is_watched([args[i] for i in parted]):
                return self._run(args)
            return compiled(*args)

        parted = self.reach.parted
        return call if parted else compiled

    def refuse_lost_outputs(self, inputs: Sequence[Any]) -> None:
        """Raises LostOutputs; to be called once the graph is compiled. ``inputs``: those of the trace."""
        if self.metadata is None:
            return
        if self.has_subclasses:  # the reach is that of what is inside of them
            is_lost, found = self.reach.has_risks or bool(self.reach.parted), "tensors of a subclass"
        else:
            is_lost = self.reach.has_risks and self.runs_once(inputs, self.metadata)
            found = "one that writes to what needs a gradient, or has an autograd.Function"
        if is_lost:
            raise LostOutputs(
                f"expected a graph that can be run again where a loss uses one of its outputs only, found {found}"
            )

    def runs_once(self, inputs: Sequence[Any], metadata: Any) -> bool:
        """Whether a second run may differ from the first; not for what is written to, of which `as_before` has kept
        a copy."""
        if not self._can_run_again or len(inputs) != len(self._reads):
            return True
        return any(inputs[i].requires_grad for i in written_by(metadata))

    def as_before(self, inputs: tuple[Any, ...], written: Sequence[int]) -> tuple[Any, ...]:
        """Inputs for a second run: copies of those that the graph is about to write to, but for statistics."""
        if not written or len(inputs) != len(self._reads):
            return inputs
        copied = [i for i in written if self._reads[i][0 if inputs[i].is_floating_point() else 1]]
        kept = list(inputs)
        for i in copied:
            if not inputs[i].requires_grad:
                kept[i] = inputs[i].clone()
        return tuple(kept)

    def gradients(self, ctx: Any, grads: Sequence[torch.Tensor | None], metadata: Any) -> tuple[Any, ...]:
        """Eager's gradients of the graph's inputs; ``grads``: of its outputs."""
        _ = ctx.saved_tensors  # raises as eager does where one has been written to or freed
        inputs: tuple[Any, ...] = ctx.autofuse_inputs
        mutated = len(metadata.mutated_inp_runtime_indices)
        if self.runs_once(inputs, metadata) or any(g is not None for g in grads[:mutated]):
            raise RuntimeError(_NOT_TWICE)
        written = set(written_by(metadata))
        fresh = [value.clone() if i in written else value for i, value in enumerate(inputs)]
        # Where the script had anomaly mode on in its forward pass no graph has run: nothing is known of this one.
        with torch.enable_grad(), self._state_of_forward(ctx), anomaly.is_off():
            outputs = self._run(fresh)
        sources, given = [], []
        for output, grad in _pairs(outputs, grads[mutated:], metadata):
            if grad is not None and output.requires_grad:
                sources.append(output)
                given.append(grad)
        wanted = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]
        result: list[Any] = [None] * len(inputs)
        if sources and wanted:
            targets = [inputs[i] for i in wanted]
            found = torch.autograd.grad(
                sources, targets, given, create_graph=torch.is_grad_enabled(), allow_unused=True
            )
            for i, grad in zip(wanted, found, strict=True):
                result[i] = grad
        return tuple(result)

    def cut(self, ctx: Any, ties: Ties) -> Cut | None:
        """The graph of one call run again, its outputs cut off from each other; None where it cannot be."""
        inputs: tuple[Any, ...] | None = ctx.autofuse_inputs
        if inputs is None or self._has_functions or self.runs_once(inputs, self.metadata):
            return None
        _ = ctx.saved_tensors  # raises as eager does where one has been written to or freed
        written = set(written_by(self.metadata))
        fresh = [value.clone() if i in written else value for i, value in enumerate(inputs)]
        with torch.enable_grad(), self._state_of_forward(ctx), anomaly.is_off():
            try:
                return cut(self.module, fresh, ties)
            except RuntimeError as error:  # an output is written to behind the place where it would be cut off
                log.info("gradients of outputs are not told apart: %s", error)
                return None

    def _run(self, inputs: Sequence[Any]) -> Any:
        """The results of Dynamo's graph in eager."""
        return user_functions.run(self.module, *inputs) if self._has_functions else self.module.forward(*inputs)

    @contextlib.contextmanager
    def _state_of_forward(self, ctx: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            if ctx.autofuse_random is not None:
                cpu, gpus = ctx.autofuse_random
                stack.enter_context(torch.random.fork_rng(devices=list(gpus)))
                torch.set_rng_state(cpu)
                for device, state in gpus.items():
                    torch.cuda.set_rng_state(state, device)
            yield

    def random_state(self, inputs: Sequence[Any]) -> Any:
        """State of the generators before the forward pass; None for a graph without random numbers."""
        if not self.is_random:
            return None
        found = {t.device.index for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
        if found and torch.cuda.is_current_stream_capturing():
            return None
        with torchs_states:
            return torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in found}


def written_by(metadata: Any) -> list[int]:
    """Inputs of a graph that it writes to."""
    return [i for i, info in enumerate(metadata.input_info) if info.mutates_data]


def _not_twice(found: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients that raise where they are differentiated, as those of a ``once_differentiable`` function do."""
    leaves = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in found]
    raising: tuple[Any, ...] = torch._C._functions.DelayedError(_NOT_TWICE.encode(), len(leaves))(*leaves)
    return raising


def _pairs(outputs: Any, grads: Sequence[Any], metadata: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Outputs of Dynamo's graph, and the tensors that several of them are views of, each with its gradient."""
    flat = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    for output, grad in zip(flat, grads, strict=False):
        if isinstance(output, torch.Tensor):
            yield output, grad
    bases: dict[int, torch.Tensor] = {}
    for output, info in zip(flat, metadata.output_info, strict=True):
        if info.output_type.name in _OF_BASES and isinstance(output, torch.Tensor):
            bases.setdefault(info.base_idx, output._base if output._base is not None else output)
    for index, grad in enumerate(grads[len(flat) :]):
        if index in bases:
            yield bases[index], grad
        elif grad is not None:
            raise RuntimeError(_NOT_TWICE)


# ---- the hook into AOTAutograd's function ---------------------------------------------------------------------------

_compiling = threading.local()


@contextlib.contextmanager
def replayed(module: fx.GraphModule | CachedReplay) -> Iterator[Replay | None]:
    """While AOTAutograd compiles ``module``, teach its autograd function to run the module again."""
    if not watch(_note_function):
        yield None
        return
    before = getattr(_compiling, "replay", None)
    _compiling.replay = Replay(module)
    try:
        yield _compiling.replay
    finally:
        _compiling.replay = before


def _note_function(function: Any, spec: Any) -> Callable[..., Any] | None:
    """AOTAutograd has built an autograd function, for a capture or for a compilation of the user's own.

    Returns what is to be called in its place, None for no change.
    """
    replay = getattr(_compiling, "replay", None)
    if replay is None:
        return None
    later = getattr(spec.lazy_backward_info, "bw_module", None)  # compiled for the first backward pass
    if later is not None and not replay.is_cached:
        replay.note_backward(later)
    replay.apply = plain_apply(function, spec)
    replay.inputs = len(spec.fw_metadata.input_info)
    replay.metadata = spec.fw_metadata
    replay.has_subclasses = spec.maybe_subclass_meta is not None
    _teach(function, replay, spec)
    if not replay.ties or replay.has_subclasses:
        return None
    tied = Tied(replay.ties, replay.cut, spec.fw_metadata)
    if replay.apply is not None:
        replay.apply = tied.around(replay.apply)
    return tied.around(function.apply)


def _are_batched(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether gradients are batched: by a transform, or by ``is_grads_batched``, which has its own mode."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if any(grad is not None and not grad.is_cpu for grad in grads):  # on a thread of autograd's own
        return bool(torch._C._dispatch_tls_is_dispatch_key_included("VmapMode"))
    try:  # 0.1 us, by name 1.9
        return bool(torch._C._vmapmode_increment_nesting() > 1)
    finally:
        torch._C._vmapmode_decrement_nesting()


def _is_due(replay: Replay, spec: Any, ctx: Any) -> bool:
    """Whether eager's backward pass would be another one than the compiled pass, for what has changed since."""
    metadata = spec.fw_metadata
    if anomaly.is_on() and not replay.runs_once(ctx.autofuse_inputs, metadata):  # who made the NaN?
        return True
    if metadata.deterministic is False and torch.are_deterministic_algorithms_enabled():
        return True
    return not spec.disable_amp and torch._C._is_any_autocast_enabled()  # eager's matmuls are cast


def _teach(function: Any, replay: Replay, spec: Any) -> None:
    metadata = spec.fw_metadata
    # No buffer is donated. AOTAutograd leaves None, which its check of retain_graph=True takes for some (torch 2.13).
    metadata.bw_donated_idxs = []
    lean = lean_passes(function, spec)
    forward, backward = (lean.forward, lean.backward) if lean is not None else passes_of(function)
    # Where AOTAutograd takes no subclasses apart its graph's results are the inputs' gradients.
    tangents = tangent_places(metadata) if spec.maybe_subclass_meta is None else []

    written = written_by(metadata)

    def forward_and_keep(ctx: Any, inputs: tuple[Any, ...], *rest: Any) -> Any:
        if tangents:
            ctx.set_materialize_grads(False)  # to tell zeros from what the loss does not use
        ctx.autofuse_inputs = replay.as_before(inputs, written)
        ctx.autofuse_random = replay.random_state(inputs)
        return forward(ctx, inputs, *rest)

    def backward_or_replay(grads: Any, ctx: Any, *rest: Any) -> Any:
        if ctx.autofuse_inputs is None:  # an earlier pass has freed all
            _ = ctx.saved_tensors  # raises as eager does
        if torch.is_grad_enabled() and replay.runs_once(ctx.autofuse_inputs, metadata) and not _are_batched(grads[0]):
            with torch.no_grad():
                found = backward_or_replay(grads, ctx, *rest)
            return _not_twice(found)
        if torch.is_grad_enabled() or _are_batched(grads[0]) or is_due(ctx):
            return replay.gradients(ctx, grads[0], metadata)
        found = cut_for(ctx)
        if found is not None:
            forgotten = ctx.autofuse_inputs
            forget_inputs(ctx)
            return found.behind(forgotten, grads[0][len(metadata.mutated_inp_runtime_indices) :])
        present = {i for i, place in enumerate(tangents) if grads[0][place] is not None}
        if len(present) == len(tangents):
            forget_inputs(ctx)
            return backward(grads, ctx, *rest)
        if not present:
            return (None,) * len(ctx.autofuse_inputs)
        if not replay.reach.may_be_zero(present) and not replay.runs_once(ctx.autofuse_inputs, metadata):
            return replay.gradients(ctx, grads[0], metadata)
        forget_inputs(ctx)
        alone = replay.alone
        if lean is not None and alone is not None and present == {alone.tangent}:
            results = lean.of_one(grads, ctx, alone.tangent, alone.compiled)
            if results is not None:
                return results
        grads[0][:] = filled(grads[0], tangents, ctx)
        return replay.reach.only_reached(backward(grads, ctx, *rest), present)

    is_due = functools.partial(_is_due, replay, spec)

    def forget_inputs(ctx: Any) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.autofuse_inputs = None  # as eager frees what it has saved

    # Where backward() is called inside of what torch.compile runs, Dynamo sees all frames of the backward pass.
    mark_all_below(forward_and_keep, backward_or_replay, forget_inputs, _are_batched, _is_due, _not_twice)
    function._fwd_fn, function._bwd_fn = forward_and_keep, backward_or_replay
