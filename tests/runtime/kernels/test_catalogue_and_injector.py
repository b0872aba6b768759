"""Decisions in memory: narrowest bucket, latest, right thread count; shape checks and dispatch by the seeds' names."""

import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autofuse
from autofuse.codegen.c.build import is_for_this_cpu, target_text
from autofuse.db import seals
from autofuse.db.store import Store
from autofuse.errors import ShapeError
from autofuse.fusion import FusionNode
from autofuse.gpu import capturing
from autofuse.ir.buckets import bucket_of, exact_bucket
from autofuse.ir.device import cpu_device
from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.records import Candidate, CompileKey, Decision, DecisionKey, KernelRecord
from autofuse.ir.shape import SymbolicShape
from autofuse.runtime.graphs.choice import Choice
from autofuse.runtime.graphs.injector import RuntimeShapeInjector
from autofuse.runtime.kernels.catalogue import Catalogue, DecisionTable, KernelShelf, choose
from autofuse.runtime.kernels.device_backends import CPU, Backends, Place
from autofuse.settings.groups import RunSettings
from tests.runtime.graphs.test_routed_graphs import Undecided, routed


def place(threads=2, device=CPU, key="cpu"):
    return Place(device, key, threads)


def decision(bucket, variant="c_generic", kernel="k", threads=2, node="n", device="cpu"):
    key = DecisionKey(node, bucket.label, device, threads, "v")
    return Decision(key, bucket, Candidate(variant), kernel, 2.0, 1.0, 2.0, 1.9, 2.1, "won")


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(0, 5000))
def test_the_narrowest_bucket_wins_and_buckets_do_not_leak(seen, value):
    table = DecisionTable()
    table.update(decision(bucket_of([v]), kernel=f"range{bucket_of([v]).label}") for v in seen)
    table.update(decision(exact_bucket([v]), kernel=f"exact{v}") for v in seen)
    found = table.find("n", [value], place())
    if value in seen:
        assert found.compile_key == f"exact{value}"
    elif bucket_of([value]) in [bucket_of([v]) for v in seen]:
        assert found.compile_key == f"range{bucket_of([value]).label}"
    else:
        assert found is None
    assert table.find("n", [value], place(1)) is None and table.find("other", [value], place()) is None


def test_the_latest_decision_of_a_bucket_stands():
    table = DecisionTable()
    table.update([decision(bucket_of([7]), kernel="old"), decision(bucket_of([8]), kernel="new")])
    assert table.find("n", [6], place()).compile_key == "new" and len(table) == 1


def test_choices_wait_for_their_kernel_and_survive_a_bad_one():
    loaded = []

    def load(record, device):
        loaded.append(record.name)
        if record.name == "bad":
            raise OSError("not a shared object")
        return lambda *args: None

    table, shelf = DecisionTable(), KernelShelf(load)
    table.update([decision(bucket_of([7]), kernel="k1"), decision(bucket_of([70]), kernel="k2")])
    assert not choose(table, shelf, "n", [7], place()).known
    record = KernelRecord(CompileKey("s", "c", "f", "t"), "good", "", b"")
    shelf.add("k1", record)
    first = choose(table, shelf, "n", [7], place())
    assert first.entry is not None and first.tag == "k1"
    assert choose(table, shelf, "n", [8], place()).entry is first.entry and loaded == ["good"]
    shelf.add("k2", KernelRecord(CompileKey("s", "c", "f", "t"), "bad", "", b""))
    with pytest.raises(OSError):
        choose(table, shelf, "n", [70], place())
    assert choose(table, shelf, "n", [70], place()).entry is None  # once is enough
    table.update([decision(bucket_of([7]), variant="eager", kernel=None)])
    assert choose(table, shelf, "n", [7], place()).known and choose(table, shelf, "n", [7], place()).entry is None


def test_a_kernel_that_the_store_has_not_counts_as_not_tuned():
    table, shelf = DecisionTable(), KernelShelf(lambda record, device: lambda *args: None)
    table.update([decision(bucket_of([7]), kernel="k1")])
    shelf.add("k1", None)
    assert not choose(table, shelf, "n", [7], place()).known, "else it would never be asked for again"
    shelf.add("k1", KernelRecord(CompileKey("s", "c", "f", "t"), "good", "", b""))
    assert choose(table, shelf, "n", [7], place()).entry is not None


