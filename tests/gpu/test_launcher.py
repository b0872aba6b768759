"""Launching on a GPU up to the driver, which is a fake in C: packing, alternatives by alignment, contexts, errors."""

import threading
from dataclasses import replace

import pytest
import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import (
    Argument,
    Assumptions,
    Pass,
    Scratch,
    TritonSource,
    natural_assumptions,
    resolve,
)
from autofuse.errors import DeviceError, ShapeError
from autofuse.gpu import capturing, launcher
from autofuse.gpu.driver import CUDA, Driver
from autofuse.gpu.launch_record import make_record
from autofuse.gpu.modules import load_artifact, unload
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape, symbol
from autofuse.wrapper.node_call import make_device_launcher
from tests.gpu.fake_driver import artifact_of, cpu_calls, fake_driver

S0 = symbol("s0")


@pytest.fixture(params=["c", "ctypes"])
def launch_with(request):
    """A function that makes the launcher of a record: the one in C, and the one through ctypes."""
    entry = launcher.load_kernel(launcher.compile_launcher(find_toolchain()).binary, "af_launch").entry
    return (lambda record: entry) if request.param == "c" else launcher.CtypesLaunch


@pytest.fixture
def driver():
    fake = fake_driver()
    fake.forget()
    return fake


def add(dtype="float32"):
    """i0 + i1 on (s0, 16), on a GPU."""
    spec = TensorSpec(SymbolicShape(["s0", 16]), dtype, SymbolicShape([16, 1]), "cuda")
    operations = (Operation("v0", "aten.add.Tensor", (ValueRef("i0"), ValueRef("i1")), (), (spec,)),)
    return NodeForm((NodeInput("i0", spec), NodeInput("i1", spec)), operations, (ValueRef("v0"),), ("s0",))


def add_source(name="af_add", symbol_type="i32"):
    arguments = (
        Argument("i0", "param", "*fp32", 0),
        Argument("i1", "param", "*fp32", 1),
        Argument("o0", "param", "*fp32", 2),
        Argument("s0", "symbol", symbol_type),
    )
    item = Pass(name, arguments, (("BLOCK", 256),), ((16 * S0, 256),))
    return TritonSource(name, "", (item,), (), ("s0",), 4, 1, limits=((16 * S0, 2**31 - 1),))


def two_pass_source():
    first = (
        Argument("i0", "param", "*fp32", 0),
        Argument("i1", "param", "*fp32", 1),
        Argument("w0", "scratch", "*fp32", 0),
        Argument("programs", "programs", "i32"),
        Argument("s0", "symbol", "i64"),
    )
    second = (
        Argument("w0", "scratch", "*fp32", 0),
        Argument("o0", "param", "*fp32", 2),
        Argument("programs", "programs", "i32"),
    )
    passes = (
        Pass("af_first", first, (), ((S0, 1),), shared=1),
        Pass("af_second", second, (), ((16, 16),)),
    )
    return TritonSource("af_two", "", passes, (Scratch("float32", 16),), ("s0",), 4, 1, programs=8)


def launcher_of(form, loaded, values, launch_with, current=None, failed=None):
    calls = cpu_calls(current if current is not None else [0])
    record = make_record(loaded, dict(zip(form.symbols, values, strict=True)), len(form.inputs) + len(form.outputs))
    return make_device_launcher(form, loaded, values, failed=failed, calls=calls, launch=launch_with(record))


def test_parameters_grid_and_hidden_pointers(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source()), 0, driver=driver.driver)
    call = launcher_of(add(), loaded, (100,), launch_with)
    a, b = torch.zeros(100, 16), torch.zeros(100, 16)
    out = call(a, b)
    (seen,) = driver.launches
    assert seen.grid == (7, 1, 1) and seen.block == (128, 1, 1) and seen.stream == 0x5000 and seen.shared == 0
    assert seen.params == (a.data_ptr(), b.data_ptr(), out.data_ptr(), 100, 0, 0)
    assert seen.function == "af_add_aligned__6"
    assert out.shape == (100, 16) and out.stride() == (16, 1) and out.dtype is torch.float32


def test_unaligned_pointers_take_the_other_image(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source()), 0, driver=driver.driver)
    call = launcher_of(add(), loaded, (3,), launch_with)
    a, b = torch.zeros(3, 16), torch.zeros(50)[1:49].view(3, 16)
    for inputs in ((a, a), (a, b), (b, a), (a, a)):
        call(*inputs)
    words = [launch.function.split("_")[2] for launch in driver.launches]
    assert words == ["aligned", "any", "any", "aligned"]
    assert [launch.block[0] for launch in driver.launches] == [128, 64, 64, 128]


