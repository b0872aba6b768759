"""Dynamo is never asked about a frame of autofuse's own, whatever a compiled function calls and in whichever order."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.pipeline import backend
from autofuse.sessions import start_session
from autofuse.settings.layers import load

OURS = str(Path(autofuse.__file__).parent)


@pytest.fixture
def frames(tmp_path, monkeypatch):
    """(file, function) of each frame that Dynamo is asked about; each module is observed, or captured at once."""
    for name, value in {
        "STORE": str(tmp_path / "store.sqlite3"), "TUNE": "off", "QUIET": "1", "OBSERVE_SAMPLE_EVERY": "1",
        "CAPTURE_MIN_ROOT_US": "0", "CAPTURE_MIN_INFERENCE_ROOT_US": "0", "CAPTURE_HELD_OUT_SHARE": "0.5",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    torch._dynamo.reset()
    session = start_session(load(), "test")
    seen = []
    ask = convert_frame.CatchErrorsWrapper.__call__

    def watched(self, frame, *rest):
        seen.append((frame.f_code.co_filename, frame.f_code.co_name))
        return ask(self, frame, *rest)

    monkeypatch.setattr(convert_frame.CatchErrorsWrapper, "__call__", watched)
    yield seen
    session.finish(None)
    torch._dynamo.reset()


def ours(seen):
    """But for the function that is made for each root to be traced."""
    return [f for f in seen if f[0].startswith((OURS, "<autofuse")) and f[1] != "call_root"]


WEIGHT = torch.randn(8, 8, requires_grad=True)


def loss_of(x):
    return torch.tanh(x @ WEIGHT).square().mean()


def backward_inside(x):
    loss = loss_of(x)
    loss.backward()
    return loss


def backward_twice(x):
    loss = loss_of(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def gradient_of_gradient(x):
    (gradient,) = torch.autograd.grad(loss_of(x), x, create_graph=True)
    gradient.square().sum().backward()
    return gradient.detach()


def hooks(x):
    y = torch.relu(x * 2)
    y.register_hook(lambda gradient: gradient * 2)
    torch._dynamo.graph_break()
    loss = loss_of(y)
    loss.backward()
    return loss


def checkpointed(x):
    loss = checkpoint(loss_of, x, use_reentrant=False)
    loss.backward()
    return loss


def breaks(x):
    x = torch.sin(x) + 1
    torch._dynamo.graph_break()
    x = torch.cos(x) * 2
    print("", end="")
    return x.relu()


MODEL = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
HOOKED = nn.Sequential(nn.Linear(8, 8), nn.GELU())
HOOKED[0].register_forward_hook(lambda module, args, out: out * 2)
HOOKED.register_full_backward_hook(lambda module, inputs, outputs: None)
OPTIMIZERS = [torch.optim.AdamW(MODEL.parameters(), lr=1e-3), torch.optim.SGD(MODEL.parameters(), lr=1e-3)]
CALLED_EAGERLY = torch._dynamo.disable(MODEL)


def optimizer_steps(x):
    MODEL(x).square().mean().backward()
    for optimizer in OPTIMIZERS:
        torch._dynamo.graph_break()
        optimizer.step()
        optimizer.zero_grad()
    return x


def modules_of_all_kinds(x):
    return HOOKED(CALLED_EAGERLY(MODEL(x)))


def optimized_inside(x):
    torch._dynamo.graph_break()
    return OPTIMIZED(x)


OPTIMIZED = None
KINDS = [
    backward_inside, backward_twice, gradient_of_gradient, hooks, checkpointed, breaks, optimizer_steps,
    modules_of_all_kinds, optimized_inside,
]  # fmt: skip


@pytest.mark.parametrize("door", ["compile", "optimize", "another backend"])
@pytest.mark.parametrize("function", KINDS)
def test_kinds_of_use(frames, function, door, monkeypatch):
    if function is optimized_inside:
        monkeypatch.setitem(globals(), "OPTIMIZED", autofuse.optimize(lambda x: torch.relu(x * 3)))
    if door == "optimize":
        call = autofuse.optimize(function)
    else:
        call = torch.compile(function, backend=backend if door == "compile" else "eager")
    for rows in (4, 4, 4, 6, 6, 7, 7, 7):
        MODEL(torch.randn(rows, 8)).sum().backward()  # a root beside it
        x = torch.randn(rows, 8, requires_grad=True)
        call(x)
    assert not ours(frames)
    asked = {name for _, name in frames}
    assert function.__name__ in asked or (door == "optimize" and "call_root" in asked)


@pytest.mark.parametrize("first", ["torch._dynamo", "torch", "autofuse", "autofuse.pipeline"])
def test_whoever_is_imported_first(first, tmp_path):
    script = textwrap.dedent(
        f"""
        import {first}
        import autofuse, torch, sys
        assert {first.startswith(("autofuse", "torch._dynamo"))} or "torch._dynamo" not in sys.modules

        def train(x):
            loss = torch.relu(x * 2).sum()
            loss.backward()
            return loss

        x = torch.randn(8, requires_grad=True)
        call = torch.compile(train, backend="autofuse")
        for _ in range(4):
            call(x)
        from torch._dynamo.convert_frame import input_codes
        names = [code.co_filename for code in (seen() for seen in input_codes.seen) if code is not None]
        assert any(name == "<string>" for name in names)
        print([name for name in names if "autofuse/" in name or "<autofuse" in name])
        """
    )
    environment = {"AUTOFUSE_STORE": str(tmp_path / "store.sqlite3"), "AUTOFUSE_TUNE": "off", "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