def test_two_devices_share_decisions_by_model_and_load_by_index():
    loaded = []

    def load(record, device):
        loaded.append((record.name, device.index))
        return lambda *args: None

    table, shelf = DecisionTable(), KernelShelf(load)
    bucket = bucket_of([7])
    table.update(decision(bucket, kernel=k, threads=0, device=k) for k in ("cuda:H200:132", "cuda:L4:58"))
    table.update([decision(bucket, kernel="c")])
    for digest in ("cuda:H200:132", "cuda:L4:58", "c"):
        shelf.add(digest, KernelRecord(CompileKey("s", "c", "f", "t"), digest, "", b""))
    devices = [
        place(0, torch.device("cuda", i), k) for i, k in enumerate(["cuda:H200:132", "cuda:L4:58", "cuda:L4:58"])
    ]
    found = [choose(table, shelf, "n", [7], p) for p in [*devices, *devices, place()]]
    assert [c.tag for c in found] == ["cuda:H200:132", "cuda:L4:58", "cuda:L4:58"] * 2 + ["c"]
    assert loaded == [("cuda:H200:132", 0), ("cuda:L4:58", 1), ("cuda:L4:58", 2), ("c", None)]
    assert found[0].entry is found[3].entry and found[1].entry is not found[2].entry
    assert not choose(table, shelf, "n", [7], place(0, torch.device("cuda", 3), "cuda:A100:108")).known


@pytest.mark.parametrize("target", ["avx512-ffffff:1234", "any", "", ":", "ours:1234"])
def test_a_kernel_for_another_processor_is_not_loaded(target):
    """Nor one that does not say for which."""
    backends, is_ours = Backends("no-such-cc", cpu_device()), target == "ours:1234"
    target = f"{platform.machine()}:{target.replace('ours', cpu_device().isa)}"
    with pytest.raises(Exception) as found:
        backends.load(KernelRecord(CompileKey("s", "c", "f", target), "bad", "", b"no binary"), CPU)
    assert ("expected a kernel for" in str(found.value)) == (not is_ours)


def test_any_macro_of_the_compiler_makes_another_target():
    """Those for which no flag of the processor stands, too."""
    macros = ["#define __AVX2__ 1", "#define __x86_64__ 1", "#define __GFNI__ 1", "#define __tune_znver3__ 1"]
    found = {target_text("\n".join(macros[:n] + macros[n + 1 :])) for n in range(len(macros))}
    assert len(found) == len(macros) and target_text("\n".join(macros)) not in found
    assert target_text("\n".join(reversed(macros))) == target_text("\n".join(macros))
    assert all(is_for_this_cpu(text) for text in found), "what a compiler adds of its own is no other processor"


def test_kernels_that_are_not_this_users_are_left_out_in_one_line(tmp_path, monkeypatch):
    """As those of a store that was copied here."""
    said = []
    key = CompileKey("source", "gcc", "-O3", f"{platform.machine()}:{cpu_device().isa}:1234")
    device, bucket = cpu_device().key, bucket_of([7])
    with Store.open(tmp_path / "s.sqlite3") as store:
        with monkeypatch.context() as other:
            other.setattr(seals, "seal", lambda name, data: bytes(32))
            store.kernels.put(KernelRecord(key, "af", "source", b"binary"))
        made = decision(bucket, kernel=key.digest, device=device, threads=1)
        store.results.put_decision(made)
        catalogue = Catalogue(
            RunSettings(cc="no-such-cc"), cpu_device(), "v", lambda kind, what, error: said.append((kind, what, error))
        )
        found = catalogue.absorb(store)
        assert found is not None and found.has_decisions
        catalogue.absorb(store)
    ((kind, what, error),) = said
    assert kind == "kernels_refused" and what == "stored kernels were left out and are tuned again"
    assert "1 of 1 are damaged, another user's, or of a copied store" in str(error)
    assert not catalogue.shelf.has(key.digest) and len(catalogue.table) == 1


def test_no_kernel_is_loaded_while_a_graph_is_recorded(monkeypatch):
    table, shelf = DecisionTable(), KernelShelf(lambda record, device: lambda *args: None)
    gpu = place(0, torch.device("cuda", 0), "cuda:L4:58")
    table.update([decision(bucket_of([7]), threads=0, device="cuda:L4:58")])
    shelf.add("k", KernelRecord(CompileKey("s", "c", "f", "t"), "k", "", b""))
    monkeypatch.setattr(capturing, "is_capturing", lambda: True)
    assert choose(table, shelf, "n", [7], gpu).entry is None
    monkeypatch.setattr(capturing, "is_capturing", lambda: False)
    assert choose(table, shelf, "n", [7], gpu).entry is not None


def add_relu():
    spec = TensorSpec(SymbolicShape(["s0", "s1"]), "float32", SymbolicShape(["s1", 1]))
    row = TensorSpec(SymbolicShape(["s1"]), "float32", SymbolicShape([1]))
    operations = [
        Operation("a", "aten.add.Tensor", (ValueRef("x"), ValueRef("b")), (), (spec,)),
        Operation("r", "aten.relu.default", (ValueRef("a"),), (), (spec,)),
    ]
    return FusionNode(operations, {"x": spec, "b": row})


