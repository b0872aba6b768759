"""Models for benchmarks: built from configurations, random weights, inputs whose sizes vary from step to step.

In: a name and a seed. Out: a `Workload`: a function for each step of a deck of batches, which all contenders share.
The five Hugging Face models need `pip install transformers`; nothing is downloaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 4000
DECK = 8  # batches; all contenders see them over and over
LEARNING_RATE = 1e-4

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and how its inputs vary."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[random.Random], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None  # None: inference
    bar: float = 0.0  # least gain over eager that is asked for, where one is


@dataclass
class Workload:
    """What a contender runs: ``step(i)`` is batch i of the deck."""

    model: nn.Module
    step: Callable[[int], object]
    shapes: list[dict[str, list[int]]]


def skewed(chance: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """Mostly short, sometimes long: the product of two uniform draws."""
    value = low + (high - low) * chance.random() * chance.random()
    return max(low, round(value / multiple) * multiple)


# ---- models -----------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=256,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=96,
            patch_size=8,
            num_labels=100,
            hidden_dropout_prob=0.1,
        )
    )


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic", num_labels=100
        )
    )


def inception() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from inception import Inception

    module: nn.Module = Inception().eval()
    return module


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for width_in, width_out in ((256, 512), (512, 512), (512, 512)):
        layers += [nn.Linear(width_in, width_out), nn.LayerNorm(width_out), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(512, 100))


class Recurrent(nn.Module):
    """An LSTM written out step by step, as papers with a cell of their own do."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(width, 4 * width)
        self.state = nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 100)

    def cell(self, gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (gates + self.state(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def forward(self, x_NTC: torch.Tensor) -> torch.Tensor:
        gates = self.inputs(x_NTC)
        h = c = x_NTC.new_zeros(x_NTC.shape[0], self.width)
        for t in range(x_NTC.shape[1]):
            h, c = self.cell(gates[:, t], h, c)
        return self.head(h)


# ---- inputs and losses ---------------------------------------------------------------------------------------------


def tokens(chance: random.Random) -> Batch:
    rows, length = skewed(chance, 2, 8), skewed(chance, 24, 192)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, length), generator=generator)}


def images(size: int, low: int, high: int, varies: bool) -> Callable[[random.Random], Batch]:
    def batch(chance: random.Random) -> Batch:
        rows = skewed(chance, low, high)
        side = skewed(chance, size // 2, size, 16) if varies else size
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        return {
            "pixel_values": torch.randn(rows, 3, side, side, generator=generator),
            "labels": torch.randint(0, 100, (rows,), generator=generator),
        }

    return batch


def features(chance: random.Random) -> Batch:
    rows, side = skewed(chance, 1, 8), skewed(chance, 16, 48, 4)
    return {"x": torch.randn(rows, 64, side, side, generator=torch.Generator().manual_seed(rows))}


def vectors(low: int, high: int, length: int | None, width: int) -> Callable[[random.Random], Batch]:
    def batch(chance: random.Random) -> Batch:
        rows = skewed(chance, low, high)
        shape = (rows, width) if length is None else (rows, length, width)
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        return {
            "x": torch.randn(shape, generator=generator),
            "labels": torch.randint(0, 100, (rows,), generator=generator),
        }

    return batch


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """That which a Hugging Face model computes itself."""
    labels = batch.get("labels", batch.get("input_ids"))
    loss: torch.Tensor = model(**{**batch, "labels": labels}).loss
    return loss


def classification(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


CASES: Sequence[Case] = (
    Case("gpt2 train", gpt2, tokens, own_loss, 1.7),
    Case("llama train", llama, tokens, own_loss, 1.45),
    Case("bert train", bert, tokens, own_loss),
    Case("vit train", vit, images(96, 2, 12, False), own_loss),
    Case("resnet train", resnet, images(96, 4, 16, True), own_loss),
    Case("mlp train", mlp, vectors(64, 1024, None, 256), classification),
    Case("recurrent train", Recurrent, vectors(8, 64, 24, 192), classification),
    Case("gpt2 infer", gpt2, tokens, None),
    Case("bert infer", bert, tokens, None),
    Case("inception infer", inception, features, None),
)


def build(case: Case, fixed: bool, fused_optimizer: bool, wrap: Callable[[nn.Module], nn.Module]) -> Workload:
    """The workload of one contender; ``wrap`` compiles the model or leaves it. ``fixed``: all batches of one shape."""
    torch.manual_seed(0)
    model = case.make()
    chance = random.Random(1)
    deck = [case.batch(random.Random(1) if fixed else chance) for _ in range(DECK)]
    shapes = [{name: list(t.shape) for name, t in batch.items()} for batch in deck]
    if case.loss is None:
        run = wrap(model.eval())

        def infer(i: int) -> object:
            with torch.no_grad():
                batch = deck[i % DECK]
                return run(**batch) if "x" not in batch else run(batch["x"])

        return Workload(model, infer, shapes)
    run, loss_of = wrap(model.train()), case.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True if fused_optimizer else None)

    def train(i: int) -> object:
        optimizer.zero_grad()
        loss: Any = loss_of(run, deck[i % DECK])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Workload(model, train, shapes)
