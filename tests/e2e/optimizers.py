"""A training loop with what optimizers meet: parameter groups, a scheduler, clipping, a missing gradient, a reload."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
names = sys.argv[2:] or ["AdamW"]
results = {}
for name in names:
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(12)])
    extra = {"AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True}, "RMSprop": {"centered": True}}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    chosen = extra.get(name, {})
    make = lambda groups, name=name, chosen=chosen: getattr(torch.optim, name)(groups, lr=2e-3, **chosen)  # noqa: E731
    optimizer = make(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    steps = []
    optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
    for step in range(16):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 24)).square().mean() + 0.1 * model[0](torch.ones(24)).sum()
        loss.backward()
        if step == 9:
            model[3].weight.grad = None  # one parameter less, once
        if step == 12:  # what was saved goes on elsewhere
            state = optimizer.state_dict()
            optimizer = make([{**g, "params": g["params"]} for g in groups])
            optimizer.load_state_dict(state)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = model[0].weight._version
        optimizer.step()
        assert model[0].weight._version > before, "autograd must see that a parameter changed"
        scheduler.step()
    assert len(steps) == 12, len(steps)
    results[name] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(results, sys.argv[1])
