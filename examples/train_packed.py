"""Train a tagger on sentences of very different lengths, packed one after the other without padding.

Plain PyTorch. All words of a batch lie in one tensor; each knows its sentence and its place. Words are looked up, mixed
with the mean of their sentence (an ``index_add`` and a gather), and classified; words that are not labelled are ignored
by the loss. The number of words and of sentences differs from batch to batch.

    python examples/train_packed.py --steps 400
    autofuse run examples/train_packed.py --steps 400
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

WORDS, TAGS = 2000, 24


class Block(nn.Module):
    """Each word with the mean of its sentence, through a gated layer; a residual."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.value, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x, sentences, lengths):
        """x is (words, width), sentences (words,), lengths (sentences,)."""
        normed = self.norm(x)
        sums = torch.zeros(len(lengths), x.shape[1]).index_add(0, sentences, normed)
        means = (sums / lengths.unsqueeze(1))[sentences]
        return x + self.out(F.silu(self.gate(normed)) * self.value(normed + means))


class Tagger(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, TAGS)

    def forward(self, words, places, sentences, lengths, tags):
        x = self.words(words) * 2.0 + self.places(places)
        for block in self.blocks:
            x = block(x, sentences, lengths)
        return F.cross_entropy(self.head(x), tags, ignore_index=-1)


def batch(sentences, generator):
    """Lengths with a long tail; tags that depend on a word and its sentence's first word; a tenth is not labelled."""
    lengths = (torch.rand(sentences, generator=generator).pow(3) * 120 + 4).long()
    owner = torch.arange(sentences).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(owner)) - starts[owner]
    words = torch.randint(0, WORDS, (len(owner),), generator=generator)
    tags = (words + words[starts][owner]) % TAGS
    tags[torch.rand(len(owner), generator=generator) < 0.1] = -1
    return words, places, owner, lengths.float(), tags


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Tagger(options.width, options.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    spent = 0.0
    for step in range(1, options.steps + 1):
        few = int(torch.randint(options.sentences // 2, options.sentences + 1, (), generator=generator))
        given = batch(few, generator)
        began = time.perf_counter()
        loss = model(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.perf_counter() - began
        if step % options.log_every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    print(f"milliseconds a step {spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
