"""Runs a Triton module without a GPU: Triton's interpreter on CPU tensors, to check the printed code.

In: a `TritonSource`. Out: a function that runs all passes of a call. Triton's own functions (``tl.sum``) must be
interpreted too, which is settled when Triton is imported: a process calls `import_interpreted` first, for torch imports
Triton sooner or later. This module corrects the interpreter where it differs from hardware: the device library becomes
numpy, and a float becomes a bfloat16 by rounding to nearest even, where the interpreter truncates. Triton 3.6 to 3.9.
It does not check speed, registers, memory races between programs, the accuracy of the device's own functions.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autofuse.codegen.call import torch_dtype
from autofuse.codegen.philox import RandomState
from autofuse.codegen.triton.quick_interpreter import define_interpreted, hasten
from autofuse.codegen.triton.source import TritonSource, resolve

InterpretedEntry = Callable[..., None]  # (symbol values, inputs and outputs, state of the generator or None)


def load_interpreted(source: TritonSource) -> InterpretedEntry:
    """The module as ``entry(symbol values, tensors, state)``. Raises RuntimeError where Triton is not interpreted."""
    with _interpreting():
        names = define_interpreted(source)
    names["libdevice"] = _LIBRARY
    kernels = [names[item.function] for item in source.passes]

    def entry(values: Mapping[str, int], tensors: Sequence[torch.Tensor], state: RandomState | None = None) -> None:
        call = resolve(source, values, state)
        scratch = [torch.empty(elements, dtype=torch_dtype(dtype)) for dtype, elements in call.scratch]
        for launch in call.launches:
            item = source.passes[launch.number]
            scalars = iter(launch.scalars)
            args: list[Any] = []
            for a in item.arguments:
                if a.kind == "param":
                    args.append(_flat(tensors[a.index]))
                elif a.kind == "scratch":
                    args.append(scratch[a.index])
                else:
                    args.append(next(scalars))
            with np.errstate(all="ignore"):
                kernels[launch.number][(launch.grid,)](*args, **dict(item.constants))

    return entry


def import_interpreted() -> None:
    """Import Triton so that its kernels run in the interpreter in this process, for good."""
    with _interpreting():
        _mend_interpreter()
        import triton.experimental.gluon  # noqa: F401  (imported at the first call otherwise, when the variable is gone)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Set TRITON_INTERPRET, which ``@triton.jit`` reads, for the block only: child processes must not inherit it.

    Raises RuntimeError where Triton has been imported without it.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            raise RuntimeError("expected Triton to be interpreted, found it imported; call import_interpreted first")
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory that a tensor spans, as one dim: the interpreter copies what it is given, so gaps are copied too."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    extent = 1 + sum(spans) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


# ---- the device library -----------------------------------------------------------------------------------


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        arrays = [a.handle.data for a in args]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*arrays)).astype(arrays[0].dtype)
        return tl.core.tensor(TensorHandle(result, args[0].handle.dtype), _joint_type(args, result))

    return call


def _joint_type(args: Sequence[Any], result: Any) -> Any:
    """The block type of the result; operands of other shapes were broadcast."""
    import triton.language as tl

    scalar = args[0].type.scalar
    return tl.core.block_type(scalar, list(result.shape)) if result.ndim else scalar


def _torch_function(name: str) -> Callable[..., Any]:
    """A function of torch.special on numpy arrays, for what numpy lacks."""
    function = getattr(torch.special, name)
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


_NUMPY: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh,
    "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "fmod": np.fmod, "pow": np.power, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "nearbyint": np.rint,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "erf": _torch_function("erf"),
    "erfc": _torch_function("erfc"), "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "hypot": np.hypot,
    "copysign": np.copysign, "nextafter": np.nextafter, "lgamma": _torch_function("gammaln"),
}  # fmt: skip
_LIBRARY = types.SimpleNamespace(**{name: _elementwise(function) for name, function in _NUMPY.items()})


# ---- the interpreter's own gaps -----------------------------------------------------------------------------


def _mend_interpreter() -> None:
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_autofuse_mended", False):
        return
    import triton.language as tl

    original = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_to_bfloat16(src.data), dst_type.scalar)
        return original(self, src, dst_type)

    builder.cast_impl = cast_impl
    product = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return product(self, _from_bfloat16(a), _from_bfloat16(b), d, *options)

    builder.create_dot = create_dot
    splat = builder.create_splat

    def create_splat(self: Any, block: Any, value: Any) -> Any:
        """A comparison of scalars has its operands' type here, and Triton 3.9 refuses it as a mask."""
        if value.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(block.shape, value.data.item()), tl.int1)
        return splat(self, block, value)

    builder.create_splat = create_splat
    builder.create_assert = _assert_all
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # 3.6 calls int() on an array with a dim, which numpy 2.4 refuses
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    hasten()
    builder._autofuse_mended = True


def _assert_all(builder: Any, condition: Any, message: str) -> None:
    """An assertion of the device about all elements of a tile: the interpreter's own asks for the truth of the tile."""
    if not condition.data.all():
        raise AssertionError(message)


def _from_bfloat16(handle: Any) -> Any:
    """A matmul's operand as float32: the interpreter would multiply the bits of bfloat16 values as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _to_bfloat16(values: Any) -> Any:
    """The bits of float32 values rounded to nearest even, as uint16, which is how the interpreter keeps bfloat16."""
    flat = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
