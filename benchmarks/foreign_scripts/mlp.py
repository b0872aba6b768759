"""A network for tables with categories and numbers: no functions, no main guard."""

import sys

import numpy as np
import torch
from torch import nn

np.random.seed(0)
torch.manual_seed(0)
data = torch.from_numpy(np.random.randn(20000, 64).astype("float32"))
target = (data[:, :8].sum(1, keepdim=True) + 0.5 * torch.sin(data[:, 8:9])).detach()

net = nn.Sequential(
    nn.Linear(64, 512), nn.BatchNorm1d(512), nn.SiLU(), nn.Dropout(0.2),
    nn.Linear(512, 512), nn.BatchNorm1d(512), nn.SiLU(), nn.Dropout(0.2),
    nn.Linear(512, 256), nn.LayerNorm(256), nn.GELU(),
    nn.Linear(256, 1),
)  # fmt: skip
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
sizes = [256, 512, 768, 1024]

for step in range(1, int(sys.argv[1]) + 1):
    rows = np.random.randint(0, len(data), sizes[np.random.randint(len(sizes))])
    x, y = data[rows], target[rows]
    loss = nn.functional.smooth_l1_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
