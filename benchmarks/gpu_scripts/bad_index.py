"""Train a model with embeddings, then read outside of a table: the device must stop as it does in eager."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 256), nn.Embedding(64, 256)
        self.norm, self.scores = nn.LayerNorm(256), nn.Linear(256, 1000)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(self.words(ids) * 2.0 + self.places(places)))


model = Words().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
places = torch.arange(64, device=DEVICE)
for step in range(1, STEPS + 1):
    ids = torch.randint(0, 1000, (32, 64), generator=generator)
    if step == STEPS:
        ids[17, 3] = 1000
    try:
        scores = model(ids.to(DEVICE), places)
        loss = F.cross_entropy(scores.flatten(0, 1), ids.clamp(max=999).to(DEVICE).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
    except RuntimeError as error:
        is_assertion = "device-side assert" in str(error)
        print(f"step {step} loss {1.0 if is_assertion else 2.0}", flush=True)
        sys.stderr.flush()
        os._exit(0)  # nothing works on the device after it, in eager neither
