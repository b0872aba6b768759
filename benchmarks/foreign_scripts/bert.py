"""Masked-word training of a small BERT from transformers, with padding and an attention mask."""

import random
import sys

import torch
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

STEPS = int(sys.argv[1])


def make_batch():
    lengths = [random.randint(16, 80) for _ in range(random.randint(2, 5))]
    longest = max(lengths)
    tokens = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(5, 1000, (length,))
        mask[row, :length] = 1
    hidden = (torch.rand(tokens.shape) < 0.15) & mask.bool()
    labels = tokens.masked_fill(~hidden, -100)
    labels[:, 0] = tokens[:, 0]
    return {"input_ids": tokens.masked_fill(hidden, 3), "attention_mask": mask, "labels": labels}


def main():
    random.seed(0)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768
    )
    model = BertForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, 2000)
    for step in range(1, STEPS + 1):
        outputs = model(**make_batch())
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step} loss {outputs.loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
