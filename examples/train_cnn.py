"""Train a small residual network on pictures that it draws itself, at a resolution that changes from step to step.

Plain PyTorch. Each picture is noise with a grating of one of ten directions in it; the network is to tell which.
Batches come in many resolutions, as in multi-scale training.

    python examples/train_cnn.py --steps 1000
    autofuse run examples/train_cnn.py --steps 1000
"""

import argparse
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 10


# ---- the model -----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, channels = [], width
        for stage in range(3):
            for block in range(blocks):
                wider = width * 2**stage
                stages.append(Residual(channels, wider, 2 if stage and not block else 1))
                channels = wider
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images, targets):
        """Images are (batch, 3, height, width), targets (batch,); returns the mean loss."""
        x = self.stages(self.stem(images))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


# ---- the data ------------------------------------------------------------------------------------


def batches(batch_size, smallest, largest, generator):
    """Batches for ever, each of one resolution: noise, with a grating whose direction is the class."""
    while True:
        height, width = (int(torch.randint(smallest // 4, largest // 4 + 1, (), generator=generator)) * 4 for _ in "hw")
        targets = torch.randint(CLASSES, (batch_size,), generator=generator)
        angles = (targets * (math.pi / CLASSES)).view(-1, 1, 1, 1)
        phases = torch.rand(batch_size, 3, 1, 1, generator=generator) * (2 * math.pi)
        y, x = torch.arange(height).view(1, 1, -1, 1), torch.arange(width).view(1, 1, 1, -1)
        gratings = torch.sin(1.2 * (x * angles.cos() + y * angles.sin()) + phases)
        yield gratings + 1.5 * torch.randn(batch_size, 3, height, width, generator=generator), targets


# ---- training ------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a residual network on drawn pictures of varying size.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=2, help="residual blocks a stage")
    parser.add_argument("--smallest", type=int, default=24, help="least height and width, a multiple of 4")
    parser.add_argument("--largest", type=int, default=56, help="largest height and width, a multiple of 4")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    data = batches(options.batch_size, options.smallest, options.largest, generator)
    model = ResNet(options.width, options.blocks).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    training = 0.0
    for step in range(1, options.steps + 1):
        images, targets = (tensor.to(options.device) for tensor in next(data))
        start = time.perf_counter()
        loss = model(images, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training += time.perf_counter() - start
        if step % options.log_every == 0 or step == options.steps:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    # On stderr, so that the output of two runs can be compared.
    print(f"{options.steps} steps in {training:.1f} s, without drawing pictures", file=sys.stderr)


if __name__ == "__main__":
    main()
