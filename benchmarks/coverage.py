"""How many of PyTorch's operators become part of one fused node, beside the kernels that torch.compile makes.

    python benchmarks/coverage.py                       # all operators, within 15 minutes
    python benchmarks/coverage.py --only cumsum,nn.     # by the beginning of their names; keeps other rows
    python benchmarks/coverage.py --quick               # a trial: a few operators

Needs `pip install expecttest`, which torch's table of operators imports (`torch.testing._internal`: `op_db`, the same
samples by which PyTorch tests itself). For each operator with a float32 sample the graphs of ``relu(op(x)) * 2``,
forward and backward, are planned; none is tuned or run fused. A graph is covered where all its operators that are more
than views are in one node, and the lowering accepts that node. A backward graph that reads no tensor (a gradient of
zeros) has nothing to fuse: it counts as covered and says `constant`. Sizes are fixed. Of torch.compile the kernels are
counted that Inductor generates for the forward graph (1: everything in one). Bars: 95 % of pointwise, reduction and
shape operators, 80 % of indexing, norms and losses. Left out: linear algebra, FFT, sparse, complex and random
operators, and those without a graph. Rows carry the commit; results are written to benchmarks/results/coverage.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from common import arguments, chosen, commit, parse, print_end, save
from coverage_kinds import kind_of
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.codegen.in_place import why_not
from autofuse.fusion.engine import FusionEngine
from autofuse.ir.optable import VIEWS, info

BARS = {"pointwise": 0.95, "reduction": 0.95, "shape": 0.95, "indexing": 0.8, "norm": 0.8, "loss": 0.8}
QUICK = ("add", "softmax", "sum", "nn.functional.mse_loss", "cumsum")
MOST_SAMPLES, MOST_WITHOUT_ELEMENTS = 30, 2000
_ALLOCATIONS = ("empty", "new_empty")


# ---- what is looked at ------------------------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    """PyTorch's own table by name, as far as it is looked at."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        sys.exit(f"expected {error.name}, which torch's table of operators imports: pip install {error.name}")
    found = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if kind_of(op, name) is not None and torch.float32 in op.supported_dtypes("cpu"):
            found[name] = op
    return found


def sample_of(op: Any, requires_grad: bool) -> Any:
    """A sample of two dims or more with more than one element, with few options; None without samples.

    Where none of the first has elements, more are looked at.
    """

    def rank(sample: Any) -> tuple[bool, bool, int]:
        tensors = [t for t in tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor)]
        first = tensors[0] if tensors else torch.empty(0)
        return all(t.numel() > 1 for t in tensors) and gives_elements(op, sample), first.dim() >= 2, -len(sample.kwargs)

    best: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad)):
            if number >= (MOST_SAMPLES if best is not None and rank(best)[0] else MOST_WITHOUT_ELEMENTS):
                break
            if best is None or rank(sample) > rank(best):
                best = sample
    return best


def gives_elements(op: Any, sample: Any) -> bool:
    """Whether all results of an operator have elements; so it is taken to be where it does not run."""
    try:
        with torch.no_grad():
            found = op.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:
        return True
    return all(t.numel() > 0 for t in tree_leaves(found) if isinstance(t, torch.Tensor))


