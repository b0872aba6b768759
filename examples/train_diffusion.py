"""Train a small diffusion model: a U-Net learns to predict the noise in pictures of discs and bars.

Plain PyTorch, as denoising diffusion models are trained: a cosine schedule, a U-Net with group norms, an embedding of
the time and attention at its lowest resolution, AdamW, clipped gradients, and a moving average of the weights. Pictures
come in three sizes, one for each batch.

    python examples/train_diffusion.py --steps 200
    autofuse run examples/train_diffusion.py --steps 200
"""

import argparse
import copy
import math
import time

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with group norms; the time is added between them."""

    def __init__(self, given, width, time_width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, given), nn.Conv2d(given, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.skip = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Each place of the picture looks at all others."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, t = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, t), nn.SiLU(), nn.Linear(t, t))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down1, self.down2 = Residual(width, width, t), Residual(width, 2 * width, t)
        self.middle, self.attention = Residual(2 * width, 2 * width, t), Attention(2 * width)
        self.up2, self.up1 = Residual(4 * width, width, t), Residual(2 * width, width, t)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, times):
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = times[:, None] * 1000 * rates
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.first(x)
        fine = self.down1(x, t)
        coarse = self.down2(F.avg_pool2d(fine, 2), t)
        h = self.attention(self.middle(F.avg_pool2d(coarse, 2), t))
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2.0), coarse], 1), t)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2.0), fine], 1), t)
        return self.last(F.silu(self.norm(h)))


def pictures(count, size, generator):
    """Discs and bars, from -1 to 1."""
    place = torch.linspace(-1, 1, size)
    y, x = place[:, None], place[None, :]
    centre = torch.rand(count, 2, 1, 1, generator=generator) - 0.5
    radius = torch.rand(count, 1, 1, generator=generator) * 0.4 + 0.2
    discs = ((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2 < radius**2).float()
    bars = ((x - centre[:, 0]).abs() < radius / 3).float().expand(count, size, size)
    is_disc = torch.rand(count, 1, 1, generator=generator) < 0.5
    return (torch.where(is_disc, discs, bars) * 2 - 1).unsqueeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[24, 32, 40])
    parser.add_argument("--log-every", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = UNet(options.width)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    spent = 0.0
    for step in range(1, options.steps + 1):
        size = options.sizes[int(torch.randint(len(options.sizes), (), generator=generator))]
        clean = pictures(options.batch_size, size, generator)
        began = time.perf_counter()
        times, noise = torch.rand(len(clean)), torch.randn_like(clean)
        signal = torch.cos(times * math.pi / 2)[:, None, None, None]
        noisy = signal * clean + (1 - signal**2).sqrt() * noise
        loss = F.mse_loss(model(noisy, times), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.01)
        spent += time.perf_counter() - began
        if step % options.log_every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    weight = sum(p.double().abs().sum().item() for p in average.parameters())
    print(f"average of the weights: checksum {weight!r}")
    print(f"milliseconds a step {spent / options.steps * 1e3:.1f}")


if __name__ == "__main__":
    main()
