"""Fit a sine wave with a small network: the shortest training loop there is, without functions or a main guard.

python examples/train_mlp.py
autofuse run examples/train_mlp.py
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(1, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(1, 501):
    x = torch.rand(1024, 1) * 6.0 - 3.0
    loss = (model(x) - torch.sin(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item()!r}")
