"""A training script that writes down all that each of its steps did, and what it could notice of the world around it.

``watched_steps.py MODEL STEPS OUT [PLAIN]``. In: the kind of model, and the file that a run under plain python has
written, whose parameters, buffers and optimizer states each step then begins with: a difference is one step's own, and
no rounding grows from step to step. Out: a file with one record a step. A run without PLAIN also takes each step in
float64, with the same random numbers, for a reference.
"""

import copy
import gc
import hashlib
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = self.drop(F.softmax(q @ k.transpose(-2, -1) * 0.2, dim=-1))
        x = x + self.drop(self.out(scores @ v))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(50, 32), Block(), nn.Linear(32, 50)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.block(self.embed(tokens))).view(-1, 50), targets.view(-1))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.an = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images, targets):
        x = F.relu(self.an(self.a(images)))
        x = F.relu(x + self.bn(self.b(x)))
        return F.cross_entropy(self.head(F.dropout(x.mean((2, 3)), 0.1, self.training)), targets)


def batch(kind):
    """Sizes from Python's generator, numbers from numpy's and torch's."""
    rows = random.choice([2, 4])
    if kind == "transformer":
        tokens = torch.from_numpy(np.random.randint(0, 50, (rows, random.choice([8, 12, 17]))))
        return tokens, tokens.roll(1, 1)
    images = np.random.standard_normal((rows, 3, 8, 8)).astype("float32")
    return torch.from_numpy(images), torch.randint(0, 5, (rows,))


# ---- what is compared ------------------------------------------------------------------------------------------------


def digest(value):
    return hashlib.sha256(value).hexdigest()[:16]


def generators():
    return {
        "python": digest(repr(random.getstate()).encode()),
        "numpy": digest(repr([v.tobytes() if hasattr(v, "tobytes") else v for v in np.random.get_state()]).encode()),
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "cuda": [digest(s.numpy().tobytes()) for s in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def loggers():
    known = {"root": logging.root} | {n: v for n, v in logging.root.manager.loggerDict.items() if n == "torch"}
    return {name: (one.level, [(type(h).__name__, h.level) for h in one.handlers]) for name, one in known.items()}


def world():
    """Whatever of the process a script could notice, or trip over."""
    return {
        "locale": [locale.setlocale(c) for c in (locale.LC_ALL, locale.LC_NUMERIC)],
        "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "signal mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "warnings": [str(f) for f in warnings.filters],
        "shown by": (warnings.showwarning.__module__, warnings.formatwarning.__module__),
        "recursion limit": sys.getrecursionlimit(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": _umask(),
        "loggers": loggers(),
        "hooks": [
            getattr(sys, n).__module__ for n in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
        ],
        "thread hook": threading.excepthook.__module__,
        "tracing": (sys.gettrace(), sys.getprofile(), sys.getswitchinterval()),
        "path": list(sys.path),
        "arguments": sys.argv[:3],
        "streams": [getattr(sys, n) is getattr(sys, f"__{n}__") for n in ("stdin", "stdout", "stderr")],
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "printing": (np.get_printoptions(), str(vars(torch._tensor_str.PRINT_OPTS))),
        "numpy errors": np.geterr(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.enabled,
            torch.get_float32_matmul_precision(),
            torch.get_flush_denormal() if hasattr(torch, "get_flush_denormal") else None,
        ),
        "denormals": (torch.tensor([1e-42]) * 1).item() != 0,
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
        "dynamo": plainly(torch._dynamo.config.get_config_copy()),
        "functorch": plainly(torch._functorch.config.get_config_copy()),
        "modes": (foreign_modes(), torch._C._len_torch_function_stack()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "children of main": sorted(n for n in vars(sys.modules["__main__"])),
    }


def plainly(config):
    """As text; a set has another order in each process."""
    return {name: repr(sorted(map(repr, v)) if isinstance(v, set | frozenset) else v) for name, v in config.items()}


def foreign_modes():
    """Dispatch modes, but for that which samples a step: it goes from one call of a root to the next."""
    found = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    return [type(mode).__name__ for mode in found if not getattr(mode, "is_autofuse_observer", False)]


def _umask():
    before = os.umask(0)
    os.umask(before)
    return before


# ---- steps -----------------------------------------------------------------------------------------------------------


def state_of(model, optimizer):
    moments = [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in model.parameters()]
    return {"model": copy.deepcopy(model.state_dict()), "moments": moments}


def put_state(model, optimizer, state):
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(state["model"][name])
        for p, moments in zip(model.parameters(), state["moments"], strict=True):
            for name, value in moments.items():
                optimizer.state[p][name].copy_(value)


def in_float64(model, inputs):
    """Loss and gradients of a step, with the random numbers that are next."""
    before = torch.get_rng_state()
    twin = copy.deepcopy(model).double()
    loss = twin(*(x.double() if x.is_floating_point() else x for x in inputs))
    loss.backward()
    torch.set_rng_state(before)
    return {"loss": loss.detach(), "grads": [p.grad for p in twin.parameters()]}


def main(kind, steps, out, plain=None):
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = torch.load(plain, weights_only=False) if plain else None
    model = Transformer() if kind == "transformer" else Images()
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    records = []
    for step in range(int(steps)):
        inputs = batch(kind)
        if expected is not None:
            put_state(model, optimizer, expected[step]["before"])
        record = {"sizes": tuple(inputs[0].shape), "drawn": generators(), "before": state_of(model, optimizer)}
        if expected is None:
            record["float64"] = in_float64(model, inputs)
        loss = model(*inputs)
        record["after forward"] = generators()
        optimizer.zero_grad()
        loss.backward()
        record |= {"loss": loss.detach(), "grads": [p.grad.clone() for p in model.parameters()]}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        record |= {"norm": norm, "clipped": [p.grad.clone() for p in model.parameters()]}
        optimizer.step()
        record |= {"after": state_of(model, optimizer), "after step": generators(), "world": world()}
        records.append(record)
    torch.save(records, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
