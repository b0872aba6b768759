"""Train a small GPT-2 from transformers on made-up text; batch and length are drawn for each step."""

import random
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS = int(sys.argv[1])
random.seed(0)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=192, n_layer=4, n_head=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

model.train()
for step in range(1, STEPS + 1):
    batch, length = random.randint(2, 5), random.choice([32, 40, 48, 64, 80])
    tokens = torch.randint(0, 1000, (batch, length))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
