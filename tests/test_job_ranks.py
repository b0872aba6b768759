"""Launchers tell a process of its job in environment variables."""

from __future__ import annotations

import pytest

from autofuse.job_ranks import ToldRanks, told_ranks


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "4", "RANK": "3"}, ToldRanks("WORLD_SIZE", 4, 3)),
        ({"WORLD_SIZE": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, ToldRanks("SLURM_STEP_NUM_TASKS", 2, 0)),
        ({"SLURM_NTASKS": "8"}, None),  # of a batch script, which runs once
        ({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9"}, ToldRanks("OMPI_COMM_WORLD_SIZE", 16, 9)),
        ({"WORLD_SIZE": "two", "RANK": "1"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "-"}, ToldRanks("PMI_SIZE", 2, 0)),
    ],
)
def test_the_job_of_a_process(environment: dict[str, str], expected: ToldRanks | None) -> None:
    assert told_ranks(environment) == expected
