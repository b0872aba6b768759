"""Graphs of GPUs without one: import, planning, places, requests, decisions and the rule while a graph is recorded.

Graphs are traced on fake tensors, which have devices but no memory; the driver is a fake in C.
"""

from time import perf_counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.capture.graph_import import import_graph
from autofuse.codegen.triton import key as keys
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import Argument, Pass, TritonSource
from autofuse.db.store import Store
from autofuse.errors import ShapeError
from autofuse.fusion import FusionEngine
from autofuse.gpu import capturing, launcher, modules
from autofuse.gpu.modules import LoadedArtifact, load_artifact
from autofuse.gpu.node_timer import NodeTimer
from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import Candidate, CompileKey, Decision, DecisionKey, DeviceInfo, KernelRecord
from autofuse.ir.shape import SymbolicShape
from autofuse.observer.device_timer import EventCalls, EventTimer
from autofuse.pipeline import route_graph
from autofuse.runtime.graphs import injector
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.kernels import device_backends
from autofuse.runtime.roots.services import USUAL_TOOLS, RootTools
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from autofuse.wrapper import node_call
from autofuse.wrapper.graph_call_builder import build_program
from tests.gpu.fake_driver import artifact_of, cpu_calls, fake_driver
from tests.runtime.fake_capturer import fake_capturer
from tests.runtime.graphs.test_routed_graphs import Undecided

