"""Plain loops, writes in place, views, data-dependent branches, integers and float64 on the device."""

import sys

import torch


class Odd(torch.nn.Module):
    def __init__(self, weight, scale):
        super().__init__()
        self.table = torch.randn(1000, 64, device=weight.device)
        self.weight, self.scale = weight, scale

    def forward(self, rows, counts):
        x = self.table[rows]
        y = (x * self.scale).double() @ self.weight
        y = torch.where(y > 0, y, y.exp() - 1)
        if float(y.detach().abs().mean()) > 3.0:
            y = y / y.detach().abs().amax(-1, keepdim=True)
        z = y[:, ::2].clone()
        z[:, 0] += counts.double()
        z.t()[3].mul_(2.0)
        total = torch.zeros(1000, device=x.device, dtype=torch.float64).index_add(0, rows, z.sum(-1))
        return total.cumsum(0)[-1] + (counts // 3 % 5).sum() + torch.logsumexp(y, -1).mean() + x.argmax(-1).sum()


def main(steps, device):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.float64))
    scale = torch.nn.Parameter(torch.ones(64, device=device))
    odd = Odd(weight, scale)
    for step in range(1, steps + 1):
        rows = torch.randint(1000, (50 + 7 * (step % 3),), device=device)
        counts = torch.randint(-20, 20, rows.shape, device=device)
        loss = odd(rows, counts)
        gradients = torch.autograd.grad(loss, (weight, scale))
        with torch.no_grad():
            for parameter, gradient in zip((weight, scale), gradients, strict=True):
                parameter -= 1e-3 * gradient / gradient.norm()
        print(f"step {step} loss {loss.item()!r}", flush=True)


main(int(sys.argv[1]), sys.argv[2])
