"""Train a recogniser of spoken letters on recordings of very different lengths.

Plain PyTorch. Frames of a spectrogram are thinned out by a convolution with stride, pass blocks of gated depthwise
convolutions and feed-forward layers, and are read by CTC, which finds out by itself where each letter is. Each batch is
padded to its longest recording; what is padding is masked.

    python examples/train_speech.py --steps 300
    autofuse run examples/train_speech.py --steps 300
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

BANDS, LETTERS = 40, 28  # of the spectrogram; CTC's blank is letter 0


class Block(nn.Module):
    """A gated depthwise convolution over time, then a feed-forward layer; both residual."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.gates = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.norm2, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm3, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        """x is (batch, frames, width), mask (batch, frames, 1): 1 for a frame, 0 for padding."""
        h = F.glu(self.gates(self.norm1(x)), -1) * mask
        h = self.depthwise(h.transpose(1, 2)).transpose(1, 2)
        x = x + self.out(F.silu(self.norm2(h))) * mask
        return x + 0.5 * self.down(F.silu(self.up(self.norm3(x))))


class Recogniser(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.thin = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, frames, lengths):
        """Log probabilities (frames / 2, batch, letters), and how many of them belong to each recording."""
        x = F.gelu(self.thin(frames.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths + 1) // 2
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).log_softmax(-1).transpose(0, 1), lengths


def recordings(count, patterns, generator):
    """Letters of 4 to 12 frames each, in noise; frames (count, longest, bands), lengths, letters, how many letters."""
    frames, letters = [], []
    for _ in range(count):
        spoken = torch.randint(1, LETTERS, (int(torch.randint(4, 30, (), generator=generator)),), generator=generator)
        durations = torch.randint(4, 13, spoken.shape, generator=generator)
        clean = patterns[spoken.repeat_interleave(durations)]
        frames.append(clean + 0.3 * torch.randn(clean.shape, generator=generator))
        letters.append(spoken)
    lengths = torch.tensor([len(one) for one in frames])
    padded = nn.utils.rnn.pad_sequence(frames, batch_first=True)
    return padded, lengths, torch.cat(letters), torch.tensor([len(one) for one in letters])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(LETTERS, BANDS, generator=generator)
    model = Recogniser(options.width, options.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spent = 0.0
    for step in range(1, options.steps + 1):
        frames, lengths, letters, counts = recordings(options.batch_size, patterns, generator)
        began = time.perf_counter()
        scores, places = model(frames, lengths)
        loss = F.ctc_loss(scores, letters, places, counts, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.perf_counter() - began
        if step % options.log_every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    print(f"milliseconds a step {spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