def test_shape_checks_dispatch_and_fallback():
    injector, node = RuntimeShapeInjector(), add_relu()
    checks = injector.inject_shape_check(node)
    assert [c.target for c in checks] == ["autofuse.check_shape.default"] * 2
    x, b = torch.randn(3, 5), torch.randn(5)
    assert injector.run_shape_check(node, (x, b)) == {"s0": 3, "s1": 5}
    with pytest.raises(ShapeError, match="s1"):
        injector.run_shape_check(node, (x, torch.randn(4)))
    with pytest.raises(ShapeError, match="2 inputs"):
        injector.run_shape_check(node, (x,))
    dispatch = injector.generate_shape_dispatch(node, {(3, 5): lambda x, b: "special"})
    assert dispatch(x, b) == "special"
    y = torch.randn(4, 5)
    assert torch.equal(dispatch(y, b), torch.relu(y + b))
    assert torch.equal(injector.generate_generic_fallback(node)(x, b), torch.relu(x + b))


def test_a_kernel_gets_only_the_strides_that_it_is_made_for():
    injector, node = RuntimeShapeInjector(), add_relu()
    assert [c.args[1:] for c in injector.inject_shape_check(node)][1] == (
        SymbolicShape(["s1"]), SymbolicShape([1]), "float32",
    )  # fmt: skip
    dispatch = injector.generate_shape_dispatch(node, {(3, 5): lambda x, b: "special"})
    x, b = torch.randn(3, 5), torch.randn(5)
    turned = torch.randn(5, 3).t()
    assert dispatch(x, b) == "special"
    assert torch.equal(dispatch(turned, b), torch.relu(turned + b))
    assert torch.equal(dispatch(x.double(), b), torch.relu(x.double() + b))


def test_the_first_call_of_a_kernel_is_checked_once():
    injector, node = RuntimeShapeInjector(), add_relu()
    x, b, told = torch.randn(3, 5), torch.randn(5), []
    fallback = injector.fallback_at(node.form, (3, 5))
    first = injector.checked_call(node.form, (3, 5), lambda x, b: "fused", fallback, told.append)
    assert first(x, b) == "fused"
    turned = torch.randn(5, 3).t()
    assert torch.equal(first(turned, b), torch.relu(turned + b))
    assert told == [None, "input 0 has strides [1, 3], expected [5, 1]"]


def test_a_router_takes_its_check_and_its_fallback_from_the_injector(monkeypatch):
    taken = []
    for name in ("fallback_at", "checked_call"):
        real = getattr(RuntimeShapeInjector, name)
        monkeypatch.setattr(
            RuntimeShapeInjector, name, lambda *args, real=real, name=name: taken.append(name) or real(*args)
        )

    class Decided(Undecided):
        def choose(self, fusion_id, values, device):
            return Choice(True, lambda *pointers: None, "kernel")

    torch._dynamo.reset()
    routed(lambda x: torch.exp(torch.nn.functional.gelu(x)) * 2, Decided())(torch.randn(8, 16))
    assert sorted(taken) == ["checked_call", "fallback_at"]


def test_a_generated_kernel_takes_the_place_of_the_fallback():
    node = add_relu()
    generator = autofuse.FusionKernelGenerator()
    assert generator.can_generate_specialized([(3, 5), (5,)])
    assert not generator.can_generate_specialized([("s0", 5)])
    special = generator.generate_fused_kernel(node, [(3, 5), (5,)])
    generic = generator.generate_generic_kernel(node)
    dispatch = RuntimeShapeInjector().generate_shape_dispatch(node, {(3, 5): lambda *t: special(*t)[0]})
    x, b = torch.randn(3, 5), torch.randn(5)
    assert torch.equal(dispatch(x, b), torch.relu(x + b))
    assert torch.equal(generic(torch.randn(7, 5) * 0 + 1, b)[0], torch.relu(1 + b).expand(7, 5))


def test_observe_and_optimize_say_what_they_want(tmp_path, monkeypatch):
    with autofuse.observe() as seen:
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())(torch.randn(2, 4)).sum().backward()
    assert any(p.overload.startswith("aten.") and "relu" in p.overload for p in seen.operations)
    with pytest.raises(TypeError, match=r"nn\.Module or a function"):
        autofuse.optimize(3)
    monkeypatch.setenv("AUTOFUSE_DISABLE", "1")
    model = torch.nn.Linear(2, 2)
    assert autofuse.optimize(model) is model and model._compiled_call_impl is None
    with pytest.raises(AttributeError, match="it has"):
        autofuse.nothing  # noqa: B018
