"""Train a small byte-level GPT on the source code of Python's own standard library.

Plain PyTorch. The text is on every machine that has Python; functions and paragraphs of it are trained on whole, in
batches of similar length, so the sequence length changes from step to step.

    python examples/train_lm.py --steps 400
    autofuse run examples/train_lm.py --steps 400
"""

import argparse
import math
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
IGNORE = -100  # target of padding


# ---- the model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_dropout = nn.Dropout(dropout)
        self.output_dropout = nn.Dropout(dropout)
        future = torch.triu(torch.ones(context, context, dtype=torch.bool), diagonal=1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(width // self.heads))
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        weights = self.attention_dropout(F.softmax(scores, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.output_dropout(self.out(y))


class MLP(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, dropout):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs, targets):
        """Inputs and targets are (batch, length) of bytes; returns the mean loss over what is not padding."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=IGNORE)


# ---- the data ------------------------------------------------------------------------------------


def read_pieces(context):
    """Functions and paragraphs of the standard library, as bytes, each of at most ``context`` + 1."""
    pieces = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for piece in path.read_bytes().split(b"\n\n"):
            piece = piece.strip(b"\n")[: context + 1]
            if len(piece) > 16:
                pieces.append(piece)
    return pieces


def batches(pieces, batch_size, rng):
    """Batches for ever: pieces of similar length together, lengths in random order."""
    while True:
        pool = sorted(rng.sample(pieces, min(len(pieces), 64 * batch_size)), key=len)
        groups = [pool[i : i + batch_size] for i in range(0, len(pool) - batch_size + 1, batch_size)]
        rng.shuffle(groups)
        for group in groups:
            yield to_tensors(group)


def to_tensors(group):
    """Inputs and targets, padded to the longest piece rounded up to a multiple of 16."""
    length = math.ceil((max(map(len, group)) - 1) / 16) * 16
    inputs = torch.zeros(len(group), length, dtype=torch.long)
    targets = torch.full((len(group), length), IGNORE, dtype=torch.long)
    for row, piece in enumerate(group):
        tokens = torch.tensor(list(piece))
        inputs[row, : len(piece) - 1] = tokens[:-1]
        targets[row, : len(piece) - 1] = tokens[1:]
    return inputs, targets


# ---- training ------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=256, help="longest sequence, a multiple of 16")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm, 0 for no limit")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--compile", default="", help="torch.compile: default, dynamic, or the name of one of its modes"
    )
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.manual_seed(options.seed)
    data = batches(read_pieces(options.context), options.batch_size, random.Random(options.seed))
    model = GPT(options.layers, options.width, options.heads, options.context, options.dropout).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    if options.compile:
        keywords = {"default": {}, "dynamic": {"dynamic": True}}.get(options.compile, {"mode": options.compile})
        model = torch.compile(model, **keywords)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        inputs, targets = (tensor.to(options.device) for tensor in next(data))
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        if step % options.log_every == 0 or step == options.steps:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    # On stderr, so that the output of two runs can be compared.
    print(f"{options.steps} steps in {time.perf_counter() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
