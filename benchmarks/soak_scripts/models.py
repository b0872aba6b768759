"""Trains one new model after another, each for some seconds, as a search over settings does. argv: as shapes.py."""

import json
import random
import sys
import time

import torch
from meters import in_use
from torch import nn

SECONDS, OUT = float(sys.argv[1]), sys.argv[2]
EACH = 15.0  # seconds of training a model


def model_of(width, depth):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Linear(32, width), *layers, nn.Linear(width, 1))


torch.manual_seed(0)
draw = random.Random(0)
began = said = time.monotonic()
steps, models, probes = 0, 0, []
with open(OUT, "w") as out:
    while time.monotonic() - began < SECONDS:
        models += 1
        model = model_of(draw.choice((64, 96, 128)), draw.randint(2, 6))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        until = min(time.monotonic() + EACH, began + SECONDS)
        while time.monotonic() < until:
            x = torch.randn(draw.randint(64, 512), 32)
            loss = (model(x).squeeze(1) - x.sum(1).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if time.monotonic() - said > 5:
                said = time.monotonic()
                line = {"at": said - began, "steps": steps, "models": models, "probes": probes, **in_use()}
                print(json.dumps(line), file=out, flush=True)
print(f"{steps} steps, {models} models, loss {float(loss):.4f}")
