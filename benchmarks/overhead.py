"""What routing costs: a routed node over its bare kernel, a tiny model over eager, a watched call.

    python benchmarks/overhead.py

Bars: at most 1 us a node over the bare launch; at most 10 us, 1 % of a call of 1 ms, in the mean of a long run for what
is noted of a module's call while it is observed, whatever its arguments are. All variants take turns in one process;
times are medians of rounds, differences are taken round by round. Writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

os.environ.setdefault("AUTOFUSE_TUNE", "off")
os.environ.setdefault("AUTOFUSE_CAPTURE_MAX_SLOWDOWN", "1.0")  # nothing is ever captured but on demand
os.environ.setdefault("AUTOFUSE_STORE", os.path.join(tempfile.mkdtemp(), "store.sqlite3"))

import torch
from common import difference, interleave, summary, write
from torch import nn

from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape
from autofuse.runtime.roots.unwatched import WATCHED_AT_FIRST
from autofuse.sessions import current_session
from autofuse.wrapper.node_call import empty_like_spec, make_launcher, make_unfused


def add_relu() -> NodeForm:
    """relu(a + b) on (s0, 16)."""
    spec = TensorSpec(SymbolicShape(["s0", 16]), "float32", SymbolicShape([16, 1]))
    operations = (
        Operation("v0", "aten.add.Tensor", (ValueRef("i0"), ValueRef("i1")), (), (spec,)),
        Operation("v1", "aten.relu.default", (ValueRef("v0"),), (), (spec,)),
    )
    return NodeForm((NodeInput("i0", spec), NodeInput("i1", spec)), operations, (ValueRef("v1"),), ("s0",))


def node_overhead(rounds: int) -> dict[str, object]:
    form, rows = add_relu(), 4
    kernel = FusionKernelGenerator().generate_generic_kernel(form)
    entry = kernel.load().entry
    a, b, out = (torch.randn(rows, 16) for _ in range(3))
    routed = make_launcher(form, entry, (rows,), 1)
    unfused = make_unfused(form, (rows,))
    sizes = routed.sizes.buffer_info()[0]  # type: ignore[attr-defined]
    pointers = (a.data_ptr(), b.data_ptr(), out.data_ptr())

    def bare() -> None:
        entry(sizes, *pointers)

    def bare_with_output() -> torch.Tensor:
        result = empty_like_spec((rows, 16), (16, 1), torch.float32)
        entry(sizes, *pointers)
        return result

    calls = {
        "bare kernel": bare,
        "bare kernel and output": bare_with_output,
        "routed": lambda: routed(a, b),
        "unfused": lambda: unfused(a, b),
    }
    samples = interleave(calls, rounds, 2000)
    return {
        "us": {name: summary(s) for name, s in samples.items()},
        "routed over bare kernel and output, us": difference(samples["routed"], samples["bare kernel and output"]),
        "routed over bare kernel, us": difference(samples["routed"], samples["bare kernel"]),
    }


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)) + x)


def graph_overhead(rounds: int) -> dict[str, object]:
    """One tiny model, (4, 16), forward without gradients and forward with backward."""
    variants = {"eager": Small(), "dynamo, empty backend": Small(), "autofuse": Small()}
    compiled = {
        "eager": variants["eager"],
        "dynamo, empty backend": torch.compile(_copy_forward(variants["dynamo, empty backend"]), backend="eager"),
        "autofuse": torch.compile(_copy_forward(variants["autofuse"]), backend="autofuse"),
    }
    x = torch.randn(4, 16)

    def forward(name: str) -> None:
        with torch.no_grad():
            compiled[name](x)

    def step(name: str) -> None:
        compiled[name](x).sum().backward()

    results: dict[str, object] = {}
    for what, call in (("forward", forward), ("forward and backward", step)):
        samples = interleave({n: lambda n=n, call=call: call(n) for n in compiled}, rounds, 300)
        results[what] = {
            "us": {name: summary(s) for name, s in samples.items()},
            "autofuse over eager, us": difference(samples["autofuse"], samples["eager"]),
            "autofuse over empty backend, us": difference(samples["autofuse"], samples["dynamo, empty backend"]),
        }
    return results


CALL_SECONDS = 1e-3
FRESH = 9  # roots of each kind, whose first calls are timed
SETTLED, LATER = 4000, 2000  # calls of a run that is long: few steps are sampled any more; calls that are timed then


class Idle(nn.Module):
    """Takes whatever comes, and the same time for each call."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        end = perf_counter() + CALL_SECONDS
        while perf_counter() < end:
            pass
        x: torch.Tensor = args[0]
        return x


@dataclass
class Batch:
    tokens: torch.Tensor
    mask: torch.Tensor


