"""Run out of memory on purpose, catch it as a script does that looks for its largest batch, and train on."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.cuda.set_per_process_memory_fraction(2e9 / torch.cuda.get_device_properties(0).total_memory)
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    rows = 64_000 if step % 7 == 0 else 256
    try:
        x = torch.randn(rows, 1024, generator=generator).to(DEVICE)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        print(f"step {step} loss 0.0", flush=True)
        x = loss = None
        torch.cuda.empty_cache()
        continue
    print(f"step {step} loss {loss.item()!r}", flush=True)
