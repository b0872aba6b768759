"""Serve a classifier of texts over HTTP, in batches that are made while requests come in.

Needs ``pip install fastapi httpx``. A request waits at most some milliseconds for others; those that wait run as one
batch, padded to the longest. The clients are part of the script: they speak to the application without a network, so
many at a time. At the end: how long requests took, and how many were answered in a second.

    python examples/serve.py --requests 1000
    autofuse run examples/serve.py --requests 1000
"""

import argparse
import asyncio
import random
import statistics
import time

import httpx
import torch
from fastapi import FastAPI
from pydantic import BaseModel
from torch import nn
from torch.nn import functional as F

WORDS, CLASSES, PAD = 4000, 16, 0


class Block(nn.Module):
    """Attention over the words that are no padding, then a feed-forward layer; both residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        """x is (batch, words, width), mask (batch, 1, 1, words): True for a word."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width, padding_idx=PAD), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, ids):
        is_word = ids != PAD
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, is_word[:, None, None, :])
        kept = is_word.unsqueeze(-1).to(x.dtype)
        mean = (self.norm(x) * kept).sum(1) / kept.sum(1)
        return self.head(mean).softmax(-1)


class Batches:
    """Takes texts one by one and runs them together."""

    def __init__(self, model, most, wait):
        self.model, self.most, self.wait = model, most, wait
        self.queue = asyncio.Queue()
        self.sizes = []

    async def answer(self, ids):
        future = asyncio.get_running_loop().create_future()
        await self.queue.put((ids, future))
        return await future

    async def run(self):
        while True:
            waiting = [await self.queue.get()]
            deadline = time.monotonic() + self.wait
            while len(waiting) < self.most and (left := deadline - time.monotonic()) > 0:
                try:
                    waiting.append(await asyncio.wait_for(self.queue.get(), left))
                except TimeoutError:
                    break
            padded = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in waiting], batch_first=True)
            with torch.inference_mode():
                scores = self.model(padded)
            self.sizes.append(len(waiting))
            for (_, future), row in zip(waiting, scores, strict=True):
                future.set_result(row.tolist())


class Text(BaseModel):
    ids: list[int]


def application(batches):
    app = FastAPI()

    @app.post("/classify")
    async def classify(text: Text):
        scores = await batches.answer(text.ids)
        best = max(range(CLASSES), key=scores.__getitem__)
        return {"class": best, "probability": scores[best]}

    return app


async def serve(options):
    torch.manual_seed(0)
    drawn = random.Random(1)
    texts = [
        [drawn.randrange(1, WORDS) for _ in range(int(drawn.random() ** 2 * 120) + 8)] for _ in range(options.requests)
    ]
    batches = Batches(Classifier(options.width, options.layers).eval(), options.most, options.wait_ms / 1e3)
    worker = asyncio.create_task(batches.run())
    transport = httpx.ASGITransport(app=application(batches))
    at_once, taken, total = asyncio.Semaphore(options.clients), [], 0.0
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:

        async def ask(ids):
            async with at_once:
                began = time.perf_counter()
                found = (await client.post("/classify", json={"ids": ids}, timeout=600)).json()
                taken.append(time.perf_counter() - began)
                return found["probability"]

        began = time.perf_counter()
        total = sum(await asyncio.gather(*(ask(ids) for ids in texts)))
        seconds = time.perf_counter() - began
    worker.cancel()
    cuts = statistics.quantiles(taken, n=100)
    print(f"probabilities: checksum {total!r}")
    print(f"requests a batch {statistics.mean(batches.sizes):.1f}")
    print(f"milliseconds a request: median {cuts[49] * 1e3:.1f}")
    print(f"milliseconds a request: 99 % within {cuts[98] * 1e3:.1f}")
    print(f"requests a second {options.requests / seconds:.0f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--most", type=int, default=8, help="requests in a batch")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="that a request waits for others")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
