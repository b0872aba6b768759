"""Dropout of several kinds: the random numbers of the device must be those that eager draws, in the same order."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.2, self.training)
        y = nn.functional.alpha_dropout(self.down(y), 0.1, self.training)
        return x + nn.functional.dropout(y, 0.1, self.training) + 0.01 * torch.randn_like(x)


model = nn.Sequential(nn.Dropout(0.1), Block(256), Block(256), nn.Linear(256, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    x = torch.randn((48, 64, 97)[step % 3], 256, generator=generator).to(DEVICE)
    loss = model(x).logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drawn = torch.rand(3, device=DEVICE).sum()  # what the script draws itself comes after ours
    print(f"step {step} loss {loss.item() + drawn.item()!r}", flush=True)
