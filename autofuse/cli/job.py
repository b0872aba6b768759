"""What ``autofuse run`` hands from the command line to ``launch``."""

from __future__ import annotations

from dataclasses import dataclass

from autofuse.settings.layers import Settings
from autofuse.startup.script import Target


@dataclass(frozen=True)
class RunJob:
    """A script to run, and its settings; with None the script runs without autofuse."""

    target: Target
    settings: Settings | None
