"""Answer requests with a small text encoder: batches and lengths vary from call to call.

Plain PyTorch, inference only. The encoder is a transformer as language models are written today: RMS norm, rotary
embedding, gated feed-forward. Requests come in batches of similar length, padded to the longest.

    python examples/infer.py --requests 1500
    autofuse run examples/infer.py --requests 1500
"""

import argparse
import math
import random
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 4096


# ---- the model -----------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x, cos, sin):
    """Rotary embedding of (batch, heads, length, head width)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Attention to all tokens that are not padding, written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, is_padding, cos, sin):
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-2, -1)
        scores = (scores * (1.0 / math.sqrt(width // self.heads))).masked_fill(is_padding, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1, self.attention = RMSNorm(width), Attention(width, heads)
        self.norm_2, self.feed_forward = RMSNorm(width), FeedForward(width)

    def forward(self, x, is_padding, cos, sin):
        x = x + self.attention(self.norm_1(x), is_padding, cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class Encoder(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        half = width // heads // 2
        angles = torch.arange(context).unsqueeze(1) * torch.exp(torch.arange(half) * (-math.log(10000.0) / half))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, tokens, is_padding):
        """Tokens and padding are (batch, length); returns one unit vector for each text."""
        length = tokens.shape[1]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, is_padding[:, None, None, :], self.cos[:length], self.sin[:length])
        kept = (~is_padding).unsqueeze(-1).to(x.dtype)
        return F.normalize((self.norm(x) * kept).sum(1) / kept.sum(1), dim=-1)


# ---- requests ------------------------------------------------------------------------------------


def requests(count, largest_batch, context, rng):
    """Batches of texts: tokens, and which of them are padding."""
    for _ in range(count):
        batch, longest = rng.randint(1, largest_batch), rng.randint(16, context)
        lengths = torch.tensor([longest] + [rng.randint(longest // 2, longest) for _ in range(batch - 1)])
        is_padding = torch.arange(longest) >= lengths.unsqueeze(1)
        tokens = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(batch)])
        yield tokens.masked_fill(is_padding, 0), is_padding


def parse_arguments():
    parser = argparse.ArgumentParser(description="Encode texts in batches of varying size.")
    parser.add_argument("--requests", type=int, default=1500, help="batches to encode")
    parser.add_argument("--batch-size", type=int, default=8, help="texts in the largest batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=256, help="tokens in the longest text")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.manual_seed(options.seed)
    model = Encoder(options.layers, options.width, options.heads, options.context).to(options.device).eval()
    answering, checksum = 0.0, 0.0
    stream = requests(options.requests, options.batch_size, options.context, random.Random(options.seed))
    with torch.no_grad():
        for number, (tokens, is_padding) in enumerate(stream, 1):
            tokens, is_padding = tokens.to(options.device), is_padding.to(options.device)
            start = time.perf_counter()
            vectors = model(tokens, is_padding)
            answering += time.perf_counter() - start
            checksum += float(vectors[0, 0])
            if number % options.log_every == 0 or number == options.requests:
                print(f"request {number} checksum {checksum!r}", flush=True)
    # On stderr, so that the output of two runs can be compared.
    print(f"{options.requests} requests in {answering:.1f} s, without making them up", file=sys.stderr)


if __name__ == "__main__":
    main()
