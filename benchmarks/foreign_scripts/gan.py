"""Two convolutional networks that train against each other, each with its optimizer."""

import sys

import torch
from torch import nn

STEPS = int(sys.argv[1])
torch.manual_seed(0)

generator = nn.Sequential(
    nn.ConvTranspose2d(32, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
    nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(64, 1, 4, 1, 0), nn.Flatten(),
)  # fmt: skip
criterion = nn.BCEWithLogitsLoss()
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

for step in range(1, STEPS + 1):
    real = torch.rand(48, 1, 32, 32) * 2 - 1
    noise = torch.randn(48, 32, 1, 1)
    ones, zeros = torch.ones(48, 1), torch.zeros(48, 1)

    fake = generator(noise)
    loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = criterion(discriminator(fake), ones)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    print(f"step {step} loss {loss_d.item() + loss_g.item()!r}", flush=True)
