"""Train a small Llama from transformers, two micro-batches a step."""

import random
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = int(sys.argv[1])
ACCUMULATE = 2

random.seed(0)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

for step in range(1, STEPS + 1):
    total = 0.0
    for _ in range(ACCUMULATE):
        tokens = torch.randint(0, 1000, (random.choice([1, 2, 3]), random.randrange(24, 81, 8)))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / ACCUMULATE
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {total!r}", flush=True)
