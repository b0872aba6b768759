"""Fixtures of the tests of libraries' operators: nothing is registered before a test, nor after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from autofuse import library_operators
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.ir.operation import NodeForm
from autofuse.runtime.graphs import router as router_module
from autofuse.wrapper.node_call import NodeCall
from tests.runtime.library_operators.shared import (
    CALLS,
    Fused,
)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library_operators, "_by_name", {})
    monkeypatch.setattr(library_operators, "_by_operator", {})
    torch._dynamo.reset()
    CALLS.clear()
    yield


@pytest.fixture
def catalogue(generator: FusionKernelGenerator, monkeypatch: pytest.MonkeyPatch) -> Fused:
    def launcher(form: NodeForm, entry: Any, values: Sequence[int], threads: int, **options: Any) -> NodeCall:
        kernel = generator.generate_generic_kernel(form)

        def call(*inputs: torch.Tensor) -> Any:
            outputs = kernel(*inputs)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return call

    monkeypatch.setattr(router_module, "make_launcher", launcher)
    return Fused()


@pytest.fixture(scope="module")
def generator() -> FusionKernelGenerator:
    return FusionKernelGenerator()
