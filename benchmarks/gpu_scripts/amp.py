"""Train a small CNN under float16 autocast with a gradient scaler, on images of several sizes."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.AdaptiveAvgPool2d(4),
    nn.Flatten(), nn.Linear(1024, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10),
).to(DEVICE)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
generator = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    side = (24, 32, 40)[step % 3]
    images = torch.randn(16, 3, side, side, generator=generator).to(DEVICE)
    labels = torch.randint(10, (16,), generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item()!r}", flush=True)
