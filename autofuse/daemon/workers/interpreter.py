"""The worker that runs Triton's text in Triton's interpreter, on CPU tensors: checks everything but the clock.

Triton is imported first, for its interpreter: torch imports it too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autofuse.codegen.triton.interpret import import_interpreted

import_interpreted()

import torch  # noqa: E402

from autofuse.codegen.triton.interpret import load_interpreted  # noqa: E402
from autofuse.codegen.triton.source import TritonSource  # noqa: E402
from autofuse.daemon.workers.cpu import main  # noqa: E402
from autofuse.ir.operation import NodeForm  # noqa: E402
from autofuse.tuner.node_bench import DeviceRunner  # noqa: E402
from autofuse.tuner.timing import CallSampler, Sampler  # noqa: E402
from autofuse.tuner.verify import GuardedAllocator  # noqa: E402
from autofuse.wrapper.node_call import (  # noqa: E402
    CallSite,
    Composed,
    empty_like_spec,
    expected_outputs,
    make_launcher,
    make_unfused,
)


class Interpreted(Composed):
    """An interpreted kernel, which is called like any other."""

    def __init__(self, source: TritonSource) -> None:
        self.source = source
        self._run = load_interpreted(source)

    def on_tensors(self, values: Mapping[str, int], *tensors: torch.Tensor) -> None:
        """Run the module for these values of its symbols."""
        self._run(values, tensors)

    def make_call(self, site: CallSite) -> Callable[..., Any]:
        """The callable for one shape; it raises what the interpreter raises."""
        table = dict(zip(site.form.symbols, site.symbol_values, strict=True))
        layouts = expected_outputs(site.form, site.symbol_values)
        empty = site.allocate or empty_like_spec

        def launch(*inputs: torch.Tensor) -> Any:
            outputs = tuple(empty(*layout) for layout in layouts)
            if any(t.numel() for t in outputs):
                self._run(table, [*inputs, *outputs])
            return outputs if len(outputs) > 1 else outputs[0]

        return launch


class InterpreterRunner:
    """Interpreted kernels."""

    device = torch.device("cpu")

    def load(self, digest: str, name: str, binary: bytes) -> Any:
        return Interpreted(TritonSource.from_json(json.loads(binary)))

    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]:
        return make_unfused(form, values, self.device)

    def launcher(
        self, form: NodeForm, loaded: Any, values: Sequence[int], threads: int, allocate: GuardedAllocator | None
    ) -> Callable[..., Any]:
        return make_launcher(form, loaded, values, threads, allocate)

    def usable_threads(self, threads: int) -> int:
        return 0

    def sampler(self, is_shared: bool) -> Sampler:
        return CallSampler()

    def is_fatal(self, error: Exception) -> bool:
        return False


def _rig(memory_bytes: int) -> DeviceRunner:
    return InterpreterRunner()


if __name__ == "__main__":
    main(_rig, *(int(text) for text in sys.argv[1:3]))
