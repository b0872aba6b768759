"""Train a transformer of torch's own layers in bfloat16 autocast on sequences of many lengths, with padding."""

import random
import sys

import torch
from torch import nn

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
random.seed(0)
torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self, width=256, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)

    def forward(self, tokens, is_padding):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=is_padding))


model = Tagger().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
generator = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    batch, length = random.randint(4, 12), random.choice((48, 64, 80, 96, 112))
    tokens = torch.randint(500, (batch, length), generator=generator).to(DEVICE)
    tags = torch.randint(20, (batch, length), generator=generator).to(DEVICE)
    lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator).to(DEVICE)
    is_padding = torch.arange(length, device=DEVICE) >= lengths
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        scores = model(tokens, is_padding)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tags.masked_fill(is_padding, -100).flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