def arguments_of_many_kinds() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    def tensors(count: int) -> list[torch.Tensor]:
        return [torch.ones(4, 8) for _ in range(count)]

    def layer() -> list[Any]:
        a, b, c = tensors(3)
        return [(a, {"k": b, "v": c})]

    tree = {f"layer {i}": layer() for i in range(24)}
    x = torch.ones(4, 8)
    return {
        "one tensor": ((x,), {}),
        "four tensors by keyword": ((x,), dict(zip("abcd", tensors(4), strict=True))),
        "a list of 16 tensors": ((x, tensors(16)), {}),
        "a dict of 16 tensors": ((x, {str(i): t for i, t in enumerate(tensors(16))}), {}),
        "a tree of 72 tensors, four deep": ((x, tree), {}),
        "a list of 1,000 numbers": ((x, list(range(1000))), {}),
        "a dataclass, a string, None": ((x, Batch(x, x), "mean", None), {}),
    }


def call_overhead() -> dict[str, object]:
    """What is noted of a module's call, observed and left in eager, beyond what torch does in a call.

    Of the first calls, all of which are watched; and of a call in the long run, where most are counted only: the median
    call is one of these, the mean holds the watched ones, sampled steps and all.
    """
    session = current_session()
    assert session is not None
    session.roots.install()
    results: dict[str, object] = {}
    try:
        for number, (kind, (args, kwargs)) in enumerate(arguments_of_many_kinds().items()):
            first: dict[str, list[float]] = {"eager": [], "observed": []}
            for fresh in range(FRESH):
                name = f"Idle{number}_{fresh}"  # classes of one name are one root
                module = type(name, (Idle,), {"__qualname__": name})()
                calls = {
                    "eager": lambda m=module, a=args, k=kwargs: m._call_impl(*a, **k),
                    "observed": lambda m=module, a=args, k=kwargs: m(*a, **k),
                }
                with torch.no_grad():
                    for one, us in one_by_one(calls, WATCHED_AT_FIRST).items():
                        first[one] += us
            with torch.no_grad():
                for _ in range(SETTLED):
                    calls["observed"]()
                later = one_by_one(calls, LATER)
            root = session.roots.root_of(module)
            mean = mean_difference(later["observed"], later["eager"])
            results[kind] = {
                "one of the first calls over eager, us": difference(first["observed"], first["eager"]),
                "a later call over eager, us": difference(later["observed"], later["eager"]),
                "mean of later calls over eager, us": mean,
                "percent of a call of 1 ms": mean["mean"] / 10.0,
                "calls seen": root.all_calls,
                "state": f"{root.state} ({root.reason})",
            }
    finally:
        session.roots.uninstall()
    return results


def mean_difference(left: list[float], right: list[float]) -> dict[str, float]:
    """left - right in the mean, within two standard errors.

    Without pairs in which somebody else had the processor for a millisecond: nothing of ours takes as long.
    """
    pairs = [a - b for a, b in zip(left, right, strict=True) if abs(a - b) < 1000.0]
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    return {"mean": mean, "low": mean - 2 * error, "high": mean + 2 * error, "samples": len(pairs)}


def one_by_one(calls: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Microseconds of each of so many calls; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            began = perf_counter()
            call()
            found[name].append((perf_counter() - began) * 1e6)
    return found


def _copy_forward(module: nn.Module) -> object:
    """A function of its own for each variant: Dynamo's caches belong to code objects."""
    namespace: dict[str, object] = {"module": module}
    exec("def call(x):\n    return module(x)\n", namespace)
    return namespace["call"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    results = {
        "node": node_overhead(rounds),
        "tiny model (4, 16)": graph_overhead(rounds),
        "a module's call": call_overhead(),
    }
    path = write("overhead", results)
    node = results["node"]
    for name, s in node["us"].items():  # type: ignore[attr-defined]
        print(f"{name:28s} {s['median']:7.2f} us")
    over = node["routed over bare kernel and output, us"]
    print(f"a routed node costs {over['median']:.2f} us over the bare launch ({over['low']:.2f} to {over['high']:.2f})")
    for what, result in results["tiny model (4, 16)"].items():
        print(what, {n: round(s["median"], 1) for n, s in result["us"].items()})  # type: ignore[index]
    for kind, result in results["a module's call"].items():
        words = {"first": "one of the first calls", "later": "a later call", "mean": "mean of later calls"}
        found = {word: result[f"{what} over eager, us"] for word, what in words.items()}  # type: ignore[index]
        text = ", ".join(
            f"{word} {us.get('median', us.get('mean')):.1f} ({us['low']:.1f} to {us['high']:.1f})"
            for word, us in found.items()
        )
        print(f"{kind:32s} {result['state']}, us over eager: {text}")  # type: ignore[index]
    print(f"written to {path}")


if __name__ == "__main__":
    main()
