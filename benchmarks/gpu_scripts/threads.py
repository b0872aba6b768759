"""Four threads that share one model on the device, and a model that trains meanwhile."""

import sys
import threading

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.Sigmoid()).to(DEVICE)
inputs = [torch.randn(32 * (1 + n % 3), 256, device=DEVICE) for n in range(STEPS)]
found = [[0.0] * STEPS for _ in range(4)]


def serve(number):
    with torch.no_grad():
        for step, x in enumerate(inputs):
            found[number][step] = model(x).square().mean().item()


threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
trained = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).to(DEVICE)
optimizer = torch.optim.RMSprop(trained.parameters(), lr=1e-4)
for x in inputs:
    loss = (trained(x) - x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for thread in threads:
    thread.join()
for step in range(STEPS):
    print(f"step {step + 1} loss {sum(row[step] for row in found)!r}", flush=True)
print(f"step {STEPS + 1} loss {loss.item()!r}", flush=True)
