"""Trains a small transformer on new shapes without end. argv: seconds to run, a file for lines of JSON.

One step in twenty has the same shape: what it takes beside a fixed piece of plain torch tells whether steps get slower.
"""

import json
import random
import sys
import time

import torch
from meters import in_use, reference_seconds
from torch import nn

SECONDS, OUT = float(sys.argv[1]), sys.argv[2]
PROBE = (8, 48)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


torch.manual_seed(0)
draw = random.Random(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
began = said = time.monotonic()
steps, shapes, probes = 0, set(), []
with open(OUT, "w") as out:
    while time.monotonic() - began < SECONDS:
        is_probe = steps % 20 == 0
        batch, length = PROBE if is_probe else (draw.randint(1, 24), draw.randint(2, 160))
        shapes.add((batch, length))
        tokens = torch.randint(0, 256, (batch, length))
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_probe:
            probes.append((time.perf_counter() - start) / reference_seconds())
        steps += 1
        if time.monotonic() - said > 5:
            said = time.monotonic()
            line = {"at": said - began, "steps": steps, "shapes": len(shapes), "probes": probes, **in_use()}
            print(json.dumps(line), file=out, flush=True)
            probes = []
print(f"{steps} steps, {len(shapes)} shapes, loss {float(loss):.4f}")
