"""Two streams: one model on each, with events between them, and inputs copied from pinned memory."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


def make():
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.Softmax(-1))


first, second = make().to(DEVICE), make().to(DEVICE)
generator = torch.Generator().manual_seed(1)
streams = (torch.cuda.Stream(), torch.cuda.Stream())
with torch.no_grad():
    for step in range(1, STEPS + 1):
        host = torch.randn((64, 96, 128)[step % 3], 512, generator=generator).pin_memory()
        with torch.cuda.stream(streams[0]):
            x = host.to(DEVICE, non_blocking=True)
            y = first(x)
            ready = torch.cuda.Event()
            ready.record()
        with torch.cuda.stream(streams[1]):
            streams[1].wait_event(ready)
            y.record_stream(streams[1])
            z = second(y + 1.0) * 3.0
        torch.cuda.current_stream().wait_stream(streams[1])
        print(f"step {step} loss {z.square().sum().item()!r}", flush=True)
