"""A small training script whose losses are printed to the bit: element-wise work, a softmax and a norm."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((256,), 0.9)), nn.Parameter(torch.full((256,), 0.1))
        self.up = nn.Linear(256, 256)

    def forward(self, x):
        for _ in range(3):
            x = torch.relu(x * self.scale + self.shift) - x * 0.25
        x = self.up(x)
        return (F.layer_norm(F.softmax(x, -1) * x, (256,)) * 0.5 + x).square().mean()


def main(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(steps):
        loss = net(torch.randn(256, 256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