def test_images_for_divisible_sizes_are_chosen_once_for_a_plan(driver, launch_with):
    assumptions = (Assumptions(True, ("s0",)), Assumptions(True), Assumptions(False, ("s0",)), Assumptions())
    loaded = load_artifact(artifact_of(add_source(), assumptions=assumptions), 0, driver=driver.driver)
    for size in (32, 33):
        launcher_of(add(), loaded, (size,), launch_with)(torch.zeros(size, 16), torch.zeros(size, 16))
    assert [launch.function for launch in driver.launches] == ["af_add_aligned_s0__6", "af_add_aligned__6"]


def test_without_an_image_for_any_pointer_an_unaligned_call_is_answered_by_the_fallback(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source(), assumptions=(Assumptions(True),)), 0, driver=driver.driver)
    errors = []

    def failed(error, a, b):
        errors.append(str(error))
        return a + b

    call = launcher_of(add(), loaded, (3,), launch_with, failed=failed)
    odd = torch.ones(50)[1:49].view(3, 16)
    assert torch.equal(call(odd, odd), odd + odd) and not driver.launches
    assert "multiples of 16" in errors[0]


def test_two_passes_share_scratch_and_are_one_call(driver, launch_with):
    loaded = load_artifact(artifact_of(two_pass_source()), 0, driver=driver.driver)
    call = launcher_of(add(), loaded, (100,), launch_with)
    a, b = torch.zeros(100, 16), torch.zeros(100, 16)
    out = call(a, b)
    first, second = driver.launches
    assert first.grid == (8, 1, 1) and second.grid == (1, 1, 1)
    scratch = first.params[2]
    assert scratch not in (a.data_ptr(), b.data_ptr(), out.data_ptr(), 0)
    assert first.params == (a.data_ptr(), b.data_ptr(), scratch, 8, 100, 0, 0)
    assert second.params == (scratch, out.data_ptr(), 8, 0, 0)


def test_a_size_beyond_32_bits_goes_as_64(driver, launch_with):
    loaded = load_artifact(artifact_of(two_pass_source()), 0, driver=driver.driver)
    record = make_record(loaded, {"s0": 2**33 + 5}, 3)
    launch_with(record)(record.address, 0x5000, 16, 32, 48, 64)
    assert driver.launches[0].params[4] == 2**33 + 5
    wide = load_artifact(artifact_of(add_source()), 0, driver=driver.driver)
    with pytest.raises(ShapeError, match="at most 2147483647"):
        make_record(wide, {"s0": 2**28}, 3)


@pytest.mark.parametrize("vendor, name", [("cuda", "CUDA_ERROR_INVALID_VALUE"), ("hip", "hipErrorInvalidValue")])
def test_errors_have_the_drivers_name(vendor, name, launch_with):
    fake = fake_driver(vendor)
    fake.forget()
    target = {"cuda": "cuda:90", "hip": "hip:gfx942"}[vendor]
    loaded = load_artifact(artifact_of(add_source(), target), 0, driver=fake.driver)
    call = launcher_of(add(), loaded, (4,), launch_with)
    x = torch.zeros(4, 16)
    call(x, x)
    assert len(fake.launches) == 1
    fake.fail_with(1)
    with pytest.raises(RuntimeError, match=name):
        call(x, x)
    fake.forget()
    record = make_record(loaded, {"s0": 4}, 3)
    with pytest.raises(TypeError, match="3 pointers, found 2"):
        launch_with(record)(record.address, 0, 16, 32)
    assert not fake.launches


def test_shared_memory_above_48_kb_is_asked_for(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source(), shared=100_000), 0, driver=driver.driver)
    launcher_of(add(), loaded, (4,), launch_with)(torch.zeros(4, 16), torch.zeros(4, 16))
    assert driver.launches[0].shared == 100_000


def test_a_thread_without_a_context_gets_the_devices(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source()), 3, driver=driver.driver)
    call = launcher_of(add(), loaded, (4,), launch_with, current=[3])
    found = []

    def run():
        call(torch.zeros(4, 16), torch.zeros(4, 16))
        found.append(driver.library.fake_context())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0x10003] and len(driver.launches) == 1 and driver.launches[0].stream == 0x5003


def test_the_device_of_the_node_is_made_current_and_given_back(driver, launch_with):
    loaded = load_artifact(artifact_of(add_source()), 1, driver=driver.driver)
    current = [0]
    call = launcher_of(add(), loaded, (4,), launch_with, current=current)
    call(torch.zeros(4, 16), torch.zeros(4, 16))
    assert driver.launches[0].stream == 0x5001 and current == [0]


def test_loading_happens_once_for_each_device_and_keeps_the_threads_context(driver):
    artifact = artifact_of(add_source("af_once"))
    driver.library.fake_drop_context()
    before = driver.number("modules")
    first = load_artifact(artifact, 0, driver=driver.driver)
    assert driver.number("modules") == before + 2 and driver.library.fake_context() == 0
    assert load_artifact(artifact, 0, driver=driver.driver) is first
    other = load_artifact(artifact, 1, driver=driver.driver)
    assert other is not first and other.context != first.context and driver.number("modules") == before + 4
    function = first.functions[0, Assumptions(True)]
    assert (function.registers, function.local_bytes, function.threads) == (32, 16, 128)
    unload(other)
    assert driver.number("unloaded") >= 2 and load_artifact(artifact, 1, driver=driver.driver) is not other


