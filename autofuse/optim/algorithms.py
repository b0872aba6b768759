"""The optimizers whose steps may be replaced, as torch's functions of them are called.

Imports nothing: whoever only looks out for them (`optim_hook`) pays nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """The arguments of torch's functional form of an optimizer."""

    module: str  # module of torch.optim, whose function has the same name
    grads: str  # the argument with the gradients
    states: tuple[tuple[str, str], ...]  # (argument, flag with which it is used; "": always)
    scalars: tuple[str, ...]  # arguments that are numbers, in the kernels' order
    has_steps: bool
    vendors: tuple[str, ...]  # torch's switches to other implementations


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
