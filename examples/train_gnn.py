"""Train a graph network that learns to tell how many triangles touch each node, on graphs that change with each step.

Plain PyTorch. Messages go along edges by gathers and are summed at their ends by ``index_add``, as graph libraries do
without kernels of their own. No two batches have the same number of nodes and edges.

    python examples/train_gnn.py --steps 400
    autofuse run examples/train_gnn.py --steps 400
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A message for each edge from both of its ends, gated, summed at its target, then a residual update."""

    def __init__(self, width):
        super().__init__()
        self.source, self.target = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.update = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, sources, targets):
        """x is (nodes, width); sources and targets are (edges,)."""
        messages = self.source(x)[sources] + self.target(x)[targets]
        messages = F.silu(messages) * torch.sigmoid(self.gate(x)[sources])
        summed = torch.zeros_like(x).index_add(0, targets, messages)
        return x + F.gelu(self.update(torch.cat([self.norm(x), summed], -1)))


class Network(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.degrees = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, degrees, sources, targets, counts):
        x = self.degrees(degrees.clamp(max=63))
        for layer in self.layers:
            x = layer(x, sources, targets)
        return F.smooth_l1_loss(self.head(x).squeeze(-1), counts)


def graph(nodes, generator):
    """A random graph of nodes with near neighbours, both directions of each edge; degrees; triangles at each node."""
    offsets = torch.tensor([1, 2, 3, 5, 8])
    first = torch.arange(nodes).repeat_interleave(len(offsets))
    second = (first + offsets.repeat(nodes)) % nodes
    kept = torch.rand(len(first), generator=generator) < 0.7
    first, second = first[kept], second[kept]
    adjacent = torch.zeros(nodes, nodes)
    adjacent[first, second] = adjacent[second, first] = 1.0
    triangles = ((adjacent @ adjacent) * adjacent).sum(1) / 2
    sources, targets = torch.cat([first, second]), torch.cat([second, first])
    return adjacent.sum(1).long(), sources, targets, torch.log1p(triangles)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--smallest", type=int, default=500)
    parser.add_argument("--largest", type=int, default=1500)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Network(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graphs = [
        graph(int(torch.randint(options.smallest, options.largest + 1, (), generator=generator)), generator)
        for _ in range(24)
    ]
    spent = 0.0
    for step in range(1, options.steps + 1):
        batch = graphs[int(torch.randint(len(graphs), (), generator=generator))]
        began = time.perf_counter()
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.perf_counter() - began
        if step % options.log_every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    print(f"milliseconds a step {spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
