"""The list of torch's private names that autofuse uses, by purpose, and a check that this torch has them.

In: a torch. Out: which names it lacks (`missing`); `autofuse doctor` prints them, and what is lost. Guarantee: the list
is complete: `tests/test_torch_compat.py` reads it against the sources. This module imports torch only when a function
is called.

Names are private where a part of them begins with an underscore. They may go or change with any release of torch;
what is bound to one release is stored under its version, and whatever fails on another leaves the script in eager.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateNames:
    """Names that one part of autofuse needs."""

    purpose: str
    names: tuple[str, ...]
    lost: str  # without one of them
    is_essential: bool = True  # without them nothing is fused; otherwise only something is lost


PRIVATE: tuple[PrivateNames, ...] = (
    PrivateNames(
        "observing a script",
        (
            "torch._C.DisableTorchFunction",
            "torch._C._TorchDispatchModeKey.FAKE",
            "torch._C._TorchDispatchModeKey.FUNCTIONAL",
            "torch._C._TorchDispatchModeKey.PROXY",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._C._current_autograd_node",
            "torch._C._current_graph_task_id",
            "torch._C._disabled_torch_dispatch_impl",
            "torch._C._dynamo.eval_frame.get_eval_frame_callback",
            "torch._C._functorch.peek_interpreter_stack",
            "torch._C._get_dispatch_mode",
            "torch._C._get_dispatch_stack_at",
            "torch._C._get_function_stack_at",
            "torch._C._get_tracing_state",
            "torch._C._is_torch_function_enabled",
            "torch._C._len_torch_dispatch_stack",
            "torch._C._len_torch_function_stack",
            "torch._C._pop_torch_dispatch_stack",
            "torch._C._push_on_torch_dispatch_stack",
            "torch._ops.OpOverload",
            "torch.autograd.Variable._execution_engine.queue_callback",
            "torch.autograd._get_sequence_nr",
            "torch.autograd._profiler_enabled",
            "torch.autograd.forward_ad._current_level",
            "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
            "torch.nn.Module._compiled_call_impl",
            "torch.utils._device.DeviceContext",
            "torch.utils._python_dispatch.TorchDispatchMode",
        ),
        "nothing is observed",
    ),
    PrivateNames(
        "capturing modules",
        (
            "torch._C.DispatchKey.Autograd",
            "torch._C.DispatchKey.CompositeImplicitAutograd",
            "torch._C._autograd._get_current_graph_task_keep_graph",
            "torch._C._autograd._unsafe_set_version_counter",
            "torch._C._dispatch_tls_is_dispatch_key_included",
            "torch._C._dynamo.eval_frame._FrameAction.DEFAULT",
            "torch._C._dynamo.eval_frame._FrameAction.SKIP",
            "torch._C._dynamo.eval_frame._FrameExecStrategy",
            "torch._C._dynamo.eval_frame.set_code_exec_strategy",
            "torch._C._functions.DelayedError",
            "torch._C._is_any_autocast_enabled",
            "torch._C._select_conv_backend",
            "torch._C._set_grad_enabled",
            "torch._C._vmapmode_decrement_nesting",
            "torch._C._vmapmode_increment_nesting",
            "torch._C._will_engine_execute_node",
            "torch._decomp.decomposition_table",
            "torch._dispatch.python.enable_python_dispatcher",
            "torch._dynamo.backends.common.aot_autograd",
            "torch._dynamo.bytecode_transformation.create_call_function",
            "torch._dynamo.callback.callback_handler.end_callbacks",
            "torch._dynamo.callback.callback_handler.register_end_callback",
            "torch._dynamo.callback.callback_handler.register_start_callback",
            "torch._dynamo.callback.callback_handler.remove_start_callback",
            "torch._dynamo.config.patch",
            "torch._dynamo.convert_frame.trace_frame",
            "torch._dynamo.eval_frame.TorchPatcher.patch",
            "torch._dynamo.eval_frame.reset_code",
            "torch._dynamo.exc.RestartAnalysis",
            "torch._dynamo.exc.TorchDynamoException",
            "torch._dynamo.exc.unimplemented",
            "torch._dynamo.guards.GuardBuilder.CONSTANT_MATCH",
            "torch._dynamo.guards.GuardBuilder.HASATTR",
            "torch._dynamo.guards.install_guard",
            "torch._dynamo.guards.profile_guard_manager",
            "torch._dynamo.maybe_mark_dynamic",
            "torch._dynamo.mutation_guard.install_generation_tagging_init",
            "torch._dynamo.run",
            "torch._dynamo.side_effects.SideEffects",
            "torch._dynamo.source.AttrSource",
            "torch._dynamo.utils.counters",
            "torch._dynamo.utils.warn_once",
            "torch._dynamo.variables.ConstantVariable",
            "torch._dynamo.variables.builder.VariableBuilder",
            "torch._dynamo.variables.ctx_manager.GradModeVariable.reconstruct",
            "torch._dynamo.variables.functions.UserFunctionVariable",
            "torch._dynamo.variables.functions.WrapperUserFunctionVariable",
            "torch._dynamo.variables.ctx_manager.InferenceModeVariable",
            "torch._dynamo.variables.misc.RandomVariable.is_supported_random_obj",
            "torch._dynamo.variables.tensor.TensorVariable",
            "torch._dynamo.variables.torch.TorchInGraphFunctionVariable",
            "torch._dynamo.variables.user_defined.UserDefinedClassVariable",
            "torch._functorch._aot_autograd.schemas.OutputType.non_alias",
            "torch._functorch.aot_autograd.make_boxed_func",
            "torch._functorch.config.patch",
            "torch._functorch.partitioners.default_partition",
            "torch._guards.CompileContext.try_get",
            "torch._guards.TracingContext.try_get",
            "torch._ops.HigherOrderOperator",
            "torch._ops.OpOverloadPacket",
            "torch._prims_common.suggest_memory_format",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.ops.aten._to_copy",
            "torch.ops.aten._unsafe_view.default",
            "torch.utils._python_dispatch._disable_current_modes",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_unflatten",
            "torch.utils._sympy.functions.FloorDiv",
            "torch.utils._sympy.functions.Max",
        ),
        "no module is captured",
    ),
    PrivateNames(
        "calls of captured modules",
        (
            "torch._C._TorchFunctionState.ENABLED",
            "torch._C._dynamo.guards.DictGuardManager",
            "torch._C._dynamo.guards._empty_strided_cpu",
            "torch._C._set_torch_function_state",
            "torch._dynamo.eval_frame._debug_get_cache_entry_list",
            "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd",
            "torch._functorch._aot_autograd.runtime_wrappers.OutputType",
            "torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper",
            "torch._functorch._aot_autograd.runtime_wrappers._should_disable_saved_tensors_hooks",
            "torch._functorch._aot_autograd.runtime_wrappers.mark_dynamo_propagated_dynamic_indices",
            "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        ),
        "captured modules are not called",
    ),
    PrivateNames(
        "graphs in C",
        (
            "torch._C.TensorBase.__basicsize__",
            "torch._C._AutoDispatchBelowADInplaceOrView",
            "torch._C._dispatch_tls_local_exclude_set",
            "torch._C.__file__",
        ),
        "graphs are called from Python",
        is_essential=False,
    ),
    PrivateNames(
        "kept graphs",
        (
            "torch._C._autocast_supported_devices",
            "torch._C._get_sdp_priority_order",
            "torch._dynamo.utils.GmWrapper",
            "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache",
            "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCachePickler",
            "torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache",
            "torch._functorch._aot_autograd.autograd_cache.check_cacheable",
            "torch._functorch._aot_autograd.autograd_cache.sanitize_gm_for_cache",
            "torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler",
            "torch._functorch.config.save_config",
            "torch._inductor.output_code.OutputCode",
            "torch.fx._graph_pickler.GraphPickler.dumps",
            "torch.fx._graph_pickler.GraphPickler.loads",
            "torch.fx._graph_pickler.Options",
        ),
        "each run captures anew",
        is_essential=False,
    ),
    PrivateNames(
        "kept traces",
        (
            "torch._dynamo.config.get_config_copy",
            "torch._dynamo.convert_frame.GlobalStateGuard",
            "torch._dynamo.guards.CheckFunctionManager",
            "torch._dynamo.guards.GuardBuilder.TENSOR_MATCH",
            "torch._dynamo.guards.ShapeCodeParts",
            "torch._dynamo.guards.convert_int_to_concrete_values",
            "torch._dynamo.output_graph.OutputGraphCommon",
            "torch._dynamo.output_graph.OutputGraphGuardsState",
            "torch._dynamo.source.Source",
            "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters",
            "torch._guards.Guard",
            "torch._guards.GuardsSet",
            "torch._guards.tracing",
            "torch.overrides._get_current_function_mode_stack",
            "torch.utils._device.CURRENT_DEVICE",
            "torch.utils._ordered_set.OrderedSet",
            "torch.utils._pytree.tree_map",
        ),
        "each run traces anew",
        is_essential=False,
    ),
    PrivateNames(
        "threads beside one that traces",
        ("torch.compiler._compile_session_context", "torch.compiler._is_compiling_flag"),
        "if they ask, they may be told that they are compiled, too",
        is_essential=False,
    ),
    PrivateNames(
        "ranks that agree",
        ("torch.distributed.distributed_c10d._get_default_store",),
        "optimizers' steps of jobs with several ranks stay torch's own",
        is_essential=False,
    ),
    PrivateNames(
        "attention in training",
        ("torch._softmax_backward_data",),
        "attention is not fused in training",
        is_essential=False,
    ),
    PrivateNames(
        "oneDNN's operators with an epilogue (x86)",
        (
            "torch._C._nn.mkldnn_reorder_conv2d_weight",
            "torch._addmm_activation",
            "torch.ops.mkldnn._convolution_pointwise",
            "torch.ops.mkldnn._linear_pointwise",
        ),
        "these library calls are no candidates",
        is_essential=False,
    ),
    PrivateNames(
        "GPUs",
        ("torch._C._dynamo.guards._empty_strided_cuda", "torch._foreach_copy_", "torch.cuda._sleep"),
        "outputs on GPUs are made more slowly, kernels of GPUs are not timed, and no CUDA graph is replayed",
        is_essential=False,
    ),
    PrivateNames(
        "peaks of memory",
        (
            "torch._C._autograd._disable_profiler_legacy",
            "torch._C._autograd._enable_profiler_legacy",
            "torch._C._autograd._profiler_enabled",
            "torch._C._profiler._ExperimentalConfig",
            "torch.autograd.profiler._enable_profiler",
        ),
        "the report does not show peaks of memory",
        is_essential=False,
    ),
)


def count() -> int:
    """Of all names."""
    return sum(len(group.names) for group in PRIVATE)


# Names that older releases have under another one.
FORMER: Mapping[str, str] = {
    "torch._functorch._aot_autograd.runtime_wrappers.mark_dynamo_propagated_dynamic_indices": (
        "torch._functorch._aot_autograd.runtime_wrappers.maybe_mark_dynamic_helper"
    )
}


def missing() -> Mapping[PrivateNames, tuple[str, ...]]:
    """The names that this torch lacks, by what needs them. Imports torch, Dynamo and AOTAutograd (2 s)."""
    found = {
        group: tuple(n for n in group.names if not (_is_there(n) or (n in FORMER and _is_there(FORMER[n]))))
        for group in PRIVATE
    }
    return {group: names for group, names in found.items() if names}


def _is_there(name: str) -> bool:
    """Whether the longest part of the name that is a module imports, and has the rest as attributes."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            for part in parts[end:]:
                owner = getattr(owner, part)
        except (AttributeError, RuntimeError):  # the latter from a package that loads its attributes late
            continue
        return True
    return False
