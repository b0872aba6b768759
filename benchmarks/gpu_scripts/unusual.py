"""Plain loops, writes in place, views, data-dependent branches, integers and float64 on the device."""

import sys

import torch

STEPS, DEVICE = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
table = torch.randn(1000, 64, device=DEVICE)
weight = torch.randn(64, 64, device=DEVICE, dtype=torch.float64, requires_grad=True)
scale = torch.ones(64, device=DEVICE, requires_grad=True)


class Odd(torch.nn.Module):
    def forward(self, rows, counts):
        x = table[rows]
        y = (x * scale).double() @ weight
        y = torch.where(y > 0, y, y.exp() - 1)
        if float(y.detach().abs().mean()) > 3.0:
            y = y / y.detach().abs().amax(-1, keepdim=True)
        z = y[:, ::2].clone()
        z[:, 0] += counts.double()
        z.t()[3].mul_(2.0)
        total = torch.zeros(1000, device=DEVICE, dtype=torch.float64).index_add(0, rows, z.sum(-1))
        return total.cumsum(0)[-1] + (counts // 3 % 5).sum() + torch.logsumexp(y, -1).mean() + x.argmax(-1).sum()


odd = Odd()
for step in range(1, STEPS + 1):
    rows = torch.randint(1000, (50 + 7 * (step % 3),), device=DEVICE)
    counts = torch.randint(-20, 20, rows.shape, device=DEVICE)
    loss = odd(rows, counts)
    gradients = torch.autograd.grad(loss, (weight, scale))
    with torch.no_grad():
        for parameter, gradient in zip((weight, scale), gradients, strict=True):
            parameter -= 1e-3 * gradient / gradient.norm()
    print(f"step {step} loss {loss.item()!r}", flush=True)
