"""Train a recommender: will this user click this item?

Plain PyTorch, after the models that large sites use: embeddings of categories, a bag of embeddings for the items that a
user has seen (of very different numbers), a small network for dense features, products of all pairs of these, and a
network on top. Adagrad, binary cross entropy.

    python examples/train_recommender.py --steps 400
    autofuse run examples/train_recommender.py --steps 400
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

CATEGORIES = (5000, 1200, 300, 24, 7)  # of users, cities, devices, hours, days
ITEMS, DENSE = 8000, 13


class Recommender(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(count, width) for count in CATEGORIES)
        self.items = nn.Embedding(ITEMS, width)
        self.seen = nn.EmbeddingBag(ITEMS, width, mode="mean")
        self.dense = nn.Sequential(nn.Linear(DENSE, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        features = len(CATEGORIES) + 3
        pairs = features * (features - 1) // 2
        self.register_buffer("pairs", torch.triu_indices(features, features, 1))
        self.top = nn.Sequential(
            nn.LayerNorm(pairs + width), nn.Linear(pairs + width, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)
        )

    def forward(self, categories, item, seen, offsets, dense):
        """categories (batch, 5), item (batch,), seen (items of all bags,), offsets (batch,), dense (batch, 13)."""
        dense = self.dense(torch.log1p(dense.clamp(min=0)))
        columns = [table(column) for table, column in zip(self.categories, categories.unbind(1), strict=True)]
        features = torch.stack([*columns, self.items(item), self.seen(seen, offsets), dense], 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([products[:, self.pairs[0], self.pairs[1]], dense], 1)).squeeze(1)


def batch(size, generator):
    """Clicks that depend on the user, the item and what was seen."""

    def numbers(most, *sizes):
        return torch.randint(most, sizes, generator=generator)

    categories = torch.stack([numbers(count, size) for count in CATEGORIES], 1)
    item, dense = numbers(ITEMS, size), torch.rand(size, DENSE, generator=generator) * 100
    counts = (torch.rand(size, generator=generator).pow(4) * 60).long() + 1
    seen = numbers(ITEMS, int(counts.sum()))
    offsets = counts.cumsum(0) - counts
    score = ((categories[:, 0] + item) % 11 - 5) + (seen[offsets] % 3 - 1) + dense[:, 0] / 50
    clicks = (torch.rand(size, generator=generator) < torch.sigmoid(score.float())).float()
    return categories, item, seen, offsets, dense, clicks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Recommender(options.width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    spent = 0.0
    for step in range(1, options.steps + 1):
        *inputs, clicks = batch(options.batch_size, generator)
        began = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.perf_counter() - began
        if step % options.log_every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    print(f"milliseconds a step {spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
