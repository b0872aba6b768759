"""Trains models on a GPU that is none: the package's whole path from the session to the driver, which executes PTX.

In: the name of a model. Out: a `Trained`: losses under autofuse, in eager and in float64, what was launched, what
stayed eager. Session, capture, planner, store, router, launcher in C and calls of the driver are the package's own.
Others stand in for the device (`ptx.device`), the driver (`ptx.driver`) and the tuner, which takes kernels unraced
(`ptx.tuner`).
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptx.device import install

HEAP, _ = install()  # before the package is imported, which binds functions of torch

import autofuse  # noqa: E402
from autofuse.daemon import control  # noqa: E402
from autofuse.runtime.graphs.usage import usage_of  # noqa: E402
from autofuse.runtime.session import running_session  # noqa: E402
from autofuse.strategies.enumeration import PARTS  # noqa: E402
from autofuse.tuner.strategy_provider import STRATEGY  # noqa: E402
from ptx.driver import ExecutingDriver  # noqa: E402
from ptx.results import keep  # noqa: E402
from ptx.tuner import UnracedTuner  # noqa: E402

DRIVER = ExecutingDriver(HEAP)


class Block(nn.Module):
    """Attention by hand and a GELU network, each behind a layer norm."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.first(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        weights = scores.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)  # type: ignore[index]
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """Its loss for tokens and their successors."""

    def __init__(self, vocabulary: int = 61, width: int = 32, blocks: int = 2, length: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 2, length) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        at = torch.arange(given.shape[1], device=given.device)
        x = self.norm(self.blocks(self.tokens(given) + self.places(at)))
        return F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


class Cnn(nn.Module):
    """Its loss: convolutions with batch norms, a residual, both kinds of pooling."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.inner, self.inner_norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, wanted: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(images))), 2)
        x = F.relu(self.inner_norm(self.inner(x)) + x)
        return F.cross_entropy(self.head(x.mean((2, 3))), wanted)


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    given = torch.randint(0, 61, (3, 13), generator=torch.Generator().manual_seed(step))
    return given[:, :-1].contiguous(), given[:, 1:].contiguous()


def _images(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 10, 10, generator=source), torch.randint(0, 10, (4,), generator=source)


def _lengths(step: int) -> tuple[Tensor, Tensor]:
    """From the third step on each is of another length."""
    given, wanted = _tokens(step)
    length = 12 - max(0, step - 2) % 5
    return given[:, :length].contiguous(), wanted[:, :length].contiguous()


class Small(nn.Module):
    """A norm, a GELU network and a loss: what a test has time for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 7)

    def forward(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(self.norm(rows)))), wanted)


