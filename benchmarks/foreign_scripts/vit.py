"""Train a small vision transformer from transformers; the last batch of each epoch is smaller."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

STEPS = int(sys.argv[1])

torch.manual_seed(0)
images = torch.randn(76, 3, 48, 48)
labels = torch.randint(0, 10, (76,))
loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
config = ViTConfig(
    image_size=48,
    patch_size=8,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=512,
    num_labels=10,
    hidden_dropout_prob=0.1,
)
model = ViTForImageClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

step = 0
while step < STEPS:
    for pixels, targets in loader:
        step += 1
        loss = model(pixel_values=pixels, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        if step == STEPS:
            break
