"""Trackers of experiments: the totals of a run, written to what a person already uses.

In: a run's numbers by name. Out: TensorBoard, MLflow or Weights & Biases have them. A sink is any function of the
numbers and a step; those below take what these libraries hand out, so that none is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Sink = Callable[[Mapping[str, float], int | None], None]


def tensorboard(writer: Any) -> Sink:
    """``writer``: a ``SummaryWriter``."""

    def write(numbers: Mapping[str, float], step: int | None) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def mlflow(client: Any) -> Sink:
    """``client``: the module ``mlflow``, in a run of its own or the active one."""

    def write(numbers: Mapping[str, float], step: int | None) -> None:
        client.log_metrics({name.replace("/", "."): value for name, value in numbers.items()}, step=step)

    return write


def wandb(run: Any) -> Sink:
    """``run``: what ``wandb.init()`` gives."""

    def write(numbers: Mapping[str, float], step: int | None) -> None:
        run.log(dict(numbers), step=step)

    return write
