"""The two other doors on the device: torch.compile(backend="autofuse") and autofuse.optimize."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
try:
    import autofuse
except ImportError:
    autofuse = None
torch.manual_seed(0)
is_watched = autofuse is not None and "autofuse.sessions" in sys.modules
model = nn.Sequential(nn.Linear(512, 512), nn.Mish(), nn.RMSNorm(512), nn.Linear(512, 512)).to(DEVICE)


def score(x, y):
    return (nn.functional.silu(x) * y).softmax(-1).amax(-1).sum()


optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
if is_watched:
    model = torch.compile(model, backend="autofuse")
    score = autofuse.optimize(score)
generator = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    x = torch.randn((48, 64, 96)[step % 3], 512, generator=generator).to(DEVICE)
    loss = score(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
