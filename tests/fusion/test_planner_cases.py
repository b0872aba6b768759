"""Each fusible operator has loops to share, and the planner does put it into one node with what stands around it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autofuse.codegen.in_place import why_not
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.fusion import FusionEngine, FusionGraph
from autofuse.fusion.iteration_space import is_constant
from autofuse.fusion.node import space_of
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef, map_arg
from autofuse.ir.optable import FUSIBLE, OPS, VIEWS, OpKind, info
from tests.cases import CASES
from tests.codegen.compare import problems
from tests.codegen.lowering.test_rules import BY_HAND, form_by_hand, rms_form
from tests.codegen.nodes import NodeBuilder
from tests.fusion.small_graphs import graph, op, tensor
from tests.strategies.harness import GENERATOR, plan

# What may come before and behind an operator in its node, where it is not both.
ONLY_BEHIND = (
    OpKind.CREATION,
    OpKind.POOLING,
    OpKind.INDEXED,
    OpKind.WRITE,
)  # nothing, a window, a tensor that must be given
# What stands before an expand has fewer elements; the example of a reshape splits no dim, that of a view does.
TABLES = {"aten.nll_loss2d_forward.default"}  # what is read by an index is given from outside
OTHER_LOOPS = {"aten.expand.default", "aten.reshape.default", "aten.empty_like.default"}  # the last is not read


@functools.cache
def forms() -> dict[str, NodeForm]:
    """For each fusible operator a form that has it."""
    b = NodeBuilder()
    dropout = b.form(b.call("autofuse.philox_dropout.default", b.input(torch.zeros(4, 6)), 0.1, True))
    by_hand = [dropout, rms_form(False), rms_form(True), *map(form_by_hand, BY_HAND)]
    traced = [case.form(torch.float32) for case in CASES.values()]
    found = {}
    for form in (*by_hand, *traced):
        for operation in form.operations:
            if info(operation.target).kind in FUSIBLE:
                found.setdefault(operation.target, form)
    return found


def test_every_fusible_operator_has_an_iteration_space() -> None:
    fusible = {target for target, facts in OPS.items() if facts.kind in FUSIBLE}
    assert set(forms()) == fusible
    without = {
        item.target
        for form in forms().values()
        for item in form.operations
        if info(item.target).kind in FUSIBLE - VIEWS and space_of(item, form.spec) is None
    }
    assert without == set()


def beside(name: str, ref: ValueRef, spec: TensorSpec) -> Operation:
    """A cheap operation on a value, as stands before or behind another."""
    if spec.dtype == "bool":
        return Operation(name, "aten.logical_not.default", (ref,), (), (spec,))
    return Operation(name, "aten.add.Scalar", (ref, 1), (), (spec,))


def chain_of(target: str) -> FusionGraph:
    """An operator between operations that can share its loops."""
    form = forms()[target]
    found = next(item for item in form.operations if item.target == target)
    names = {ref: f"x{number}" for number, ref in enumerate(dict.fromkeys(found.inputs))}
    inputs = {name: form.spec(ref) for ref, name in names.items()}
    largest = max(inputs, key=lambda name: len(inputs[name].shape), default="")
    operations = []
    if inputs and info(target).kind not in ONLY_BEHIND and target not in TABLES:
        operations.append(beside("before", ValueRef(largest), inputs[largest]))
        names = {ref: "before" if name == largest else name for ref, name in names.items()}
    rename = functools.partial(map_arg, on_ref=lambda ref: ValueRef(names[ref]))
    kwargs = tuple((key, rename(value)) for key, value in found.kwargs)
    operations.append(replace(found, name="own", args=rename(found.args), kwargs=kwargs))
    operations.append(beside("behind", ValueRef("own"), found.outputs[0]))
    if is_constant(found):  # beside one cheap operation it is not worth a kernel
        operations.append(beside("after", ValueRef("behind"), found.outputs[0]))
    return FusionGraph(operations, inputs, [ValueRef(operations[-1].name)])


def test_every_fusible_operator_is_one_node_with_its_neighbours() -> None:
    apart = {}
    for target in set(forms()) - OTHER_LOOPS:
        chain = chain_of(target)
        engine = FusionEngine(lowerable=why_not, check=True)
        if [node.operations for node in engine.fuse(chain)] != [chain.operations]:
            apart[target] = [(r.code, r.operations, r.detail) for r in engine.refusals if not r.accepted]
    assert apart == {}


LOSS = tensor()


def followed(*behind: Operation) -> list[list[str]]:
    """The names of the operations of each node, where a loss of classes has these operations behind it."""
    scores = tensor("s0", 7)
    loss = Operation(
        "loss",
        "aten.nll_loss_forward.default",
        (ValueRef("scores"), ValueRef("target"), None, 1, -100),
        (),
        (LOSS, LOSS),
    )
    inputs = {"x": scores, "target": replace(tensor("s0"), dtype="int64"), "w": LOSS}
    operations = [op("scores", "aten.tanh.default", ["x"], scores), loss, *behind]
    found = FusionEngine().fuse(graph(operations, inputs, [behind[-1].name]))
    return [[item.name for item in node.operations] for node in found]


def test_what_follows_a_whole_reduction_is_in_its_node() -> None:
    half = op("half", "aten.mul.Tensor", ["loss"], LOSS, 0.5)
    assert followed(half, op("sum", "aten.add.Tensor", ["half", "w"], LOSS)) == [["scores", "loss", "half", "sum"]]


def test_a_loss_that_may_be_nan_for_a_wrong_class_is_not_followed_by_what_loses_the_nan() -> None:
    small = op("small", "aten.lt.Scalar", ["loss"], replace(LOSS, dtype="bool"), 3.0)
    assert followed(small) == [["scores", "loss"]]


def test_what_is_complete_after_the_loops_goes_back_into_none() -> None:
    far = op("far", "aten.sub.Tensor", ["scores", "loss"], tensor("s0", 7))
    assert ["scores", "loss", "far"] not in followed(far)


def test_single_elements_before_the_loops_are_in_their_node() -> None:
    x, one = tensor("s0", 256), tensor()
    operations = [
        op("half", "aten.mul.Tensor", ["g"], one, 0.5),
        op("scale", "aten.relu.default", ["half"], one),
        op("wide", "aten.expand.default", ["scale"], x, x.shape.dims),
        op("near", "aten.mul.Tensor", ["x", "wide"], x),
    ]
    (node,) = FusionEngine().fuse(graph(operations, {"x": x, "g": one}, ["near"]))
    assert node.operations == operations
    operations.append(op("end", "aten.exp.default", ["near"], x))
    nodes = FusionEngine().fuse(graph(operations, {"x": x, "g": one}, ["end", "scale"]))
    names = [[o.name for o in node.operations] for node in nodes]
    assert names == [["half", "scale"], ["near", "end"]]  # others that read the number do not wait for the loops


def test_rows_that_are_expanded_are_in_one_node_with_what_reads_them() -> None:
    x, row = tensor("s0", 256), tensor("s0", 1)
    operations = [
        op("most", "aten.amax.default", ["x"], row, (-1,), True),
        op("wide", "aten.expand.default", ["most"], x, x.shape.dims),
        op("less", "aten.sub.Tensor", ["x", "wide"], x),
    ]
    (node,) = FusionEngine().fuse(graph(operations, {"x": x}, ["less"]))
    assert node.operations == operations


def test_what_stands_behind_a_refused_operation_is_still_fused() -> None:
    x = tensor("s0", 256)
    operations = [
        op("cheap", "aten.neg.default", ["x"], x),
        op("refused", "aten.exp.default", ["cheap"], x),
        op("product", "aten.mul.Tensor", ["refused", "x"], x),
        op("end", "aten.relu.default", ["product"], x),
    ]

    def refuse(form: NodeForm) -> tuple[str, str] | None:
        return ("unread", "") if any(o.short_name == "exp" for o in form.operations) else None

    (node,) = FusionEngine(lowerable=refuse).fuse(graph(operations, {"x": x}, ["end"]))
    assert node.operations == operations[2:]


def test_nodes_have_copies_of_the_constants_they_read() -> None:
    x, number = tensor("s0", 256), tensor()
    mask = replace(x, dtype="bool")
    operations = [
        op("zero", "aten.scalar_tensor.default", [], number, 0.0),
        op("above", "aten.gt.Scalar", ["x"], mask, 0),
        op("kept", "aten.where.self", ["above", "x", "zero"], x),
        op("product", "aten.mm.default", ["kept", "w"], x),
        op("below", "aten.lt.Scalar", ["product"], mask, 0),
        op("rest", "aten.where.self", ["below", "product", "zero"], x),
    ]
    engine = FusionEngine(lowerable=why_not, check=True)
    nodes = engine.fuse(graph(operations, {"x": x, "w": tensor(256, 256)}, ["rest", "zero"]))
    assert [[o.name for o in node.operations] for node in nodes] == [
        ["zero", "above", "kept"],
        ["zero", "below", "rest"],
    ]
    assert [node.input_names for node in nodes] == [("x",), ("product",)]
    assert [[ref.name for ref in node.outputs] for node in nodes] == [
        ["kept"],
        ["rest"],
    ]  # the graph keeps its own zero


LOSSES = {
    "mse": torch.nn.functional.mse_loss,
    "huber": functools.partial(torch.nn.functional.huber_loss, delta=0.7),
    "smooth_l1": functools.partial(torch.nn.functional.smooth_l1_loss, beta=0.7),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_loss_joins_what_is_before_it(name: str, reduction: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](torch.tanh(x @ w), y, reduction=reduction) * 3

    sizes = {"s0": 33}
    inputs = [torch.randn(33, 16), torch.randn(16, 24, requires_grad=True), torch.randn(33, 24)]
    (node,) = plan(step, inputs, [(0, 0), (2, 0)])[1].nodes
    assert node.operation_names.endswith("loss_backward + tanh_backward")
    form = node.form
    values = [*sizes.values()][: len(form.symbols)]
    made = make_inputs(form, values, seed=1)
    found = GENERATOR.generate_generic_kernel(form)(*made)
    symbols = dict(zip(form.symbols, values, strict=True))
    assert not problems(found, run_unfused(form, made, symbols), run_unfused(to_float64(form), widen(made), symbols))
