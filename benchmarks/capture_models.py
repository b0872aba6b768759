"""Twelve models of different kinds, trained as scripts train them, for `capture.py --costs`.

    autofuse run benchmarks/capture_models.py NAME SECONDS FILE

In: the name of a model. Out: a JSON file with the time and the size of each step, and what autofuse knew before the
capture and said after it. Sizes come from a generator of the script's own, so two runs draw the same ones.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

AFTER = 48  # steps after the capture
draw = random.Random(0)


class Task(NamedTuple):
    model: nn.Module
    batch: Callable[[], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]


# ---- transformers ---------------------------------------------------------------------------------------------------


def tokens(vocabulary: int, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (draw.choice(sizes), draw.choice(lengths)))
    return {"input_ids": ids, "labels": ids}


def own_loss(result: Any, batch: dict[str, Any]) -> torch.Tensor:
    return result.loss


def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=4000, n_positions=256, n_embd=256, n_layer=4, n_head=4, use_cache=False, **ends)
    return Task(GPT2LMHeadModel(config), lambda: tokens(4000, (4, 8), (48, 64, 96)), own_loss)


def bert() -> Task:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=4000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return Task(BertForMaskedLM(config), lambda: tokens(4000, (4, 8), (32, 64, 128)), own_loss)


def llama() -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    return Task(LlamaForCausalLM(config), lambda: tokens(4000, (4,), (48, 64, 96)), own_loss)


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.place = nn.Parameter(torch.zeros(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layers(x).mean(1))


# ---- convolutions with batch norm -----------------------------------------------------------------------------------


def normed(from_: int, to: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(from_, to, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(to))


class Residual(nn.Module):
    def __init__(self, from_: int, to: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normed(from_, to, 3, stride), normed(to, to)
        self.past = normed(from_, to, 1, stride) if stride != 1 or from_ != to else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.past(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.stem = nn.Sequential(normed(3, 32), nn.ReLU())
        blocks = []
        for before, width in zip((32, *widths), widths, strict=False):
            blocks += [Residual(before, width, 1 if before == width else 2), Residual(width, width, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [normed(3, 32, 3, 2), nn.Hardswish()]
        for from_, to, stride in ((32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
            layers += [normed(from_, from_, 3, stride, from_), nn.Hardswish(), normed(from_, to, 1), nn.Hardswish()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.pair(3, 16), self.pair(16, 32)
        self.middle = self.pair(32, 64)
        self.up, self.top = self.pair(96, 32), self.pair(48, 16)
        self.head = nn.Conv2d(16, 3, 1)

    @staticmethod
    def pair(from_: int, to: int) -> nn.Sequential:
        return nn.Sequential(normed(from_, to), nn.ReLU(), normed(to, to), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.top(torch.cat([F.interpolate(b, scale_factor=2), a], 1)))


def images(sizes: tuple[int, ...], side: int) -> dict[str, Any]:
    number = draw.choice(sizes)
    return {"x": torch.randn(number, 3, side, side), "wanted": torch.randint(0, 10, (number,))}


def class_loss(result: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(result, batch["wanted"])


# ---- recurrent, unrolled in Python ----------------------------------------------------------------------------------


class UnrolledLSTM(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(1000, width), nn.LSTMCell(width, width), nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        found = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            found.append(h)
        return self.head(torch.stack(found, 1))


class HandGRU(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embed(ids))
        h = x.new_zeros(x.shape[0], x.shape[2] // 3)
        for step in range(x.shape[1]):
            r, z, n = x[:, step].chunk(3, -1)
            hr, hz, hn = self.outer(h).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            h = self.norm((1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h)
        return self.head(h)


def next_token(result: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    ids = batch["ids"]
    if result.dim() == 2:
        return F.cross_entropy(result, ids[:, -1])
    return F.cross_entropy(result[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---- small modules --------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x[:, :10]


class Mixture(nn.Module):
    """Experts of several kinds, weighed by a gate."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        acts = (nn.GELU, nn.SiLU, nn.Tanh, nn.ReLU, nn.Softplus, nn.ELU)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width))
            for act in acts * 2
        )
        self.gate = nn.Linear(width, len(self.experts))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        x = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(x)


class Broken(nn.Module):
    """Looks at values between its blocks, where Dynamo's graphs end."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(6)
        )
        self.head = nn.Linear(width, 10)
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number % 2:
                self.seen = float(x.detach().abs().max())
        return self.head(x)


def rows(width: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    number = draw.choice(sizes)
    return {"x": torch.randn(number, width), "wanted": torch.randint(0, 10, (number,))}


TASKS: dict[str, Callable[[], Task]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "vit": lambda: Task(VisionTransformer(), lambda: images((8, 16), 32), class_loss),
    "resnet": lambda: Task(ResNet(), lambda: images((8, 16), 32), class_loss),
    "mobilenet": lambda: Task(MobileNet(), lambda: images((16,), 48), class_loss),
    "unet": lambda: Task(UNet(), lambda: images((4, 8), 64), lambda y, b: F.mse_loss(y, b["x"])),
    "lstm": lambda: Task(UnrolledLSTM(), lambda: {"ids": torch.randint(0, 1000, (16, 24))}, next_token),
    "gru": lambda: Task(HandGRU(), lambda: {"ids": torch.randint(0, 1000, (draw.choice((16, 32)), 16))}, next_token),
    "mlp": lambda: Task(MLP(), lambda: rows(512, (256, 512)), class_loss),
    "mixture": lambda: Task(Mixture(), lambda: rows(128, (1024, 2048)), class_loss),
    "broken": lambda: Task(Broken(), lambda: rows(256, (512, 1024)), class_loss),
}


def main(name: str, most_seconds: float, out: Path) -> None:
    """Train until the model is captured, and a while on."""
    torch.manual_seed(0)
    ends, left = time.perf_counter() + most_seconds, AFTER
    task = TASKS[name]()
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    taken: list[tuple[float, int, str]] = []  # seconds, elements of the inputs, state of the root afterwards
    while left and time.perf_counter() < ends:
        batch = task.batch()
        arguments = {k: v for k, v in batch.items() if k != "wanted"}
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(task.model(**arguments), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        seconds = time.perf_counter() - began
        state = state_of(task.model)
        taken.append((seconds, sum(v.numel() for v in arguments.values()), state))
        left -= state == "captured"
    out.write_text(json.dumps({"model": name, "steps": taken, "root": described(task.model)}))


def state_of(model: nn.Module) -> str:
    if "autofuse.runtime.session" not in sys.modules:
        return "plain"
    from autofuse.sessions import current_session

    current = current_session()
    return str(current.roots.root_of(model).state) if current is not None else "plain"


def described(model: nn.Module) -> dict[str, Any]:
    """What autofuse knows of the root at the end."""
    if state_of(model) == "plain":
        return {}
    from dataclasses import asdict

    from autofuse.observer.capture_cost import RootTraits
    from autofuse.sessions import current_session

    current = current_session()
    assert current is not None
    root = current.roots.root_of(model)
    traits = root.traits or RootTraits(0)
    return {**asdict(root.record()), "traits": asdict(traits), "factor": root.factor}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
