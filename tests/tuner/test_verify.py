"""Verification passes what is as good as eager, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autofuse.codegen.inputs import make_inputs
from autofuse.ir.buckets import bucket_of, exact_bucket
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import Bucket, ObservedShape
from autofuse.ir.shape import SymbolicShape, symbol
from autofuse.tuner import verify
from autofuse.tuner.cases import CASE_BYTES, ESSENTIAL, CheckCase, call_bytes, first_cases, full_cases, strict_cases
from autofuse.tuner.comparison import compare, wins
from autofuse.tuner.timing import RaceRules, race
from autofuse.tuner.verify import GuardedAllocator, Inaccurate, Verifier, Wrong, judge
from autofuse.wrapper.node_call import make_unfused
from tests.cases import CASES
from tests.codegen.c.templates.test_attention import MASKS, attention, eager
from tests.tuner.nodes import chain_form, spec

FORM = chain_form(width=16)
NORMAL = CheckCase((33,), "normal")

Body = Callable[[Sequence[torch.Tensor], torch.Tensor], Any]


def check(body: Body, *cases: CheckCase, form: NodeForm = FORM, verifier: Verifier | None = None) -> float:
    """Verify a candidate that gets the inputs and an output of its own to fill."""

    def make_call(allocate: GuardedAllocator, values: Sequence[int]) -> Callable[..., torch.Tensor]:
        table = dict(zip(form.symbols, values, strict=True))
        target = form.spec(form.outputs[0])
        shape, strides = target.shape.bind(table), target.strides.bind(table)

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            out = allocate(shape, strides, getattr(torch, target.dtype))
            body(tensors, out)
            return out

        return call

    return (verifier or Verifier(form)).check(make_call, cases or (NORMAL,))


def chain(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    x, y = tensors
    for number in range(8):
        x = x * y if number % 2 == 0 else x + y
    return x


def test_eager_itself_passes_on_all_kinds_of_values() -> None:
    cases = [CheckCase((n,), kind, n % 2 == 0) for n in (1, 8, 33) for kind in ("normal", "large", "zeros", "special")]
    assert check(lambda t, out: out.copy_(chain(t)), *cases) <= 1.0


def test_results_that_lie_in_another_order_do_not_pass() -> None:
    def make_call(allocate: GuardedAllocator, values: Sequence[int]) -> Callable[..., torch.Tensor]:
        return lambda *tensors: chain(tensors).mT.contiguous().mT

    with pytest.raises(Wrong, match="strides"):
        Verifier(FORM).check(make_call, [NORMAL])
    assert Verifier(FORM).check(make_call, [CheckCase((1,), "normal")]) <= 1.0, "of one row there is one order"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda t, out: out.copy_(chain(t) * (1 + 1e-5)), "error"),
        (lambda t, out: out[:-1].copy_(chain(t)[:-1]), "NaN"),
        (lambda t, out: (out.copy_(chain(t)), t[1].zero_()), "changed input 1"),
        (lambda t, out: out.copy_(chain(t).nan_to_num()), "NaN"),
    ],
    ids=["inaccurate", "forgets a row", "changes an input", "hides NaN"],
)
def test_faults_are_caught(body: Body, says: str) -> None:
    with pytest.raises(Wrong, match=says):
        check(body, NORMAL, CheckCase((33,), "special"))


@pytest.mark.parametrize("at", [-1, 33 * 16], ids=["before", "behind"])
def test_writes_outside_of_an_output_are_caught(at: int) -> None:
    def body(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(chain(tensors))
        out.as_strided((1,), (1,), out.storage_offset() + at).fill_(1.0)

    with pytest.raises(Wrong, match="outside"):
        check(body)


def test_an_input_that_was_changed_does_not_spoil_the_next_candidate() -> None:
    verifier = Verifier(FORM)
    with pytest.raises(Wrong):
        check(lambda t, out: t[0].zero_(), verifier=verifier)
    assert check(lambda t, out: out.copy_(chain(t)), verifier=verifier) <= 1.0


# ---- luck and errors ------------------------------------------------------------------------------------

ATTENTION = attention(mask=MASKS["scores"], backward=True)
TINY, SMALL, LARGER = (1, 1, 2), (3, 7, 5), (2, 48, 48)


def check_attention(change: Callable[..., Any], sizes: tuple[int, int, int], is_wide: bool = False) -> float:
    """Verify eager's own gradients of an attention after a change, or those of float64, rounded."""

    def make_call(allocate: GuardedAllocator, values: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *tensors: change(*(t.double() if is_wide else t for t in tensors))

    return Verifier(ATTENTION).check(make_call, [CheckCase(sizes, "normal")])


def gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.float() for t in eager(ATTENTION, list(tensors)))


