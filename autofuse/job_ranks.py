"""What launchers tell a process of the job that it is a rank of.

In: the environment. Out: the number of ranks, and which one this is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

# By who sets them: torchrun and accelerate, Open MPI, MPICH and Intel MPI, MVAPICH, Horovod, Slurm's srun.
_NAMES = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class ToldRanks(NamedTuple):
    """A job of several ranks, as its launcher tells."""

    variable: str  # in which it tells their number
    size: int
    rank: int


def told_ranks(environment: Mapping[str, str] = os.environ) -> ToldRanks | None:
    """The job of this process; None where no launcher tells of more than one rank."""
    for variable, rank in _NAMES:
        size = environment.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            own = environment.get(rank, "")
            return ToldRanks(variable, int(size), int(own) if own.isdecimal() else 0)
    return None
