"""Train a Hugging Face model of 4 layers from its configuration, batch and length drawn for each step; plain PyTorch.

    python train_transformer.py gpt2 --steps 150
    autofuse run train_transformer.py gpt2 --steps 150

STARTUP_STAMPS names a file for the clock after each step.
"""

import argparse
import json
import os
import random
import time

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 1000


def make(kind):
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=4, n_head=4)
        return GPT2LMHeadModel(config)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(intermediate_size=1024, **sizes))
    return LlamaForCausalLM(LlamaConfig(intermediate_size=688, max_position_embeddings=256, **sizes))


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=("gpt2", "bert", "llama"))
parser.add_argument("--steps", type=int, default=150)
options = parser.parse_args()

torch.manual_seed(0)
random.seed(0)
model = make(options.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, stamps = [], [time.monotonic()]
for _ in range(options.steps):
    ids = torch.randint(0, VOCABULARY, (random.choice([4, 8]), random.randint(64, 128)))
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    stamps.append(time.monotonic())
if "STARTUP_STAMPS" in os.environ:
    with open(os.environ["STARTUP_STAMPS"], "w") as file:
        json.dump({"stamps": stamps, "losses": losses}, file)
print(losses[-1])
