"""Dropout drawn in kernels, from capture to launch: what is asked of a device first, and what each call does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.random_ops import philox_dropout, regenerate_dropout
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.philox import DROPOUT, RandomState, eager_threads, offset_advance, random_state
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import RANDOM
from autofuse.errors import LoweringError, ShapeError
from autofuse.fusion import FusionEngine
from autofuse.gpu import philox
from autofuse.gpu.launch_record import make_record
from autofuse.gpu.launcher import CtypesLaunch, compile_launcher, install
from autofuse.gpu.modules import load_artifact
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape
from autofuse.pipeline import route_graph
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.wrapper import node_call
from autofuse.wrapper.graph_call_builder import build_program
from tests.codegen.test_philox import eager_uniforms
from tests.gpu.fake_driver import artifact_of, cpu_calls, fake_driver
from tests.runtime.graphs.test_gpu_graphs import GPU, session_with, traced  # noqa: F401


class FakeGenerator:
    """The part of a CUDA generator that is used here."""

    def __init__(self, seed: int = 11, offset: int = 40) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0


# ---- the numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vec", [1, 2, 4, 8])
def test_the_same_numbers_as_eagers_loops(vec: int) -> None:
    state = RandomState(2**63 + 5, 2**34 + 8, 256, vec, 1 if vec == 1 else max(vec, 4))
    numel = 256 * vec * 2 + 3 * vec
    found = philox.uniforms(torch.arange(numel), state)
    assert np.array_equal(found.numpy(), eager_uniforms(numel, state))


def test_a_sample_has_both_ends() -> None:
    assert torch.equal(philox.sampled_places(5), torch.arange(5))
    places = philox.sampled_places(10_000_019)
    assert len(places) < 6000 and int(places.min()) == 0 and int(places.max()) == 10_000_018


# ---- the proof --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "mask", "offset"])
def test_a_device_is_believed_only_bit_by_bit(monkeypatch: pytest.MonkeyPatch, wrong: str | None) -> None:
    generator = FakeGenerator()
    monkeypatch.setattr(philox, "capacity", lambda index: (2, 512))

    def native_dropout(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        threads = eager_threads(x.numel(), 2, 512)
        aligned = math.gcd(philox.ALIGNED, x.data_ptr())
        state = random_state(x.numel(), x.itemsize, threads, generator.seed, generator.offset, aligned)
        mask = philox.uniforms(torch.arange(x.numel()), state) < 1 - p
        generator.offset += offset_advance(x.numel(), threads) + (4 if wrong == "offset" else 0)
        if wrong == "mask":
            mask[-1] ^= True
        return x * mask, mask

    monkeypatch.setattr(torch, "native_dropout", native_dropout)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in philox.proof_sizes(2, 512):
            for shift, offset in ((0, 0), (1, 2**34 + 8)):
                found = philox.is_as_expected(generator, torch.device("cpu"), dtype, numel, shift, offset)
                assert found is (wrong is None), (dtype, numel, shift)


def test_other_devices_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert philox.draws_as_expected(torch.device("cpu"), torch.float32) is False
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert philox.draws_as_expected(GPU, torch.float32) is False


# ---- capture and planning ---------------------------------------------------------------------------------


def block(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout((x + y).relu(), 0.1, True)[0] * 2 + y


def planned(function: Any, proven: bool) -> Any:
    module = traced(function, GPU, GPU)
    count = regenerate_dropout(module, lambda device, dtype: proven)
    imported = import_graph(module)
    graph = imported.for_fusion()

    def lowerable(form: NodeForm) -> tuple[str, str] | None:
        try:
            lower(form)
        except LoweringError as error:
            return error.code, str(error)
        return None

    return count, build_program(imported, FusionEngine(lowerable=lowerable).fuse(graph))


def test_a_proven_dropout_fuses_with_its_neighbours() -> None:
    count, program = planned(block, True)
    assert count == 1
    assert [s.node.operation_names for s in program.slots] == ["add + relu + philox_dropout + mul + add"]
    count, program = planned(block, False)
    assert count == 0 and "philox" not in " ".join(s.node.operation_names for s in program.slots)


def test_one_draw_a_node_and_draws_keep_their_order() -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.native_dropout(x + y, 0.1, True)[0].relu()
        b = torch.bernoulli(y)
        c = torch.native_dropout(a * y, 0.2, True)[0] + b
        return a, c

    count, program = planned(several, True)
    draws = [sum(op.target == DROPOUT for op in s.node.operations) for s in program.slots]
    assert count == 2 and sum(draws) == 2 and max(draws) == 1
    calls = [line.split(" = ")[1] for line in program.source.split("def timed_call")[0].splitlines() if " = " in line]
    drawing = [f"af_n{n}(" for n, count in enumerate(draws) if count] + ["op_aten_bernoulli_default("]
    order = [call[: call.index("(") + 1] for call in calls if call.startswith(tuple(drawing))]
    assert order == [drawing[0], "op_aten_bernoulli_default(", drawing[1]]


def test_draws_whose_order_nodes_cannot_keep_stay_with_eager(session_with: Any) -> None:  # noqa: F811
    def crossed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x.relu(), 0.1, True)[0] + torch.native_dropout(y.relu(), 0.2, True)[0]

    session = session_with()
    session.draws.draws_as_eager = lambda device, dtype: True
    router = route_graph(traced(crossed, GPU, GPU), "inference", session)
    assert isinstance(router, GraphRouter) and session.context.said["graph_not_planned"] == 0
    drawn = [op.target for s in router.program.slots for op in s.node.operations if op.target == DROPOUT]
    assert (len(drawn) == 2) != ("native_dropout" in router.program.source)


def test_unfused_it_is_eagers_own_dropout() -> None:
    form = dropout_form("cpu")
    x = torch.randn(3, 16)
    torch.manual_seed(3)
    expected = torch.native_dropout(x + 1, 0.25, True)
    torch.manual_seed(3)
    found = node_call.make_unfused(form, (3,))(x)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert philox_dropout(x, 0.25, False)[1].all()


# ---- launching --------------------------------------------------------------------------------------------


def dropout_form(device: str = "cuda") -> NodeForm:
    """dropout(i0 + 1) on (s0, 16): result and mask."""
    spec = TensorSpec(SymbolicShape(["s0", 16]), "float32", SymbolicShape([16, 1]), device)
    mask = TensorSpec(spec.shape, "bool", spec.strides, device)
    operations = (
        Operation("v0", "aten.add.Scalar", (ValueRef("i0"), 1), (), (spec,)),
        Operation("v1", DROPOUT, (ValueRef("v0"), 0.25, True), (), (spec, mask)),
    )
    return NodeForm((NodeInput("i0", spec),), operations, (ValueRef("v1"), ValueRef("v1", 1)), ("s0",))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(philox, "capacity", lambda index: (132, 2048))
    found = fake_driver()
    found.forget()
    return found


def launcher_of(driver: Any, values: tuple[int, ...], in_c: bool = True) -> Any:
    from autofuse.codegen.c.build import find_toolchain

    form = dropout_form()
    kernel = lower(form)
    table = dict(zip(form.symbols, values, strict=True))
    source = print_triton(kernel, default_config(triton_knobs(kernel, table, table)))
    loaded = load_artifact(artifact_of(source), 0, driver=driver.driver)
    record = make_record(loaded, table, 3)
    entry = install(compile_launcher(find_toolchain()).binary) if in_c else CtypesLaunch(record)
    call = node_call.make_device_launcher(form, loaded, values, calls=cpu_calls([0]), launch=entry)
    return source, call


def test_each_call_takes_the_generators_state_and_moves_it_as_eager_does(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator(seed=2**63 + 7, offset=40)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    source, call = launcher_of(driver, (100,))
    fields = [RANDOM[a.index] for a in source.passes[0].arguments if a.kind == "random"]
    at = [n for n, a in enumerate(source.passes[0].arguments) if a.kind == "random"]
    assert set(fields) == set(RANDOM)
    x = torch.randn(100, 16)
    for number in range(2):
        call(x)
        params = driver.launches[number].params
        seen = dict(zip(fields, (params[k] for k in at), strict=True))
        threads = eager_threads(1600, 132, 2048)
        assert seen["seed"] == 2**63 + 7 and seen["offset"] == 40 + 4 * number
        assert (seen["threads"], seen["vec"], seen["draws"]) == (threads, 4, 4)
    assert generator.offset == 48


def test_a_launch_that_fails_has_drawn_nothing(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = FakeGenerator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    _, call = launcher_of(driver, (100,))
    driver.fail_with(700)
    with pytest.raises(RuntimeError):
        call(torch.randn(100, 16))
    assert generator.offset == 40


def test_recordings_and_launches_through_ctypes_stay_with_eager(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (FakeGenerator(),))
    with pytest.raises(ShapeError, match="launcher in C"):
        launcher_of(driver, (100,), in_c=False)
    _, call = launcher_of(driver, (100,))
    monkeypatch.setattr(node_call, "is_capturing", lambda: True)
    out, mask = call(torch.ones(100, 16))  # eager's own, which on a CPU tensor is the CPU's
    assert driver.launches == [] and mask.dtype is torch.bool and 0 < int(mask.sum()) < mask.numel()
    assert torch.equal(out != 0, mask)


# ---- verification -----------------------------------------------------------------------------------------


def test_the_exact_answer_has_eagers_mask() -> None:
    form = dropout_form("cpu")
    (x,) = make_inputs(form, (9,))
    masks: list[torch.Tensor] = []
    _, mask = run_unfused(form, [x], (9,), masks)
    exact, same = run_unfused(to_float64(form), widen([x]), (9,), masks)
    assert torch.equal(mask, same) and exact.dtype is torch.float64
    assert torch.allclose(exact, (x.double() + 1) * mask / 0.75)
