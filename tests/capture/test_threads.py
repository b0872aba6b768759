"""Traces while other threads trace, or after a thread that has traced is gone."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from autofuse.capture.dynamo import capture_settings, compile_root
from autofuse.capture.traced import TracedElsewhere

CALL_IN_A_THREAD_FIRST = """
import threading, torch
from autofuse.capture.dynamo import compile_root

def call(size):
    found.append(compile_root("root", lambda graph, inputs: graph).trace(torch.sin, torch.ones(size)).sum())

found = []
for size in (2, 3):
    thread = threading.Thread(target=call, args=(size,))
    thread.start()
    thread.join()
    others = [threading.Thread(target=sorted, args=([],)) for _ in range(4)]
    [other.start() for other in others], [other.join() for other in others]
    call(size)
print(len(found), threading.active_count())
"""


def test_a_thread_that_has_traced_may_end():
    """Torch 2.11 built for CUDA crashes without a GPU: the next trace reads what was freed with the thread."""
    done = subprocess.run(
        [sys.executable, "-c", CALL_IN_A_THREAD_FIRST], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "4 1\n"), done.stderr


def test_other_threads_are_not_being_traced():
    """Torch's optimizers take their steps in tensors where they are told so, and round in another way."""
    answers = []

    def ask():
        answers.append(bool(torch.compiler.is_compiling()))

    def backend(graph, inputs):
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return graph

    root = compile_root("root", backend)
    with capture_settings(8):
        root.trace(torch.sin, torch.ones(3))
    ask()
    first, *rest = answers
    assert first is hasattr(torch.compiler, "_compile_session_context")  # older torch tells nobody
    assert rest == [False, False]


def test_another_thread_calls_what_the_script_has_compiled_while_a_root_is_traced():
    """torch.fx marks the whole process as tracing, and torch.compile refuses to run what torch.fx traces."""
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(3))
    found = []

    def ask():
        try:
            found.append(compiled(torch.ones(3)).sum().item())
        except Exception as error:
            found.append(error)

    class Traced(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return x

    def backend(graph, inputs):
        torch.fx.symbolic_trace(Traced())  # as AOTAutograd does it
        return graph

    root = compile_root("root", backend)
    with capture_settings(8):
        root.trace(torch.sin, torch.ones(3))
    assert found == [6.0]


@pytest.fixture
def traced_elsewhere(monkeypatch):
    """torch.fx traces in another thread, which ends its trace when the function is called."""
    begun, may_end = threading.Event(), threading.Event()

    class Traced(nn.Module):
        def forward(self, x):
            begun.set()
            assert may_end.wait(60)
            return x

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(Traced(),))
    thread.start()
    assert begun.wait(60)

    def end():
        may_end.set()
        thread.join()

    yield end
    end()


def test_a_call_during_the_trace_of_another_thread_has_not_begun(traced_elsewhere):
    torch._dynamo.reset()
    root, x = compile_root("root", lambda graph, inputs: graph.forward), torch.randn(4)
    with pytest.raises(TracedElsewhere):
        root.trace(torch.sin, x)
    assert torch.equal(root.settled(torch.sin, x), x.sin())
    traced_elsewhere()
    assert torch.equal(root.trace(torch.sin, x), x.sin())
    assert root.direct.find(torch.sin, (x,), {}) is not None


def test_a_refusal_from_below_is_the_scripts_own(traced_elsewhere):
    """A function that the script itself has compiled, called in what a root calls."""
    inner = torch.compile(torch.sin, backend="eager")

    def outer(x):
        raise RuntimeError("you are using FX to symbolically trace: " + str(inner))

    traced_elsewhere()
    with pytest.raises(RuntimeError, match="using FX") as raised:
        compile_root("root", lambda graph, inputs: graph.forward).settled(outer, torch.ones(3))
    assert not isinstance(raised.value, TracedElsewhere)


def test_what_another_thread_draws_while_a_root_is_traced_is_not_drawn_again():
    """Dynamo puts torch's generator back after a trace."""
    drawn = []

    def backend(graph, inputs):
        other.start()
        has_drawn.wait(60)
        return graph.forward

    def serve():
        drawn.append(float(torch.rand(())))
        has_drawn.set()
        may_end.wait(60)

    has_drawn, may_end = threading.Event(), threading.Event()
    other = threading.Thread(target=serve)
    idle = threading.Thread(target=may_end.wait, args=(60,))  # lives when the trace begins
    idle.start()
    try:
        with capture_settings(8):
            compile_root("drawing", backend).trace(torch.cos, torch.ones(3))
    finally:
        may_end.set()
    other.join()
    idle.join()
    assert drawn and float(torch.rand(())) not in drawn
