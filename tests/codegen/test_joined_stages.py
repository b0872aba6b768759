"""Small nodes as stages of one kernel: eager's values, whatever passes between them, and eager's errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autofuse.codegen.in_place import why_not
from autofuse.codegen.inputs import Kind, make_inputs
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.joined_stages import part_of
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.errors import FusionError, LoweringError
from autofuse.fusion import FusionEngine
from autofuse.ir.operation import NodeForm
from tests.codegen.compare import problems
from tests.codegen.test_in_place import Captured
from tests.strategies.harness import GENERATOR, plan

T = torch.Tensor
X, Y, IDS = torch.randn(5, 7), torch.randn(4, 7), torch.tensor([0, 2, 1, 2])
ROWS = IDS.unsqueeze(1).repeat(1, 7)


def twice(t: T) -> T:
    return torch.relu(t) * 2


# A function whose backward graph is one node of several nests, and its inputs.
GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[T, ...]]] = {
    "index_add": (lambda x, i, y: twice(x.index_add(0, i, y, alpha=-1)), (X, IDS, Y)),
    "scatter": (lambda x, i, y: twice(x.scatter(0, i, y)), (X, ROWS, Y)),
    "scatter_add": (lambda x, i, y: twice(x.scatter_add(0, i, y)), (X, ROWS, Y)),
    "scatter_mean": (lambda x, i, y: twice(x.scatter_reduce(0, i, y, "mean")), (X, ROWS, Y)),
    "scatter_amax": (lambda x, i, y: twice(x.scatter_reduce(0, i, y, "amax")), (X, ROWS, Y)),
    "index_reduce_mean": (lambda x, i, y: twice(x.index_reduce(0, i, y, "mean")), (X, IDS, Y)),
    "put": (lambda x, i, y: twice(x.put(i, y[:, 0])), (X, IDS, Y)),
    "broadcast_tensors": (
        lambda a, b, c: [twice(t) for t in torch.broadcast_tensors(a, b, c)],
        (torch.randn(5, 1, 1), torch.randn(7, 1), torch.randn(3)),
    ),
    "cross": (lambda a, b: twice(torch.linalg.cross(a, b)), (torch.randn(5, 3), torch.randn(5, 3))),
    "divided_down": (lambda a, b: twice(torch.div(a, b, rounding_mode="floor")), (torch.randn(5, 1), torch.randn(7))),
    "trapezoid": (lambda y, x: twice(torch.trapezoid(y, x)), (torch.randn(5, 7), torch.randn(5, 7))),
    "margin": (lambda x, t: F.multi_margin_loss(x, t), (torch.randn(4, 7), IDS)),
    "local_response": (lambda x: twice(F.local_response_norm(x, 2)), (torch.randn(2, 6, 3),)),
    "rms_norm": (lambda x, w: twice(F.rms_norm(x, (7,), w)), (torch.randn(1, 7), torch.randn(7))),
}


def backward_form(name: str) -> NodeForm:
    function, inputs = GRADIENTS[name]
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    planned = next(p for p in plan(function, leaves) if p.phase == "backward")
    engine = FusionEngine(lowerable=why_not, check=True)
    (node,) = engine.fuse(planned.graph)
    return node.form


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_of_several_nests_is_one_kernel_with_eagers_values(name: str) -> None:
    form = backward_form(name)
    assert len(form.stages) > 1
    assert check(lower(form)) == []
    kernel = GENERATOR.generate_generic_kernel(form)
    kinds: tuple[Kind, ...] = ("normal", "special")
    for seed, kind in enumerate(kinds):
        made = make_inputs(form, [], seed=seed, kind=kind)
        given = [t.clone() for t in made]
        found = kernel(*made)
        reference = run_unfused(to_float64(form), widen(made), [])
        assert problems(found, run_unfused(form, made, []), reference) == []
        assert all(torch.equal(a, b) or a.is_floating_point() for a, b in zip(made, given, strict=True))
        again = kernel(*made)
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(found, again, strict=True))


def test_sizes_may_vary() -> None:
    function, inputs = GRADIENTS["index_add"]
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    planned = next(p for p in plan(function, leaves, [(0, 1), (2, 1)]) if p.phase == "backward")
    (node,) = FusionEngine(lowerable=why_not).fuse(planned.graph)
    assert node.form.stages and node.form.symbols
    kernel = GENERATOR.generate_generic_kernel(node.form)
    for size in (1, 7, 65, 1030):
        values = [size] * len(node.form.symbols)
        made = make_inputs(node.form, values, seed=size)
        reference = run_unfused(to_float64(node.form), widen(made), values)
        assert problems(kernel(*made), run_unfused(node.form, made, values), reference) == []


def gradients(function: Callable[..., T], x: T, i: T, y: T) -> list[T]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = function(x, i, y)
    out.square().sum().backward()
    assert x.grad is not None and y.grad is not None
    return [out.detach(), x.grad, y.grad]


def test_captured_steps_have_eagers_gradients(tmp_path: Any) -> None:
    """In Python's plans and in C's, for other sizes, for none, and where eager raises."""
    function = GRADIENTS["index_add"][0]
    captured = Captured(function, str(tmp_path / "store.sqlite3"))
    for count in (4, 9, 9, 9, 9, 9, 9, 9, 9, 0, 1, 6):
        x, i, y = torch.randn(5, 7), torch.randint(5, (count,)), torch.randn(count, 7)
        for found, expected in zip(gradients(captured.call, x, i, y), gradients(function, x, i, y), strict=True):
            torch.testing.assert_close(found, expected)
    routers = captured.session.context.routers
    assert any(slot.node.form.stages for router in routers for slot in router.program.slots)
    bad = torch.tensor([0, 1, 9, 2])
    for call in (function, captured.call):
        with pytest.raises(IndexError):
            gradients(call, torch.randn(5, 7), bad, torch.randn(4, 7))


def test_the_form_keeps_its_stages_and_others_keep_their_text() -> None:
    form = backward_form("index_add")
    assert NodeForm.from_json(form.to_json()) == form
    with pytest.raises(FusionError, match="stages"):
        NodeForm.from_json(form.to_json() | {"stages": [["v99"]]})
    plain = dataclasses.replace(form, stages=())
    assert "stages" not in plain.to_json() and plain.text() != form.text()


def test_a_stage_reads_what_another_makes_and_copies_views_of_it() -> None:
    form = backward_form("put")
    parts = [part_of(form, names) for names in form.stages]
    made = {ref for part in parts for ref in part.outputs}
    given = {item.name for item in form.inputs}
    assert all(ref in made or ref.name in given for part in parts for ref in part.inputs)
    assert set(form.outputs) <= made


def test_an_index_out_of_bounds_ends_the_call() -> None:
    form = backward_form("index_add")
    kernel = GENERATOR.generate_generic_kernel(form)
    made = make_inputs(form, [], seed=3)
    number = next(n for n, t in enumerate(made) if t.dtype == torch.int64)
    made[number][0] = 99
    with pytest.raises(IndexError):
        kernel(*made)


def test_a_gpu_has_no_stages() -> None:
    form = backward_form("put")

    def moved(spec: Any) -> Any:
        return dataclasses.replace(spec, device="cuda")

    inputs = tuple(dataclasses.replace(item, spec=moved(item.spec)) for item in form.inputs)
    operations = tuple(dataclasses.replace(op, outputs=tuple(map(moved, op.outputs))) for op in form.operations)
    with pytest.raises(LoweringError) as error:
        lower(dataclasses.replace(form, inputs=inputs, operations=operations))
    assert error.value.code == "device_bounds"
