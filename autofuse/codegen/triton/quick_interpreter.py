"""Triton's interpreter without work that no kernel needs.

In: Triton's modules, in a process that interprets. Out: the same modules with quicker parts. The interpreter patches
``triton.language`` before each launch and takes it back afterwards; it reads, parses and compiles the text of a kernel
once more; and at each operation it makes type objects anew that are equal to earlier ones. `interpret.py` alone calls
this. Numbers are the same to the bit, but for scans: these combine neighbours first, as a GPU does, where the
interpreter goes element by element. A case of the table takes 40 % of the time. Triton 3.6 to 3.9.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
import types
from collections.abc import Callable, Sequence
from typing import Any

from autofuse.codegen.triton.module import file_of
from autofuse.codegen.triton.source import TritonSource


def define_interpreted(source: TritonSource) -> dict[str, Any]:
    """As `define`; the functions of the module are what the interpreter would make of them at their first call."""
    from triton.runtime import interpreter

    file = file_of(source)
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"autofuse_triton_{source.name}"}
    exec(_rewritten(source.text, file), names)
    names["interpreter_semantic"] = interpreter.interpreter_semantic
    for function in names.values():
        if isinstance(function, interpreter.InterpretedFunction):
            function.rewrite = functools.partial(_itself, function.fn)
    return names


@functools.lru_cache(maxsize=64)
def _rewritten(text: str, file: str) -> types.CodeType:
    """The code of a module, for as many calls as follow each other: one text runs at several sizes."""
    tree = ast.parse(text, file)
    rewrite = _Assignments()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            rewrite.visit(statement)
    return compile(tree, file, "exec")


class _Assignments(ast.NodeTransformer):
    """As the interpreter's own pass: ``x = value`` becomes ``x = interpreter_semantic.to_tensor(value, False)``."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        value = node.value
        module = ast.copy_location(ast.Name("interpreter_semantic", ast.Load()), value)
        function = ast.copy_location(ast.Attribute(module, "to_tensor", ast.Load()), value)
        no = ast.copy_location(ast.Constant(False), value)
        node.value = ast.copy_location(ast.Call(function, [value, no], []), value)
        return node


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def hasten() -> None:
    """Once a process."""
    from triton.runtime import interpreter

    _patch_once(interpreter)
    # Each sum of integers would be made again in 64 bits, for an assertion that the interpreter then leaves out.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)  # with assertions
    _keep_numpy_types(interpreter)
    _keep_block_types()
    _keep_shapes()
    _broadcast_only_what_differs()
    _scan_by_doubling(interpreter)


def _patch_once(interpreter: Any) -> None:
    """The first launch patches the language for all others: nothing else in such a process can use it."""
    import triton.language as tl

    patch = interpreter._patch_lang
    done: list[Any] = []

    def patch_lang(function: Any) -> Any:
        if not done:
            done.append(patch(_Visible({"tl": tl, "core": tl.core})))
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


@dataclasses.dataclass(frozen=True)
class _Visible:
    """A function as far as the interpreter looks for the modules that it names."""

    __globals__: dict[str, Any]


def _keep_numpy_types(interpreter: Any) -> None:
    import triton.language as tl

    original = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        if type(dtype) is tl.block_type:
            dtype = dtype.element_ty
        if type(dtype) is not tl.dtype:
            return original(dtype)
        found = by_name.get(dtype.name)
        if found is None:
            found = by_name[dtype.name] = original(dtype)
        return found

    interpreter._get_np_dtype = numpy_type


def _keep_block_types() -> None:
    import triton.language as tl

    original = tl.block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        if type(element_ty) is not tl.dtype or any(type(size) is not int for size in shape):
            original(self, element_ty, shape)
            return
        key = (element_ty.name, tuple(shape))
        found = known.get(key)
        if found is None:
            original(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    tl.block_type.__init__ = init


def _keep_shapes() -> None:
    """A tensor's shape as Triton's constants, made once for each shape."""
    import triton.language as tl

    original = tl.core.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        key = tuple(shape)
        found = known.get(key)
        if found is None:
            original(self, handle, type)
            known[key] = (self.shape, self.numel)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    tl.core.tensor.__init__ = init


def _broadcast_only_what_differs() -> None:
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and tuple(a.shape) == tuple(b.shape):
            return lhs, rhs
        return original(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast


def _scan_by_doubling(interpreter: Any) -> None:
    """Scans of whole blocks at a time: at distance 1, 2, 4 and so on each element takes in what lies before it.

    After Hillis and Steele, Data Parallel Algorithms, 1986.
    """

    import numpy as np

    def generic_scan(self: Any, inputs: Sequence[Any]) -> list[Any]:
        axis = self.axis % inputs[0].handle.data.ndim
        length = inputs[0].handle.data.shape[axis]
        found = [item.handle.data for item in inputs]
        distance = 1
        while distance < length:
            # Blocks have powers of two elements, so whole blocks are combined; the first elements stay as they are.
            before = [
                self.to_tensor(np.roll(data, distance, axis), item.dtype)
                for data, item in zip(found, inputs, strict=True)
            ]
            after = [self.to_tensor(data, item.dtype) for data, item in zip(found, inputs, strict=True)]
            combined = self.combine_fn.fn(*before, *after)
            results = combined if isinstance(combined, tuple) else (combined,)
            is_first = np.arange(length).reshape([-1 if dim == axis else 1 for dim in range(found[0].ndim)]) < distance
            found = [
                np.where(is_first, data, result.handle.data.astype(data.dtype))
                for data, result in zip(found, results, strict=True)
            ]
            distance *= 2
        return [self.to_tensor(data, item.dtype) for data, item in zip(found, inputs, strict=True)]

    interpreter.ScanOps.generic_scan = generic_scan
