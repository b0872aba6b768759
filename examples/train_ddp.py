"""Train a sentence classifier on several ranks with DistributedDataParallel; sentences have different lengths.

Plain PyTorch. Each rank makes data of its own; gradients are averaged, so all ranks hold the same parameters.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 400
    torchrun --nproc-per-node 2 -m autofuse run examples/train_ddp.py --steps 400
"""

import argparse
import hashlib
import sys
import time

import torch
from torch import distributed, nn
from torch.nn import functional as F

WORDS, CLASSES = 1000, 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm_1(x)
        x = x + torch.sigmoid(self.gate(y)) * torch.tanh(self.mix(y)).cumsum(1) / (1 + x.shape[1]) ** 0.5
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Classifier(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        """Tokens are (batch, length); returns (batch, classes)."""
        return self.head(self.blocks(self.words(tokens)).mean(1))


def make_batch(size, longest, generator):
    """Random words; the class is told by the words that are smaller than their neighbours."""
    length = int(torch.randint(longest // 4, longest + 1, (), generator=generator))
    tokens = torch.randint(0, WORDS, (size, length), generator=generator)
    falls = (tokens[:, 1:] < tokens[:, :-1]).sum(1)
    return tokens, falls % CLASSES


def digest(model):
    """Of all parameters, to the bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a classifier of sentences on several ranks.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


def main():
    options = parse_arguments()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Classifier(options.width, options.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(rank)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens, classes = make_batch(options.batch_size, options.longest, generator)
        loss = F.cross_entropy(model(tokens), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % options.log_every == 0 or step == options.steps):
            print(f"step {step} loss {loss.item()!r}", flush=True)
    digests = [None] * distributed.get_world_size()
    distributed.all_gather_object(digests, digest(model))
    distributed.destroy_process_group()
    if rank == 0:
        print(f"all ranks have the same parameters: {len(set(digests)) == 1}")
        print(f"{options.steps} steps in {time.perf_counter() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