def other_order(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Any:
    """The same terms, as accurate by any account: each head's numbers the other way round."""
    g, q, k, v, out = (t.flip(3) for t in (g, q, k, v, rest[0]))
    found = gradients(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (g, q, k, v, out)), *rest[1:])
    return tuple(t.transpose(1, 2).flip(3).contiguous().transpose(1, 2) for t in found)


def test_another_order_of_the_same_sums_passes_whatever_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few terms, eager's error on one input is no measure: some draws are refused, the sum of draws is not."""
    refused = 0
    for seed in range(0, 6000, 100):
        monkeypatch.setattr(
            verify, "make_inputs", lambda form, values, n, *rest, seed=seed: make_inputs(form, values, seed + n, *rest)
        )
        for sizes in (TINY, SMALL):
            check_attention(other_order, sizes)
        monkeypatch.setattr(verify, "REFUSED", 1)
        try:
            check_attention(other_order, TINY)
        except Wrong as error:
            refused += 1
            assert "error" in str(error)
        monkeypatch.setattr(verify, "REFUSED", 8)
    assert refused >= 1, "by a single draw"


def rounded_scores(*tensors: torch.Tensor) -> Any:
    """Probabilities of scores that lost their last bits."""
    return gradients(tensors[0], *(t.bfloat16().to(t.dtype) for t in tensors[1:3]), *tensors[3:])


def without_last_key(*tensors: torch.Tensor) -> Any:
    mask = tensors[6].clone()
    mask[:, -1] = -torch.inf
    return gradients(*tensors[:6], mask)


def without_sums(*tensors: torch.Tensor) -> Any:
    return gradients(*tensors[:4], torch.zeros_like(tensors[4]), *tensors[5:])


def without_a_term(*tensors: torch.Tensor) -> Any:
    g = tensors[0].clone()
    g[..., -1] = 0.0
    return gradients(g, *tensors[1:])


def shifted_mask(*tensors: torch.Tensor) -> Any:
    return gradients(*tensors[:6], tensors[6].roll(1, 1))


@pytest.mark.parametrize("sizes", [TINY, SMALL, LARGER], ids=str)
@pytest.mark.parametrize(
    "change", [without_last_key, without_sums, without_a_term, shifted_mask, rounded_scores], ids=lambda f: f.__name__
)
def test_a_wrong_kernel_is_refused_at_every_size(change: Callable[..., Any], sizes: tuple[int, int, int]) -> None:
    with pytest.raises(Wrong, match="error"):
        check_attention(change, sizes)


def test_an_error_of_some_units_in_the_last_place_is_refused() -> None:
    """One factor for all elements, where eager's errors average out; the same results without it pass."""

    def off_by(units: int) -> Callable[..., Any]:
        return lambda *tensors: tuple(t * (1 + units * 2.0**-23) for t in gradients(*tensors))

    for units in (0, 1):
        check_attention(off_by(units), LARGER)
    for units in (-20, 20):
        with pytest.raises(Wrong, match="error"):
            check_attention(off_by(units), LARGER)
    for units in (-12, 12):
        with pytest.raises(Wrong, match="error"):
            check(lambda t, out, u=units: out.copy_(chain(t) * (1 + u * 2.0**-23)), CheckCase((999,), "normal"))


def test_further_draws_decide_only_where_an_error_is_near_the_bound() -> None:
    def draws(*times: float) -> Callable[[int], int]:
        def draw(number: int) -> int:
            asked.append(number)
            if times[number % len(times)] > 1:
                raise Inaccurate("error", times[number % len(times)])
            return number

        asked.clear()
        return draw

    asked: list[int] = []
    assert judge(draws(0.9)) == 0 and asked == [0]
    assert judge(draws(2.0, 0.9, 0.9)) == 14 and len(asked) == 15, "a third of the draws is refused"
    with pytest.raises(Inaccurate):
        judge(draws(2.0, 2.0, 0.9))
    assert len(asked) == 11
    with pytest.raises(Inaccurate):
        judge(draws(100.0, 0.9))
    assert asked == [0]
    with pytest.raises(Inaccurate):
        judge(draws(2.0, 0.9, 0.9, 100.0))
    assert asked == [0, 1, 2, 3]


def one_op(target: str, dtype: str, out_dtype: str) -> NodeForm:
    op = Operation("v0", target, (ValueRef("i0"), ValueRef("i1")), (), (spec("s0", dtype=out_dtype),))
    inputs = tuple(NodeInput(f"i{i}", spec("s0", dtype=dtype)) for i in range(2))
    return NodeForm(inputs, (op,), (ValueRef("v0"),), ("s0",))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "bool"])
