"""A model whose forward pass talks to Python: prints, statistics in a list, branches on values."""

import random
import sys

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(48, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(6)
        )
        self.out = nn.Linear(256, 5)
        self.norms = []

    def forward(self, x):
        h = self.inp(x)
        for number, block in enumerate(self.blocks):
            h = h + block(h)
            if number == 2:
                size = h.abs().max().item()
                self.norms.append(size)
                if size > 50.0:
                    print("large activations", file=sys.stderr)
                    h = h / size
        if len(self.norms) > 100:
            self.norms.clear()
        return self.out(torch.tanh(h))


def main(steps):
    random.seed(0)
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    for step in range(1, steps + 1):
        x = torch.randn(random.choice([128, 256, 384]), 48)
        y = (x[:, :5] * 2).argmax(1)
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
