"""A variational autoencoder with evaluation between the steps and its best weights kept in memory."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, size=784, hidden=400, latent=20):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_var = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, size)
        )

    def forward(self, x):
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return self.decoder(z), mean, log_var


def loss_function(logits, x, mean, log_var):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return (reconstruction + divergence) / len(x)


def main():
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_out = torch.bernoulli(torch.rand(256, 784))
    best, best_state = float("inf"), None
    for step in range(1, int(sys.argv[1]) + 1):
        model.train()
        x = torch.bernoulli(torch.rand(512, 784))
        optimizer.zero_grad()
        loss = loss_function(*_with(model(x), x))
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step % 25 == 0:
            model.eval()
            with torch.no_grad():
                value = loss_function(*_with(model(held_out), held_out)).item()
            if value < best:
                best, best_state = value, copy.deepcopy(model.state_dict())
    if best_state is not None:
        print(f"best {best!r} of {len(best_state)} tensors")


def _with(outputs, x):
    logits, mean, log_var = outputs
    return logits, x, mean, log_var


if __name__ == "__main__":
    main()
