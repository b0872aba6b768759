"""A small training script with dropout and varying lengths; prints losses that two runs can compare."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(64),
            nn.Linear(64, 256),
            nn.Linear(256, 64),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        scores = x @ x.transpose(-2, -1) * 0.125
        x = x + self.drop(F.softmax(scores, dim=-1)) @ x
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, 64), Block(), nn.Linear(64, 64)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.block(self.embed(tokens))).view(-1, 64), targets.view(-1))


def main(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lengths = [24, 40, 24, 17, 33]
    for step in range(steps):
        tokens = torch.randint(0, 64, (8, lengths[step % len(lengths)]))
        loss = model(tokens, tokens.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
