"""Train a small GPT on random tokens, batch size and length changing from step to step; plain PyTorch.

    python train_varying.py --steps 200
    autofuse run train_varying.py --steps 200

Two environment variables, for `startup.py`: STARTUP_STAMPS names a file that the clock after each step is written to
when training is over, with the losses; STARTUP_COMPILE=default or dynamic compiles the model with torch.compile.
"""

import argparse
import json
import math
import os
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

imported = time.monotonic()

VOCABULARY = 2000
CONTEXT = 192
SEED = 1


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_dropout = nn.Dropout(dropout)
        self.output_dropout = nn.Dropout(dropout)
        future = torch.triu(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool), diagonal=1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(width // self.heads))
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        weights = self.attention_dropout(F.softmax(scores, dim=-1))
        return self.output_dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    """Takes tokens and targets, (batch, length) each; returns the mean loss."""

    def __init__(self, layers, width, heads, dropout):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY), targets.reshape(-1))


def shapes():
    """(batch, length) for ever, the same in every run: mostly short, a long tail, any length; no batch of one."""
    rng = random.Random(SEED)
    while True:
        batch = rng.choices((2, 3, 4, 6, 8), weights=(1, 2, 8, 2, 1))[0]
        yield batch, min(CONTEXT, 16 + int(rng.expovariate(1 / 40)))


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT on random tokens of varying shapes.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = GPT(options.layers, options.width, 4, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = os.environ.get("STARTUP_COMPILE", "")
    if compiled:
        model = torch.compile(model, dynamic=True if compiled == "dynamic" else None)
    numbers = torch.Generator().manual_seed(SEED)
    stamps, losses, seen = [], [], []
    for step, (batch, length) in zip(range(1, options.steps + 1), shapes(), strict=False):
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=numbers)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stamps.append(time.monotonic())
        seen.append((batch, length))
        if step % 50 == 0:
            print(f"step {step} loss {losses[-1]!r}", flush=True)
    path = os.environ.get("STARTUP_STAMPS", "")
    if path:
        with open(path, "w") as file:
            json.dump({"imported": imported, "stamps": stamps, "losses": losses, "shapes": seen}, file)


if __name__ == "__main__":
    main()
