"""Whole models that nnsmith draws, both passes on kernels, each node's every candidate verified.

In: a seed. Out: what differs from eager, with the model's seed. Needs `nnsmith` 0.1.0 (Liu et al., ASPLOS 2023), which
solves for operators and sizes that fit each other. Guarantee: parameters and buffers are inputs like the others: their
gradients and what they have become are compared as well; equal seeds draw equal models.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fuzz import check, samples

T = torch.Tensor
SIZES = (5, 8, 12)  # operators of a model
MOST_ELEMENTS, SOLVER_MILLISECONDS = 4096, 4000


@functools.cache
def _generator() -> tuple[Any, Callable[..., Any], Any]:
    """nnsmith's model type for PyTorch, what draws a graph, and the operators that PyTorch runs."""
    try:
        from nnsmith.abstract.extension import activate_ext
        from nnsmith.graph_gen import model_gen
        from nnsmith.materialize import Model
        from nnsmith.narrow_spec import auto_opset
    except ModuleNotFoundError as error:
        sys.exit(f"expected {error.name}, which models are drawn with; type: scripts/fuzz models")
    kind = Model.init("torch", backend_target="cpu")
    kind.add_seed_setter()
    operators = auto_opset(kind, None, vulops=False)
    activate_ext(opset=operators, factory=None)
    return kind, model_gen, operators


def model_of(seed: int) -> samples.Sample:
    """The model that a seed draws. Raises what nnsmith raises where it finds none."""
    from nnsmith.util import set_seed

    kind, model_gen, operators = _generator()
    generator = model_gen(
        opset=operators,
        method="symbolic-cinit",
        seed=seed,
        max_elem_per_tensor=MOST_ELEMENTS,
        max_nodes=random.Random(seed).choice(SIZES),
        timeout_ms=SOLVER_MILLISECONDS,
    )
    model = kind.from_gir(generator.make_concrete())
    set_seed(seed)
    net = model.torch_model.eval()
    given = net.get_random_inps()
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}

    def function(*tensors: T) -> list[T]:
        state = dict(zip(own, tensors, strict=False))
        inputs = dict(zip(given, tensors[len(own) :], strict=True))
        return list(torch.func.functional_call(net, state, kwargs=inputs))

    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (*own.values(), *given.values())]
    return samples.Sample(f"model {seed}", function, leaves)


def try_models(first: int, count: int, note: Path | None, tell: Callable[[str], None]) -> dict[str, int]:
    """Try the models of so many seeds. ``note``: a file that has the last seed, in case the process dies of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    outcome, verified = samples.Outcome(), check.Outcome()
    drawn: Counter[str] = Counter()
    for seed in range(first, first + count):
        if note is not None:
            note.write_text(f"model {seed}")
        try:
            sample = model_of(seed)
        except Exception as error:  # of nnsmith's solver
            drawn[f"no model: {type(error).__name__}"] += 1
            continue
        before = len(outcome.wrong)
        samples.try_sample(sample, outcome, seed, check.Verified(seed, verified))
        for text in outcome.wrong[before:]:
            tell(text)
    counts = {"models": outcome.ran, "nodes": verified.nodes, "candidates": verified.candidates}
    return {**counts, **outcome.skipped, **drawn}
