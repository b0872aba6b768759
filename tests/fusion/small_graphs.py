"""Small graphs of operations for the planner's tests."""

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape, as_dim, contiguous_strides


def tensor(*dims, dtype="float32"):
    shape = SymbolicShape(dims)
    return TensorSpec(shape, dtype, SymbolicShape(contiguous_strides([as_dim(d) for d in dims])))


def op(name, target, inputs, out, *rest, outputs=None, **kwargs):
    """``inputs``: names, ``"a@1"`` for output 1 of a; ``rest``: constants after them."""
    refs = tuple(ValueRef(i.partition("@")[0], int(i.partition("@")[2] or 0)) for i in inputs)
    specs = tuple(outputs) if outputs else (out,)
    return Operation(name, target, (*refs, *rest), tuple(kwargs.items()), specs, f"model.py:1 {name}")


def graph(ops, inputs, outputs, hints=None):
    refs = [ValueRef(o.partition("@")[0], int(o.partition("@")[2] or 0)) for o in outputs]
    return FusionGraph(ops, inputs, refs, hints or {"s0": 4, "s1": 100})