def test_dtypes(dtype: str) -> None:
    target = "aten.logical_and.default" if dtype == "bool" else "aten.add.Tensor"
    form = one_op(target, dtype, dtype)
    compute = torch.logical_and if dtype == "bool" else torch.add
    case = CheckCase((50,), "normal")
    assert check(lambda t, out: out.copy_(compute(*t)), case, form=form) <= 1.0
    with pytest.raises(Wrong):
        check(lambda t, out: out.copy_(~compute(*t) if dtype == "bool" else compute(*t) * 1.5 + 1), case, form=form)


def test_a_candidate_in_higher_precision_passes() -> None:
    """bf16 rounds after each operation in eager; a fused kernel rounds once."""
    full = spec("s0", dtype="bfloat16")
    ops = tuple(
        Operation(f"v{i}", "aten.mul.Tensor", (ValueRef(f"v{i - 1}" if i else "i0"), ValueRef("i1")), (), (full,))
        for i in range(5)
    )
    form = NodeForm((NodeInput("i0", full), NodeInput("i1", full)), ops, (ValueRef("v4"),), ("s0",))
    ratio = check(lambda t, out: out.copy_(t[0].double() * t[1].double() ** 5), CheckCase((999,), "normal"), form=form)
    assert ratio < 1.0


def test_strided_outputs_are_compared_where_they_have_elements() -> None:
    transposed = TensorSpec(SymbolicShape(("s0", 4)), "float32", SymbolicShape((1, "s0")))
    op = Operation("v0", "aten.relu.default", (ValueRef("i0"),), (), (transposed,))
    form = NodeForm((NodeInput("i0", transposed),), (op,), (ValueRef("v0"),), ("s0",))
    assert check(lambda t, out: out.copy_(t[0].relu()), CheckCase((5,), "normal"), form=form) <= 1.0


# ---- cases ----------------------------------------------------------------------------------------------


def test_cases_lie_in_the_bucket_and_fit_in_memory() -> None:
    bucket, timed = Bucket(((513, 1024),)), (700,)
    shapes = [ObservedShape((700,), 9), ObservedShape((800,), 5), ObservedShape((4,), 99)]
    first, full = first_cases(FORM, bucket, timed), full_cases(FORM, bucket, shapes, timed)
    assert first == [CheckCase((513,), "normal"), CheckCase((700,), "normal")] and first[0] not in full
    assert all(bucket.contains(case.values) for case in full)
    assert {case.kind for case in full[:ESSENTIAL]} == {"normal", "large", "zeros", "special"}
    assert {CheckCase((v,), "normal") for v in (700, 800, 1021, 1024)} <= set(full)
    assert any(case.shifted for case in full)
    again = full_cases(FORM, bucket, shapes, timed, is_known=True)
    assert again == full[: len(again)] and len(again) == 3
    huge = Bucket(((1 << 20, 1 << 21),))
    assert {c.values for c in full_cases(chain_form(), huge, [], (1 << 21,))} == {(1 << 20,)}


def test_a_node_without_symbols_is_checked_on_all_kinds() -> None:
    static = CASES["softmax"].form()
    form = NodeForm(static.inputs, static.operations, static.outputs, static.symbols)
    values = tuple(4 for _ in form.symbols)
    kinds = {case.kind for case in full_cases(form, Bucket(tuple((v, v) for v in values)), [], values)}
    assert kinds == {"large", "zeros", "special"} and call_bytes(form, values) < CASE_BYTES