def program(op: Any, sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """``relu(op(x)) * 2`` as a function of its tensors, and the tensors."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [n for n, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        given, args, kwargs = tree_unflatten(values, spec)
        return [follow(t) for t in tree_leaves(op.op(given, *args, **kwargs)) if isinstance(t, torch.Tensor)]

    return function, [flat[place] for place in places]


def follow(t: torch.Tensor) -> torch.Tensor:
    if t.dtype is torch.bool:
        return t.logical_not().logical_not()
    return torch.relu(t) * 2 if t.is_floating_point() else t.float() * 2


# ---- what becomes of it -------------------------------------------------------------------------------------------


def judge(module: fx.GraphModule, phase: str) -> dict[str, Any]:
    """Whether one node holds all of a graph, and if not, what is outside and why."""
    split_dropout(module)
    graph = import_graph(module).for_fusion()
    engine = FusionEngine(lowerable=why_not)
    nodes = engine.fuse(graph)
    inside = {op.name for node in nodes for op in node.operations}
    work = [op for op in graph.operations if info(op.target).kind not in VIEWS and op.short_name not in _ALLOCATIONS]
    outside = [op.target.removeprefix("aten.").removesuffix(".default") for op in work if op.name not in inside]
    if len(nodes) == 1 and not outside:
        return {"phase": phase, "covered": True}
    if phase == "backward" and not any(op.inputs for op in work):
        return {"phase": phase, "covered": True, "constant": True}
    codes = sorted({refusal.code for refusal in engine.refusals if not refusal.accepted})
    return {"phase": phase, "covered": False, "nodes": len(nodes), "outside": outside, "reasons": codes}


def graphs_of(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """What becomes of the graphs of a function: forward and backward, or inference."""
    found: list[dict[str, Any]] = []

    def compile_graph(module: fx.GraphModule, phase: str, times: int) -> Callable[[list[Any]], Any]:
        found.append(judge(module, phase))
        module.recompile()
        return boxed(module.forward)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda module, inputs: compile_with(module, inputs, compile_graph))
    sums = [t.sum() for t in compiled(*tensors) if t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()
    return found


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inductor writes its kernels, but they are neither compiled nor run."""
    from torch._inductor.async_compile import AsyncCompile

    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *given: None):
        yield


def inductor_kernels(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> int | None:
    """Kernels that Inductor generates for the forward graph; None where it fails."""
    from torch._inductor import config, metrics

    torch._dynamo.reset()
    metrics.reset()
    try:
        with uncompiled(), torch.no_grad(), config.patch(force_disable_caches=True):
            torch.compile(function)(*tensors)
    except Exception:
        return None
    return int(metrics.generated_kernel_count)


def row_of(name: str, op: Any) -> dict[str, Any] | None:
    """An operator's row; None for one that leaves no graph."""
    row: dict[str, Any] = {"operator": name, "kind": kind_of(op, name), "commit": commit()}
    try:
        function, tensors = program(op, sample_of(op, bool(op.supports_autograd)))
        row["graphs"] = graphs_of(function, tensors)
    except Exception as error:  # of torch's own tracing: the operator has no graph
        print(f"  {name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}")
        return None
    if not row["graphs"]:
        return None
    row["inductor_kernels"] = inductor_kernels(function, [t.detach() for t in tensors])
    return row


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each kind the share of operators with a forward graph of one node, and with both graphs so."""
    total, forward, both, theirs = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        kind = row["kind"]
        total[kind] += 1
        forward[kind] += row["graphs"][0]["covered"]
        both[kind] += all(graph["covered"] for graph in row["graphs"])
        theirs[kind] += row["inductor_kernels"] == 1
    return {
        kind: {
            "operators": total[kind],
            "forward": round(forward[kind] / total[kind], 3),
            "forward and backward": round(both[kind] / total[kind], 3),
            "one kernel in torch.compile": round(theirs[kind] / total[kind], 3),
            "bar": bar,
        }
        for kind, bar in BARS.items()
        if total[kind]
    }


def main() -> None:
    parser = arguments(__doc__, "coverage", quick="a few operators", only="operators")
    options = parse(parser)
    began = time.monotonic()
    table = operators()
    names = chosen(options.only, list(table), ",".join(QUICK) if options.quick else "")
    before = json.loads(options.out.read_text())["rows"] if options.only and options.out.exists() else []
    rows = [row for row in before if row["operator"] not in names]
    warnings.simplefilter("ignore")  # torch's own, of deprecated operators and of caches that are switched off
    for name in names:
        row = row_of(name, table[name])
        if row is None:
            continue
        rows.append(row)
        for graph in row["graphs"]:
            if not graph["covered"]:
                what = " + ".join(graph["outside"][:6]) or f"{graph['nodes']} nodes"
                print(f"{name}, {graph['phase']}: {what} ({', '.join(graph['reasons']) or 'no rule'})", flush=True)
    bars = bars_of(rows)
    save(options.out, "coverage", bars=bars, rows=sorted(rows, key=lambda row: row["operator"]))
    print_end(bars, [], options.out, began)


if __name__ == "__main__":
    main()