GPU, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def traced(function, *devices, shape=(8, 16), shapes=None):
    """``shapes``: of each input, where they differ."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        examples = zip(shapes or [shape] * len(devices), devices, strict=True)
        return make_fx(function)(*(torch.empty(its, device=device) for its, device in examples))


def chain(x, y):
    return (x + y).relu() * 2.0


def planned(function, *devices, shapes=None):
    imported = import_graph(traced(function, *devices, shapes=shapes))
    graph = imported.for_fusion()
    return imported, build_program(imported, FusionEngine().fuse(graph))


def test_every_node_has_one_device_with_its_index():
    def two(x, y, z, c):
        return chain(x, y), z.exp().sigmoid() + 1, (c * 3).tanh() + c

    _, program = planned(two, GPU, GPU, SECOND, "cpu")
    found = {slot.node.operation_names: slot.device for slot in program.slots}
    assert found == {"add + relu + mul": GPU, "exp + sigmoid + add": SECOND, "mul + tanh + add": torch.device("cpu")}
    forms = [slot.node.form.inputs[0].spec.device for slot in program.slots]
    assert sorted(forms) == ["cpu", "cuda", "cuda"]


def test_numbers_of_the_cpu_beside_tensors_of_a_gpu_are_refused_with_a_reason():
    def mixed(x, y):
        a = (x + y).relu()
        b = torch.where(a > 0, a, torch.scalar_tensor(0.5))
        return b.tanh() * 2

    imported, program = planned(mixed, GPU, GPU)
    (refusal,) = imported.refusals
    assert refusal.code == "mixed_devices" and refusal.operations == "where"
    assert "cpu and cuda:0" in refusal.detail
    assert [slot.node.operation_names for slot in program.slots] == ["add + relu + gt", "tanh + mul"]


def test_copies_between_devices_end_a_node():
    def copied(x):
        return ((x + 1).relu().to("cuda:1") * 2).exp()

    imported, program = planned(copied, GPU)
    assert {str(slot.device) for slot in program.slots} == {"cuda:0", "cuda:1"}
    assert all(op.short_name != "_to_copy" or op.target.startswith("opaque") for op in imported.operations)


def test_constants_inside_a_node_are_made_on_its_device():
    spec = TensorSpec(SymbolicShape([4, 16]), "float32", SymbolicShape([16, 1]), "cuda")
    operations = (
        Operation("v0", "aten.full.default", ((4, 16), 2.0), (("dtype", "float32"),), (spec,)),
        Operation("v1", "aten.add.Tensor", (ValueRef("i0"), ValueRef("v0")), (), (spec,)),
    )
    form = NodeForm((NodeInput("i0", spec),), operations, (ValueRef("v0"), ValueRef("v1")))
    with FakeTensorMode():
        made, added = node_call.make_unfused(form, (), SECOND)(torch.empty(4, 16, device=SECOND))
    assert made.device == added.device == SECOND


def test_inputs_on_another_device_are_a_problem_of_the_first_call():
    expected = ((4,), (1,), torch.float32)
    x = torch.zeros(4)
    assert injector.layout_problem(0, x, *expected, torch.device("cpu")) is None
    assert "is on cpu, expected cuda:0" in injector.layout_problem(0, x, *expected, GPU)
    with FakeTensorMode():
        fake = torch.empty(4, device=SECOND)
    assert "cuda:1, expected cuda:0" in injector.layout_problem(0, torch.nn.Parameter(fake), *expected, GPU)


# ---- routing ---------------------------------------------------------------------------------------------


def chain_source():
    arguments = tuple(Argument(f"p{i}", "param", "*fp32", i) for i in range(3))
    return TritonSource("af_chain", "", (Pass("af_chain", arguments, (), ((128, 64),)),), (), (), 4, 1)


class GpuKernel(Undecided):
    """Every node of a GPU has the same kernel."""

    def __init__(self, entry):
        super().__init__()
        self.entry, self.asked, self.sampled = entry, [], 0

    def choose(self, fusion_id, values, device):
        self.asked.append(device)
        return Choice(True, self.entry, "kernel") if device == GPU else UNKNOWN

    live_races = None

    def sample_due(self, graph):
        self.sampled += 1
        return True

    def note_call(self, call):
        pass

    def note_timed(self, has_held):
        pass


@pytest.fixture
def standing_in(monkeypatch):
    """CPU tensors take the place of a GPU's, from the first call's check to the driver."""
    monkeypatch.setattr(node_call, "torch_calls", lambda: cpu_calls([0]))
    real = injector.layout_problem
    monkeypatch.setattr(injector, "layout_problem", lambda *args: real(*args[:-1], torch.device("cpu")))
    fake = fake_driver()
    fake.forget()
    return fake


@pytest.fixture
def recording(monkeypatch):
    """Whether the script records a graph; set the first item."""
    state = [False]
    monkeypatch.setattr(capturing, "is_capturing", lambda: state[0])
    return state


class Counting:
    """A timer that counts."""

    def __init__(self, device):
        assert device == GPU
        self.pairs, self.open, self.polled = 0, False, 0

    def start(self):
        self.open = True

    def stop(self):
        assert self.open
        self.pairs, self.open = self.pairs + 1, False

    def poll(self):
        found, self.polled = self.pairs - self.polled, self.pairs
        return [2e-6] * found


def gpu_router(catalogue, make_timer=Counting):
    _, program = planned(chain, GPU, GPU)
    return GraphRouter(program, catalogue, "inference", perf_counter, make_timer)


def tensors():
    return [torch.randn(8, 16), torch.randn(8, 16)]


def test_a_routed_call_is_one_launch_and_is_timed_by_events(standing_in):
    catalogue = GpuKernel(load_artifact(artifact_of(chain_source()), 0, driver=standing_in.driver))
    router = gpu_router(catalogue)
    for _ in range(3):
        out = router(tensors())
    (plan,) = router.all_plans()
    assert [launched.grid for launched in standing_in.launches] == [(2, 1, 1)] * 3 and out.shape == (8, 16)
    assert plan.count == 3 and plan.fused_calls(plan.nodes[0]) == 3 and not catalogue.failed
    assert plan.timers[0].pairs == 3
    assert plan.live_us(0) == pytest.approx(2.0) and plan.graph_us() == 0.0  # the clock says nothing here


def test_while_a_graph_is_recorded_a_new_plan_runs_eager_and_is_settled_later(standing_in, recording):
    catalogue = GpuKernel(load_artifact(artifact_of(chain_source()), 0, driver=standing_in.driver))
    router = gpu_router(catalogue)
    recording[0] = True
    x, y = tensors()
    assert torch.equal(router([x, y]), chain(x, y))
    (plan,) = router.all_plans()
    assert not router.plans and not catalogue.asked and not standing_in.launches and not plan.timers
    recording[0] = False
    router([x, y])
    assert router.plans == {(): plan} and len(standing_in.launches) == 1
    recording[0] = True
    calls = plan.calls
    router([x, y])
    assert plan.calls is calls and len(standing_in.launches) == 2 and plan.timers[0].pairs == 1


def test_a_plan_swapped_in_just_before_a_recording_is_launched_but_not_settled_in_it(standing_in, recording):
    catalogue = GpuKernel(load_artifact(artifact_of(chain_source()), 0, driver=standing_in.driver))
    router = gpu_router(catalogue)
    (plan,) = [router.plan_for(())]
    calls = plan.calls
    recording[0] = True
    router(tensors())
    assert plan.calls is calls and len(standing_in.launches) == 1
    recording[0] = False
    router(tensors())
    assert plan.calls is not calls and len(standing_in.launches) == 2


def test_a_kernel_not_made_for_these_sizes_leaves_its_node_on_eager(standing_in):
    narrow = chain_source()
    narrow = TritonSource(**{**vars(narrow), "limits": ((128, 100),)})
    catalogue = GpuKernel(load_artifact(artifact_of(narrow), 0, driver=standing_in.driver))
    router = gpu_router(catalogue)
    x, y = tensors()
    assert torch.equal(router([x, y]), chain(x, y))
    (plan,) = router.all_plans()
    assert plan.nodes[0].broken and "at most 100" in catalogue.failed[0] and plan.fused_calls(plan.nodes[0]) == 0
    with pytest.raises(ShapeError):
        node_call.make_launcher(plan.nodes[0].form, catalogue.entry, (), 0)


def test_a_launch_that_the_driver_refuses_falls_back_for_good(standing_in):
    catalogue = GpuKernel(load_artifact(artifact_of(chain_source()), 0, driver=standing_in.driver))
    router = gpu_router(catalogue)
    router(tensors())
    standing_in.fail_with(700)
    x, y = tensors()
    assert torch.equal(router([x, y]), chain(x, y))
    standing_in.fail_with(0)
    assert torch.equal(router([x, y]), chain(x, y))
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in catalogue.failed[0]


class Stream:
    """Events of a device that finishes what it is told to; each takes a millisecond."""

    def __init__(self):
        self.now = self.done = 0

    def event(self):
        stream = self

        class Event:
            def record(self, where):
                assert where == "stream 0"
                stream.now += 1
                self.at = stream.now

            def query(self):
                return self.at <= stream.done

            def elapsed_time(self, end):
                return float(end.at - self.at)

        return Event()


def test_a_nodes_time_comes_in_once_the_device_has_finished(recording):
    stream = Stream()
    calls = EventCalls(lambda: True, lambda: recording[0], stream.event, lambda i: f"stream {i}", lambda t: 0)
    timer = NodeTimer(EventTimer(calls), 0)
    for _ in range(3):
        timer.start()
        timer.stop()
    assert timer.poll() == []
    stream.done = 4
    assert timer.poll() == [0.001, 0.001] and timer.poll() == []
    timer.start()  # of a call that raised
    recording[0] = True
    timer.start()
    timer.stop()
    recording[0] = False
    stream.done = 100
    assert timer.poll() == [0.001]
    for _ in range(200):
        timer.start()
        timer.stop()
    stream.done = 1000
    assert len(timer.poll()) == 64


# ---- the session -----------------------------------------------------------------------------------------

H200 = DeviceInfo("cuda", "NVIDIA H200", 132, "sm_90")
L4 = DeviceInfo("cuda", "NVIDIA L4", 58, "sm_89")


@pytest.fixture
def session_with(tmp_path, monkeypatch):
    """A session that watches nothing, with two GPUs of different models."""
    monkeypatch.setattr(device_backends, "gpu_device", lambda index: {0: H200, 1: L4}[index])
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.setenv("AUTOFUSE_TUNE", "after")
    monkeypatch.setenv("AUTOFUSE_QUIET", "1")

    def make(*missing, tools=USUAL_TOOLS, **environment):
        """``missing``: packages that are not installed; ``environment``: variables."""
        if "triton" in missing:
            monkeypatch.setattr(keys, "installed_triton", lambda: None)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return make_session(load(), "test", tools=tools)

    return make


def requests_of(session, function, *devices):
    router = route_graph(traced(function, *devices), "inference", session)
    assert isinstance(router, GraphRouter), session.context.said
    router.plan_for(())
    (plan,) = router.all_plans()
    plan.count = 5
    return session.tuning.requests_for([plan])


def both(x, y, c):
    return chain(x, y), (c * 3).tanh() + c


def test_requests_name_the_model_of_the_nodes_device(session_with):
    session = session_with()
    keys = {r.key.device: r.key for r in requests_of(session, both, SECOND, SECOND, "cpu")}
    assert set(keys) == {L4.key, session.context.device.key}
    assert keys[L4.key].threads == 0 and keys[session.context.device.key].threads == torch.get_num_threads()
    (other,) = requests_of(session, chain, GPU, GPU)
    assert other.key.device == H200.key and other.key.fusion_id == keys[L4.key].fusion_id


@pytest.mark.parametrize(
    "missing, environment, kinds, said",
    [
        ((), {"AUTOFUSE_CC": "/nowhere/cc"}, {"cuda"}, {"no_compiler"}),
        (("triton",), {}, {"cpu"}, {"no_triton"}),
    ],
)
def test_what_one_backend_lacks_does_not_stop_the_other(session_with, missing, environment, kinds, said):
    session = session_with(*missing, **environment)
    requests = requests_of(session, both, GPU, GPU, "cpu")
    assert {r.key.device.partition(":")[0] for r in requests} == kinds
    assert set(session.context.said) == said
    problems = {d.type: session.kernels.catalogue.backends.problem(d) for d in (GPU, torch.device("cpu"))}
    assert {kind for kind, problem in problems.items() if problem is None} == kinds


def test_mixed_devices_reach_the_refusals_of_the_session(session_with):
    session = session_with()
    requests_of(session, lambda x, y: torch.where(x > 0, y, torch.scalar_tensor(0.5)) * 2 + x, GPU, GPU)
    assert "mixed_devices" in {r.code for r in session.context.refusals}


def test_a_root_called_while_a_graph_is_recorded_is_left_alone(session_with, recording, monkeypatch):
    capturer = fake_capturer(lambda *args: pytest.fail("traced"))
    session = session_with(tools=RootTools(load_capturer=lambda: capturer))
    model = torch.nn.Linear(4, 4)
    root = session.roots.root_of(model)
    monkeypatch.setattr(root.policy, "advise", lambda *args: pytest.fail("asked whether to capture"))
    recording[0] = True
    x = torch.randn(2, 4)
    for state in ("observing", "captured"):
        assert root.state == state
        assert torch.equal(root.call(model, (x,), {}), model(x))
        root.capture()
    assert root.trial.opened is None and not session.context.steps and session.context.held_out_calls == 0


def test_a_recording_is_asked_for_only_where_a_gpu_is_in_use(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(1) or True)
    assert not capturing.is_capturing() and not asked
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert capturing.is_capturing() and asked == [1]

    def implicit():
        raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", implicit)
    assert capturing.is_capturing()


def test_a_device_that_cannot_be_described_is_said_once(session_with):
    session = session_with()
    for _ in range(3):
        session.kernels.use_device(torch.device("cuda", 7))
    assert session.context.said == {"device_unknown": 1}
    assert session.kernels.choose("n", (1,), torch.device("cuda", 7)) is UNKNOWN


def test_decisions_of_a_device_are_read_when_it_comes_into_use(session_with, monkeypatch):
    fake, install, installed = fake_driver(), launcher.install, []
    monkeypatch.setattr(modules, "torch_driver", lambda: fake.driver)
    monkeypatch.setattr(launcher, "install", lambda binary: installed.append(install(binary)))
    session = session_with()
    artifact = artifact_of(chain_source())
    record = KernelRecord(CompileKey("s", "triton", "f", "cuda:90"), "af_chain", "text", artifact.pack())
    bucket = bucket_of(())
    with Store.open(session.context.settings.run.store) as store:
        store.kernels.put(record)
        for info, compile_key in ((H200, record.key.digest), (L4, None)):
            key = DecisionKey("n", bucket.label, info.key, 0, session.context.versions)
            candidate = Candidate("triton_generic" if compile_key else "eager")
            store.results.put_decision(Decision(key, bucket, candidate, compile_key, 2.0, 1.0, 2.0, 1.9, 2.1, "won"))
    session.context.store_thread.start()
    try:
        assert session.context.store_thread.wait_ready(10.0) and not len(session.kernels.catalogue.table)
        session.kernels.use_device(GPU)
        choice = session.kernels.choose("n", (), GPU)
        assert isinstance(choice.entry, LoadedArtifact) and choice.entry.device_index == 0
        assert isinstance(choice.entry.artifact, Artifact) and session.kernels.choose("n", (), SECOND) is UNKNOWN
        session.kernels.use_device(SECOND)
        assert session.kernels.choose("n", (), SECOND) == Choice(known=True)
        assert len(installed) == 1
    finally:
        session.context.store_thread.stop()
    with Store.open(session.context.settings.run.store) as store:
        assert store.kernels.get(launcher.launcher_key(session.kernels.catalogue.toolchain).digest).name == "af_launch"
