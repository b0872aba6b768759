"""Record a model's inference and a training step in CUDA graphs, and replay them."""

import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(Block(256), Block(256), nn.LayerNorm(256)).to(DEVICE)
generator = torch.Generator().manual_seed(1)


def draw():
    return torch.randn(64, 256, generator=generator).to(DEVICE)


# Inference: eager first, long enough for whoever watches, then recorded.
with torch.no_grad():
    for step in range(1, STEPS + 1):
        print(f"step {step} loss {model(draw()).square().mean().item()!r}", flush=True)
    if DEVICE == "cuda":
        given = draw()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(given)
        for step in range(STEPS + 1, STEPS + 11):
            given.copy_(draw())
            graph.replay()
            print(f"step {step} loss {found.square().mean().item()!r}", flush=True)

# Training: as the documentation of CUDA graphs does it.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
given, target = draw(), draw()


def train():
    optimizer.zero_grad(set_to_none=True)
    loss = (model(given) - target).square().mean()
    loss.backward()
    optimizer.step()
    return loss


if DEVICE == "cuda":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = train()
    for step in range(1, 11):
        given.copy_(draw())
        target.copy_(draw())
        graph.replay()
        print(f"step {step} loss {loss.item()!r}", flush=True)
