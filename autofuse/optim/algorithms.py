"""The optimizers whose steps may be replaced, as torch's functions of them are called.

Imports nothing: whoever only looks out for them (`optim_hook`) pays nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """An optimizer as torch's function of it has it."""

    module: str  # of torch.optim; its function has the same name
    grads: str  # argument with the gradients
    states: tuple[tuple[str, str], ...]  # (argument, flag without which it is not used, "" for always)
    scalars: tuple[str, ...]  # numbers, in the order in which kernels take them
    has_steps: bool
    vendors: tuple[str, ...]  # switches of torch that have a kernel of their own


ALGORITHMS: dict[str, Algorithm] = {
    "adam": Algorithm(
        "adam", "grads", (("exp_avgs", ""), ("exp_avg_sqs", ""), ("max_exp_avg_sqs", "amsgrad")),
        ("lr", "beta1", "beta2", "eps", "weight_decay"), True, ("foreach", "fused"),
    ),
    "sgd": Algorithm(
        "sgd", "d_p_list", (("momentum_buffer_list", "momentum"),),
        ("lr", "momentum", "dampening", "weight_decay"), False, ("foreach", "fused"),
    ),
    "rmsprop": Algorithm(
        "rmsprop", "grads", (("square_avgs", ""), ("grad_avgs", "centered"), ("momentum_buffer_list", "momentum")),
        ("lr", "alpha", "eps", "weight_decay", "momentum"), True, ("foreach",),
    ),
    "adagrad": Algorithm(
        "adagrad", "grads", (("state_sums", ""),),
        ("lr", "lr_decay", "eps", "weight_decay"), True, ("foreach", "fused"),
    ),
}  # fmt: skip
