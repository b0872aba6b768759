"""An Inception module at work: four branches of convolution, batch norm and ReLU, images of varying size, no gradients.

autofuse explain examples/inception.py    what fusion makes of its graph
autofuse run examples/inception.py        measures and routes it
"""

import argparse
import time

import torch
from torch import nn


class ConvBnRelu(nn.Sequential):
    """Convolution that keeps the image's size, batch norm, ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel_size: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel_size, padding=kernel_size // 2, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )


class Inception(nn.Module):
    """1x1; 1x1 to 3x3; 1x1 to 5x5; pooling to 1x1; side by side."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.one = ConvBnRelu(channels, 32, 1)
        self.three = nn.Sequential(ConvBnRelu(channels, 48, 1), ConvBnRelu(48, 64, 3))
        self.five = nn.Sequential(ConvBnRelu(channels, 8, 1), ConvBnRelu(8, 16, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvBnRelu(channels, 16, 1))

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x_NCHW), self.three(x_NCHW), self.five(x_NCHW), self.pool(x_NCHW)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="batches")
    parser.add_argument("--batch", type=int, default=4, help="images a batch")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Inception().eval()
    began = time.perf_counter()
    with torch.no_grad():
        for step in range(arguments.steps):
            height, width = 24 + 4 * (step % 5), 24 + 4 * (step % 3)
            result = model(torch.randn(arguments.batch, 64, height, width))
    seconds = time.perf_counter() - began
    print(f"{arguments.steps} batches in {seconds:.2f} s, last result {tuple(result.shape)}")


if __name__ == "__main__":
    main()
