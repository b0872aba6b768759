"""An LSTM cell written by hand and unrolled in Python over sequences of several lengths."""

import random
import sys

import torch
from torch import nn

STEPS = int(sys.argv[1])
HIDDEN = 256


class Cell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)

    def forward(self, x, h, c):
        i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.cell = Cell(64, HIDDEN)
        self.out = nn.Linear(HIDDEN, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = x.new_zeros(x.shape[0], HIDDEN)
        c = torch.zeros_like(h)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], h, c)
            outputs.append(self.out(h))
        return torch.stack(outputs, dim=1)


random.seed(0)
torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, STEPS + 1):
    tokens = torch.randint(0, 500, (random.randint(24, 48), random.choice([16, 24])))
    targets = tokens % 20
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
