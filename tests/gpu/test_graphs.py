"""Recording with torch's CUDA graphs, whose objects here only note what is asked of them."""

import contextlib
import gc

import pytest
import torch

from autofuse.gpu import graphs


class Asked:
    """Stands in for a GPU's streams and graphs."""

    def __init__(self):
        self.calls, self.fails, self.stream = [], None, "the script's"

    def note(self, what):
        self.calls.append(what)


@pytest.fixture
def asked(monkeypatch):
    found = Asked()

    class Stream:
        def __init__(self, index):
            self.index = index

        def wait_stream(self, other):
            found.note(f"wait for {other}")

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert found.stream != "the script's" and not gc.isenabled()
            found.note(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            found.note("end")
            if found.fails is not None:
                raise found.fails

    @contextlib.contextmanager
    def stream(side):
        found.stream = side
        yield
        found.stream = "the script's"

    graphs._side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: found.stream)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: found.note("workspaces"), raising=False)
    yield found
    graphs._side_stream.cache_clear()


BEFORE = ["wait for the script's", "workspaces", "begin pool thread_local"]


def test_a_recording_is_on_a_stream_of_its_own(asked):
    graph, result = graphs._record(0, "pool", lambda: asked.note("body") or 7)
    assert result == 7 and asked.calls == [*BEFORE, "body", "end", "workspaces"] and gc.isenabled()
    assert isinstance(graph, torch.cuda.CUDAGraph) and asked.stream == "the script's"
    side = graphs._side_stream(0)
    graphs._record(0, "pool", lambda: None)
    assert graphs._side_stream(0) is side


def test_an_error_inside_is_the_one_that_is_raised_and_the_recording_ends(asked):
    asked.fails = RuntimeError("capture was invalidated")

    def body():
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        graphs._record(0, "pool", body)
    assert asked.calls == [*BEFORE, "end", "workspaces"] and gc.isenabled()


def test_a_recording_that_cannot_end(asked):
    asked.fails = RuntimeError("capture was invalidated")
    with pytest.raises(RuntimeError, match="invalidated"):
        graphs._record(0, "pool", lambda: None)
    assert asked.calls == [*BEFORE, "end", "workspaces"] and gc.isenabled()


def test_switches_of_precision_are_part_of_a_recording():
    before = graphs._numerics()
    assert graphs._numerics() == before
    with torch.backends.cudnn.flags(deterministic=True):
        assert graphs._numerics() != before
    torch.set_float32_matmul_precision("high")
    try:
        assert graphs._numerics() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert graphs._numerics() == before


def test_who_looks_at_single_operators():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    assert graphs._is_left_alone()
    with Mode():
        assert not graphs._is_left_alone()
    with torch.autograd.set_detect_anomaly(True):
        assert not graphs._is_left_alone()
    with torch.device("cpu"):  # a default device is no one who looks
        assert graphs._is_left_alone()