def test_refused_images_foreign_artifacts_and_recordings(driver, monkeypatch):
    with pytest.raises(DeviceError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        load_artifact(artifact_of(add_source("af_bad"), image=b"bad"), 0, driver=driver.driver)
    with pytest.raises(DeviceError, match="hip:gfx942"):
        load_artifact(artifact_of(add_source(), "hip:gfx942"), 0, driver=driver.driver)
    monkeypatch.setattr(capturing, "is_capturing", lambda: True)
    before = driver.number("modules")
    with pytest.raises(DeviceError, match="recordings"):
        load_artifact(artifact_of(add_source("af_recorded")), 0, driver=driver.driver)
    assert driver.number("modules") == before
    monkeypatch.setattr(capturing, "is_capturing", lambda: False)
    assert load_artifact(artifact_of(add_source("af_recorded")), 0, driver=driver.driver).functions


def test_empty_outputs_need_no_launch(driver):
    loaded = load_artifact(artifact_of(add_source()), 0, driver=driver.driver)
    out = make_device_launcher(add(), loaded, (0,), calls=cpu_calls([0]))(torch.zeros(0, 16), torch.zeros(0, 16))
    assert out.shape == (0, 16) and not driver.launches


def test_what_the_printer_makes_is_launched_as_it_says(driver, launch_with):
    """A sum over rows: two passes with scratch between them."""
    row = TensorSpec(SymbolicShape([16]), "float32", SymbolicShape([1]), "cuda")
    summed = Operation("v1", "aten.sum.dim_IntList", (ValueRef("v0"), (0,)), (), (row,))
    form = NodeForm(add().inputs, (*add().operations, summed), (ValueRef("v1"),), ("s0",))
    kernel = lower(form)
    values = {"s0": 4096}
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    made = artifact_of(source, assumptions=(natural_assumptions(source.symbols, values), Assumptions()))
    loaded = load_artifact(Artifact.unpack(made.pack()), 0, driver=driver.driver)
    call = launcher_of(form, loaded, (4096,), launch_with)
    a, b = torch.zeros(4096, 16), torch.zeros(4096, 16)
    out = call(a, b)
    resolved = resolve(source, values)
    assert len(driver.launches) == len(source.passes) == len(resolved.launches)
    for seen, item, planned in zip(driver.launches, source.passes, resolved.launches, strict=True):
        assert seen.grid == (planned.grid, 1, 1) and seen.block == (128, 1, 1)
        assert seen.params[-2:] == (0, 0)
        tensors = {0: a.data_ptr(), 1: b.data_ptr(), 2: out.data_ptr()}
        for argument, word in zip(item.arguments, seen.params, strict=False):
            if argument.kind == "param":
                assert word == tensors[argument.index]
        scalars = [w for a, w in zip(item.arguments, seen.params, strict=False) if a.kind in ("symbol", "programs")]
        assert tuple(scalars) == planned.scalars
    assert out.shape == (16,)


def test_copies_of_several_sizes_are_one_launch(driver, launch_with):
    """One kernel for the sizes of all calls: the grid is each call's own, and an empty copy has no part in it."""
    narrow = [TensorSpec(SymbolicShape(dims), "float16", SymbolicShape([1]), "cuda") for dims in (["s0"], ["s1"])]
    wide = [replace(spec, dtype="float32") for spec in narrow]
    casts = [
        Operation(f"v{k}", "aten._to_copy.default", (ValueRef(f"i{k}"),), (("dtype", "float16"),), (narrow[k],))
        for k in (0, 1)
    ]
    inputs = tuple(NodeInput(f"i{k}", wide[k]) for k in (0, 1))
    form = NodeForm(inputs, tuple(casts), (ValueRef("v0"), ValueRef("v1")), ("s0", "s1"))
    kernel, values = lower(form), {"s0": 5000, "s1": 70}
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    loaded = load_artifact(Artifact.unpack(artifact_of(source).pack()), 0, driver=driver.driver)
    for sizes, grid in (((5000, 70), 6), ((1, 100_000), 783), ((0, 129), 2), ((2048, 0), 2)):
        a, b = (torch.zeros(n) for n in sizes)
        found = launcher_of(form, loaded, sizes, launch_with)(a, b)
        (seen,) = driver.launches
        driver.forget()
        assert seen.grid == (grid, 1, 1)
        assert seen.params == (a.data_ptr(), b.data_ptr(), *(t.data_ptr() for t in found), *sizes, 0, 0)
    launcher_of(form, loaded, (0, 0), launch_with)(torch.zeros(0), torch.zeros(0))
    assert not driver.launches


def test_a_missing_driver_is_named():
    with pytest.raises(DeviceError, match=r"libnothing\.so"):
        Driver.open(CUDA, "libnothing.so")