def spec_of(sizes: str, strides: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(SymbolicShape(sizes.split()), dtype, SymbolicShape(strides.split()))


def test_sizes_that_depend_on_each_other_are_checked_where_they_fit() -> None:
    """The form of a part of a graph does not say that s1 is the half of s0, or a stride the product of two sizes."""
    halves = NodeForm(
        (NodeInput("i0", spec_of("s0", "1")),),
        (
            Operation("v0", "aten.exp.default", (ValueRef("i0"),), (), (spec_of("s0", "1"),)),
            Operation("v1", "aten.view.default", (ValueRef("v0"), (symbol("s1"), 2)), (), (spec_of("s1 2", "2 1"),)),
            Operation("v2", "aten.neg.default", (ValueRef("v1"),), (), (spec_of("s1 2", "2 1"),)),
        ),
        (ValueRef("v2"),),
        ("s0", "s1"),
    )
    rows = NodeForm(
        (NodeInput("i0", spec_of("s0 s1 s2", "s3 s2 1")),),
        (Operation("v0", "aten.exp.default", (ValueRef("i0"),), (), (spec_of("s0 s1 s2", "s3 s2 1"),)),),
        (ValueRef("v0"),),
        ("s0", "s1", "s2", "s3"),
    )
    for form, timed, is_possible in (
        (halves, (40, 20), lambda s0, s1: s0 == 2 * s1),
        (rows, (400, 500, 2, 1000), lambda s0, s1, s2, s3: s3 == s1 * s2),
        (rows, (400, 500, 2, 1020), lambda s0, s1, s2, s3: True),  # rows with a gap
    ):
        bucket = bucket_of(timed)
        cases = [*first_cases(form, bucket, timed), *strict_cases(form, bucket, (), timed)]
        found = {case.values for case in cases}
        assert timed in found and len(found) > 3
        assert all(is_possible(*values) and bucket.contains(values) for values in found)
    assert {case.values for case in full_cases(halves, exact_bucket((40, 20)), (), (40, 20))} == {(40, 20)}


def test_a_case_that_cannot_be_is_passed_over() -> None:
    """Of windows the form says how many there are by a symbol: it is a rounded quotient."""
    form = NodeForm(
        (NodeInput("i0", spec_of("s0", "1")),),
        (
            Operation("v0", "aten.unfold.default", (ValueRef("i0"), 0, 2, 2), (), (spec_of("s1 2", "2 1"),)),
            Operation("v1", "aten.exp.default", (ValueRef("v0"),), (), (spec_of("s1 2", "2 1"),)),
        ),
        (ValueRef("v1"),),
        ("s0", "s1"),
    )

    for values in ((3, 2), (9, 2)):
        with pytest.raises(verify.Impossible, match="expected results of"):
            check(lambda t, out: out.copy_(t[0].unfold(0, 2, 2).exp()), CheckCase(values, "normal"), form=form)
    both = CheckCase((3, 2), "normal"), CheckCase((8, 4), "normal")
    assert check(lambda t, out: out.copy_(t[0].unfold(0, 2, 2).exp()), *both, form=form) <= 1.0
    with pytest.raises(Wrong):
        check(lambda t, out: out.zero_(), *both, form=form)


def test_sizes_for_which_a_split_has_fewer_parts_are_passed_over() -> None:
    parts = (spec_of("2", "1"), spec_of("2", "1"), spec_of("s0-4", "1"))
    form = NodeForm(
        (NodeInput("i0", spec_of("s0", "1")),),
        (
            Operation("v0", "aten.split.Tensor", (ValueRef("i0"), 2), (), parts),
            Operation("v1", "aten.exp.default", (ValueRef("v0", 2),), (), (spec_of("s0-4", "1"),)),
        ),
        (ValueRef("v1"),),
        ("s0",),
    )
    with pytest.raises(verify.Impossible, match="fewer results"):
        check(lambda t, out: out.copy_(t[0][4:].exp()), CheckCase((4,), "normal"), form=form)
    assert check(lambda t, out: out.copy_(t[0][4:].exp()), CheckCase((5,), "normal"), form=form) <= 1.0
    rest = NodeForm(
        (NodeInput("i0", spec_of("s0-4", "1")),),
        (Operation("v0", "aten.exp.default", (ValueRef("i0"),), (), (spec_of("s0-4", "1"),)),),
        (ValueRef("v0"),),
        ("s0",),
    )
    with pytest.raises(verify.Impossible, match="0 and more"):
        check(lambda t, out: out.copy_(t[0].exp()), CheckCase((3,), "normal"), form=rest)


def test_random_values_that_eager_refuses_as_indices_are_passed_over() -> None:
    """Indices that a node computes itself may lie anywhere."""
    form = NodeForm(
        (NodeInput("i0", spec_of("3", "1", "int64")), NodeInput("i1", spec_of("2", "1"))),
        (
            Operation("v0", "aten.mul.Tensor", (ValueRef("i0"), ValueRef("i0")), (), (spec_of("3", "1", "int64"),)),
            Operation("v1", "aten.index_select.default", (ValueRef("i1"), 0, ValueRef("v0")), (), (spec_of("3", "1"),)),
        ),
        (ValueRef("v1"),),
        (),
    )
    with pytest.raises(verify.Impossible, match="out of "):
        check(lambda t, out: out.copy_(t[1][t[0] * t[0]]), CheckCase((), "normal"), form=form)


# ---- A against A ----------------------------------------------------------------------------------------


def test_eager_against_itself_does_not_switch() -> None:
    """Real calls on whatever machine this is; the rate itself is tested on simulated noise (test_timing)."""
    form = chain_form(width=64)
    inputs = [torch.randn(64, 64), torch.randn(64, 64)]
    calls = [make_unfused(form, (64,)) for _ in range(2)]
    switched = 0
    for _ in range(20):
        result = race([lambda c=c: c(*inputs) for c in calls], RaceRules(10, 40, 1.0, 0.03))  # type: ignore[misc]
        switched += wins(compare(*result.samples), 0.03)
    assert switched <= 1


def test_another_number_of_outputs_is_wrong() -> None:
    def make_call(allocate: GuardedAllocator, values: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *tensors: (chain(tensors), chain(tensors))

    with pytest.raises(Wrong, match="2 outputs, eager has 1"):
        Verifier(FORM).check(make_call, (NORMAL,))
