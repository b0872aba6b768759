"""Dropout taken apart: the random mask, which keeps eager's place in the stream, and the scaling, which fuses.

In: an FX graph with ``aten.native_dropout``. Out: the same graph with `bernoulli_mask` and `dropout_scale` in its place
on a CPU, with `philox_dropout` on a GPU whose random numbers a kernel can compute itself. Guarantee: the mask is
sampled at eager's place in the stream and from the same bits; the result is rounded as eager's (`x * mask * scale`, in
that order). Source of the arithmetic: ATen/native/Dropout.cpp, native_dropout_cpu.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from autofuse.ir.optable import OpKind, info

_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))

# Set by the session once the generator has proved bit-equal to aten's; None: aten samples.
_generator: Callable[[torch.Tensor, float], None] | None = None


def use_generator(generator: Callable[[torch.Tensor, float], None] | None) -> None:
    """Let ``generator(mask, keep)`` fill contiguous CPU masks from torch's default generator."""
    global _generator
    _generator = generator


def bernoulli_mask(x: torch.Tensor | Sequence[int], keep: float) -> torch.Tensor:
    """A bool mask like ``x``, each element True with probability ``keep``, from torch's default generator.

    For sizes in place of a tensor, the mask is contiguous and on the CPU.
    """
    is_tensor = isinstance(x, torch.Tensor)
    mask = torch.empty_like(x, dtype=torch.bool) if is_tensor else torch.empty(x, dtype=torch.bool, device="cpu")
    if keep == 0.0:  # eager multiplies by zero then, and takes no random numbers
        return mask.zero_()
    if _generator is not None and mask.is_contiguous() and mask.device.type == "cpu":
        _generator(mask, keep)
        return mask
    return mask.bernoulli_(keep)


def dropout_scale(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``x * mask * scale`` with eager's two roundings."""
    return x.mul(mask).mul_(scale)


def philox_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's own dropout, under a name that tells the planner that a kernel may compute the same random numbers."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.native_dropout(x, p, train)
    return found


def regenerate_dropout(module: fx.GraphModule, is_proven: Callable[[torch.device, torch.dtype], bool]) -> int:
    """Rename the training dropouts of devices whose numbers are proven, in place; returns how many."""
    count = 0
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.native_dropout.default:
            continue
        out = node.meta["val"][0]
        draws = len(node.args) == 3 and node.args[2] is not False and out.device.type == "cuda"
        if draws and is_proven(out.device, out.dtype):
            node.target = philox_dropout
            count += 1
    return count


def restore_dropout(module: fx.GraphModule) -> None:
    """Take `regenerate_dropout` back."""
    for node in module.graph.nodes:
        if node.target is philox_dropout:
            node.target = torch.ops.aten.native_dropout.default


def pass_idle_dropout(module: fx.GraphModule) -> None:
    """Dynamo's graph without the dropouts of inference and of rate 0, which in eager return their input.

    AOTAutograd would make a copy, and a script could see that it shares no memory with the input.
    """
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=F.dropout):
        given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
        if given.get("training", True) is False or given.get("p", 0.5) == 0.0:
            node.replace_all_uses_with(given["input"])
            module.graph.erase_node(node)
            count += 1
    if count:
        module.recompile()


def _earliest_like(node: fx.Node) -> fx.Node:
    """The first tensor of the chain that ends in ``node`` with the same sizes and strides.

    The mask needs sizes only. A mask made like the last tensor of a fusible chain would come between the chain and the
    scaling, and they could not be one kernel.
    """
    while node.op == "call_function":
        kind = info(_target(node)).kind
        if kind not in (OpKind.POINTWISE, OpKind.NORMALISATION):
            return node
        value = node.meta["val"]
        like = [n for n in node.all_input_nodes if isinstance(value, torch.Tensor) and _same_layout(n, value)]
        if not like:
            return node
        node = like[0]
    return node


def _sizes(node: fx.Node) -> list[int | fx.Node] | None:
    """The sizes of a contiguous tensor, as arguments that are known before the tensor is; None where some are not."""
    value = node.meta["val"]
    if not value.is_contiguous():
        return None
    known: dict[str, fx.Node] = {}
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        size = earlier.meta.get("val")
        if isinstance(size, torch.SymInt):
            known.setdefault(str(size.node.expr), earlier)
    found = [size if isinstance(size, int) else known.get(str(size.node.expr)) for size in value.shape]
    return None if None in found else found


def _is_of_product(node: fx.Node) -> bool:
    """Whether a tensor is the result of a matmul or a convolution, or a view of one."""
    while node.op == "call_function" and info(_target(node)).kind is OpKind.VIEW:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and _target(node) in _PRODUCTS


def _mask_like(node: fx.Node) -> fx.Node | list[int | fx.Node]:
    """What the mask for ``node`` is made like: a tensor, or sizes where that tensor would be a matmul's result.

    A matmul's epilogue may be one kernel with it, which a mask that waits for the matmul's result would prevent.
    """
    like = _earliest_like(node)
    sizes = _sizes(like) if _is_of_product(like) else None
    return like if sizes is None else sizes


def _target(node: fx.Node) -> str:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "autofuse.dropout_scale.default" if target is dropout_scale else ""
    return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"


def _same_layout(node: fx.Node, value: torch.Tensor) -> bool:
    other = node.meta.get("val")
    return (
        isinstance(other, torch.Tensor)
        and other.device == value.device
        and tuple(map(str, other.shape)) == tuple(map(str, value.shape))
        and tuple(map(str, other.stride())) == tuple(map(str, value.stride()))
    )


def split_dropout(module: fx.GraphModule) -> int:
    """Rewrite every training dropout on a CPU in place; returns how many."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.native_dropout.default:
            continue
        x, p, train = node.args
        out, mask = node.meta["val"]
        if train is False or not isinstance(p, float | int) or out.device.type != "cpu":
            continue
        if not all(user.target is operator.getitem for user in node.users):
            continue
        keep = 1.0 - float(p)
        scale = 0.0 if keep == 0.0 else 1.0 / keep
        with module.graph.inserting_before(node):
            drawn = module.graph.call_function(bernoulli_mask, (_mask_like(x), keep))
            scaled = module.graph.call_function(dropout_scale, (x, drawn, scale))
        drawn.meta.update(node.meta, val=mask)
        scaled.meta.update(node.meta, val=out)
        for user in list(node.users):
            user.replace_all_uses_with(scaled if user.args[1] == 0 else drawn)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not scaled.users:
            module.graph.erase_node(scaled)
        count += 1
    return count