def _rows(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(9, 24, generator=source), torch.randint(0, 7, (9,), generator=source)


@dataclass(frozen=True)
class Training:
    """A model, what it is given at each step, and how it is trained."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]  # step -> input, target
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    autocast: torch.dtype | None = None


_adamw = partial(torch.optim.AdamW, lr=3e-3)
_sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)
_fused = partial(torch.optim.AdamW, lr=3e-3, fused=True)  # its counters are on the device
MODELS = {
    "gpt": Training(Gpt, _tokens, _adamw),
    "gpt_bfloat16": Training(Gpt, _tokens, _fused, torch.bfloat16),
    "gpt_lengths": Training(Gpt, _lengths, partial(torch.optim.Adam, lr=3e-3, amsgrad=True)),
    "cnn": Training(Cnn, _images, _sgd),
    "small": Training(Small, _rows, _adamw),
}


# ---- one training ----------------------------------------------------------------------------------------

WITHIN = 4.0  # times eager's own distance from float64
LEAST = 1e-7  # of a loss: eager may be nearer to float64 by chance
# What is not the real thing, in words; `ptx.device`, `ptx.driver` and `ptx.tuner` say more.
STANDING_IN = (
    "eager's operators run the CPU's kernels on the device's memory",
    "a launch is executed at once, on one stream without order",
    "events read the host's clock",
    "the tuner takes kernels unraced and stores PTX in place of machine code",
    "random numbers of the device and CUDA graphs are missing",
)


@dataclass(frozen=True)
class Used:
    """A node of the planned graphs."""

    operations: str
    calls: int
    fused: int  # calls that ran a kernel
    reason: str  # of the decision


@dataclass
class Trained:
    """What one model has shown."""

    losses: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)  # in float64
    nodes: list[Used] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)  # launches by name
    problems: list[str] = field(default_factory=list)  # faults, races, refused launches, nodes that fell back
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """The largest distance of a loss from float64's, over eager's own; 1.0: as far as eager."""
        own, theirs = (
            max(abs(a - b) for a, b in zip(found, self.exact, strict=True)) for found in (self.losses, self.eager)
        )
        return own / max(theirs, LEAST * max(map(abs, self.exact)))

    def fused(self, operations: str) -> int:
        """Calls of such nodes that ran a kernel, whatever their sizes."""
        return sum(node.fused for node in self.nodes if node.operations == operations)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": len(self.losses),
            "distance of losses from float64, over eager's": round(self.error, 3),
            "losses, largest difference from eager": max(
                abs(a - b) for a, b in zip(self.losses, self.eager, strict=True)
            ),
            "kernels": len(self.kernels),
            "launches": sum(self.kernels.values()),
            "calls of nodes": sum(node.calls for node in self.nodes),
            "of them by kernels": sum(node.fused for node in self.nodes),
            "eager": {node.operations: node.reason for node in self.nodes if not self.fused(node.operations)},
            "problems": self.problems,
            "seconds": round(self.seconds),
        }


def steps(model: nn.Module, how: Training, count: int) -> Iterator[float]:
    """Losses of so many steps. At every other one the inputs lie beside aligned places."""
    first = next(model.parameters())
    optimizer = how.optimizer(model.parameters())
    is_mixed = how.autocast is not None and first.dtype == torch.float32
    for step in range(count):
        given, wanted = (_laid(t, step % 2, first) for t in how.batch(step))
        with torch.autocast(first.device.type, how.autocast, enabled=is_mixed):
            loss = model(given, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def _laid(tensor: Tensor, shift: int, like: Tensor) -> Tensor:
    """On a parameter's device, in its dtype where it is of floats, ``shift`` elements behind an aligned place."""
    dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
    place = torch.empty(tensor.numel() + shift, dtype=dtype, device=like.device)
    return place[shift:].view(tensor.shape).copy_(tensor)


@contextmanager
def _unraced(store: Path) -> Iterator[UnracedTuner]:
    """A stand-in for the daemon, started by the session as it would start that."""
    tuner = UnracedTuner(store)
    with (
        mock.patch.object(control, "ensure_running", lambda settings: tuner.start()),
        mock.patch.object(control, "launch", lambda settings: None),
        mock.patch.object(control, "is_served", lambda settings: tuner.failure is None),
    ):
        yield tuner
        tuner.close()


def train(name: str, count: int) -> Trained:
    """Train a model for so many steps, three times. Raises what the tuner raised."""
    began, found = time.monotonic(), Trained()
    how = MODELS[name]
    torch.manual_seed(0)
    twin = how.make()
    exact, eager, ours = (copy.deepcopy(twin) for _ in range(3))
    found.exact = list(steps(exact.double(), how, count))
    found.eager = list(steps(eager.cuda(), how, count))
    DRIVER.seen.launches.clear()
    DRIVER.seen.problems.clear()
    with tempfile.TemporaryDirectory(prefix="autofuse-ptx-") as folder:
        store = Path(folder) / "store.sqlite3"
        settings = {"capture__at_once": True, "tuner__shared_folder": folder}
        with _unraced(store) as tuner, autofuse.session(store=store, tune="wait", **settings):
            found.losses = list(steps(ours.cuda(), how, count))
            _note_nodes(found, tuner)
    if tuner.failure is not None:
        raise tuner.failure
    for module, launches in DRIVER.seen.launches.items():
        label = DRIVER.seen.names[module]
        found.kernels[label] = found.kernels.get(label, 0) + launches
    found.problems += DRIVER.seen.problems
    found.seconds = time.monotonic() - began
    return found


def _note_nodes(found: Trained, tuner: UnracedTuner) -> None:
    """How often each node was called, and why one stayed eager."""
    session = running_session()
    assert session is not None
    reasons = {made.key.fusion_id: made.reason + f": {made.detail}" * (made.reason != "won") for made in tuner.answers}
    for made in tuner.answers:
        if made.candidate.config == ((STRATEGY, PARTS),):
            reasons[made.key.fusion_id] = "its parts run one by one"
    for total in usage_of(session.context.routers).nodes.values():
        node = total.node
        reason = "covered by a group" if node.covered else reasons.get(node.fusion_id, "not asked for")
        found.nodes.append(Used(node.slot.node.operation_names, total.calls, total.fused_calls, reason))
        if node.broken:
            found.problems.append(f"fell back to eager: {node.slot.node.operation_names}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/ptx train", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS), help=f"default {','.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args(words)
    names = options.only.split(",")
    if not set(names) <= set(MODELS):
        parser.error(f"expected some of {','.join(MODELS)}, found {options.only!r}")
    torch.set_num_threads(1)
    rows, is_wrong = {}, False
    for name in names:
        found = train(name, options.steps)
        rows[f"train {name}"] = row = found.to_json()
        print(name, json.dumps(row, indent=1), flush=True)
        is_wrong |= bool(found.problems) or found.error > WITHIN or not found.kernels
    if options.json is not None:
        for name, row in rows.items():
            keep(options.json, name, {"standing in": STANDING_IN, **row})
    return int(is_wrong)
