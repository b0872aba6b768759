"""A small training script with operators of a library's own: losses are printed, then how often one was called."""

import sys

import torch
from torch import nn

import autofuse

CALLS = []


def scaled_in_torch(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def gradients_in_torch(g, x, w, eps):
    r, h = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), g * w
    return r * h - x * r.pow(3) * (h * x).mean(-1, keepdim=True), (g * x * r).sum(0)


@torch.library.custom_op("mylib::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    CALLS.append(1)
    return scaled_in_torch(x, w, eps)


@torch.library.custom_op("mylib::scaled_backward", mutates_args=())
def scaled_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return gradients_in_torch(g, x, w, eps)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


scaled.register_fake(lambda x, w, eps=1e-6: torch.empty_like(x))
scaled_backward.register_fake(lambda g, x, w, eps: (torch.empty_like(x), torch.empty_like(w)))
scaled.register_autograd(lambda ctx, g: (*scaled_backward(g, *ctx.saved_tensors, ctx.eps), None), setup_context=keep)

if "plain" not in sys.argv:
    wrong = "wrong" in sys.argv
    autofuse.register_unfused(scaled, (lambda x, w, eps: x * w) if wrong else scaled_in_torch)
    autofuse.register_unfused("mylib::scaled_backward", gradients_in_torch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.w = nn.Linear(256, 256), nn.Parameter(torch.rand(256))

    def forward(self, x):
        return torch.relu(scaled(self.up(x), self.w)) * 0.5 + x


torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    loss = net(torch.randn(384, 256)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
with torch.no_grad():
    print(net(torch.randn(384, 256)).sum().item())
print(len(CALLS), file=sys.stderr)
