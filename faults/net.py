"""The script that faults happen to: trains a small net on batches of varying size, and prints each loss.

argv: steps; seconds to pause after each step (0 where left out).
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 8)

    def forward(self, x, targets):
        hidden = F.gelu(self.norm(self.up(x))) * 1.5
        return F.cross_entropy(self.down(torch.sigmoid(hidden) + hidden.tanh()), targets)


torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    size = (48, 64, 17, 80)[step % 4]
    loss = net(torch.randn(size, 32), torch.randint(0, 8, (size,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.9g}", flush=True)
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
