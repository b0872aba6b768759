"""Small layers whose launches take longer than their work: inference and training, in the ways that CUDA graphs upset.

Results are kept across calls, gradients add up over two forward passes before their backward passes, parameters change
their memory, two streams take turns, sizes change, and the script records a graph of its own in between.
"""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * 0.5


def make():
    return nn.Sequential(*(Block(64) for _ in range(2)), nn.LayerNorm(64)).to(DEVICE)


generator = torch.Generator().manual_seed(1)


def draw(rows=32):
    return torch.randn(rows, 64, generator=generator).to(DEVICE)


line = 0


def say(value):
    global line
    line += 1
    print(f"step {line} loss {value.item()!r}", flush=True)


# Inference: every tenth result is kept, and looked at when all is done.
model, kept = make(), []
with torch.no_grad():
    for step in range(2 * STEPS):
        out = model(draw(16 if step % 50 == 49 else 32))
        if step % 10 == 0:
            kept.append(out)
            say(out.square().mean())
    for out in kept:
        say(out.abs().sum())

# Two streams in turns, and a recording of the script's own.
if DEVICE == "cuda":
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        for step in range(STEPS):
            x = draw()
            with torch.cuda.stream(streams[step // 40 % 2]):
                streams[step // 40 % 2].wait_stream(torch.cuda.default_stream())
                out = model(x)
            torch.cuda.current_stream().wait_stream(streams[step // 40 % 2])
            if step % 10 == 0:
                say(out.square().mean())
        given = draw()
        with torch.cuda.stream(streams[0]):
            for _ in range(3):
                model(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(given)
        for _ in range(10):
            given.copy_(draw())
            graph.replay()
            say(found.square().mean())
            say(model(given).abs().mean())

# Training: plainly, then two forward passes before their backward passes, then parameters that move.
trained = make()
optimizer = torch.optim.SGD(trained.parameters(), lr=0.02)
for step in range(2 * STEPS):
    losses = [(trained(x) - x.roll(1, 1)).square().mean() for x in [draw() for _ in range(1 + step % 2)]]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step >= STEPS and step % 20 == 0:
        for parameter in trained.parameters():
            parameter.data = parameter.data.clone()
    if step % 10 == 0:
        say(losses[-1])
say(sum(parameter.detach().abs().sum() for parameter in trained.parameters()))
