"""The GPUs of this machine that requests of other hosts may use, as a process with torch tells them.

In: the driver's files. Out: the keys of devices that are free. Guarantee: where no driver is installed, nothing is
started; nobody waits for the process, and it is started only while somebody asks; a GPU on which others have memory is
not free, since what they run has no priority there that we could yield to.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autofuse.detached import python_module

DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's
FREE_SECONDS = 600.0  # an answer holds for so long; then our own workers leave, or they would look like others
PATIENCE_SECONDS = 120.0  # with a process that imports torch and starts CUDA; a driver in trouble may hang


class Gpus:
    """The models of GPU here, and whether they are free."""

    def __init__(
        self,
        command: Sequence[str] = (),
        driver_files: Sequence[str] = DRIVER_FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``command``: what to run instead of our own process."""
        self._command = command
        self._driver_files = driver_files
        self._clock = clock
        self._is_free: dict[str, bool] = {}
        self._told_at = float("-inf")
        self._asked_at = 0.0
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the last answer is fresh enough."""
        return self._clock() - self._told_at <= FREE_SECONDS

    def models(self) -> tuple[str, ...]:
        """The keys of all GPUs here, as they were told last. The first call asks, the next ones know."""
        if self._told_at == float("-inf"):
            self._ask()
        return tuple(self._is_free)

    def free(self) -> tuple[str, ...]:
        """The keys of those that nobody uses, as of the last FREE_SECONDS; none while that is being found out."""
        self._ask()
        return tuple(key for key, is_free in self._is_free.items() if is_free) if self.is_known else ()

    def close(self) -> None:
        """End the process, if it is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self) -> None:
        """Start the process where the last answer is old; take its answer where it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._hear(self._process.communicate()[0])
        elif self._process is not None and self._clock() - self._asked_at > PATIENCE_SECONDS:
            self.close()
            self._hear("{}")
        elif self._process is None and not self.is_known:
            self._start()

    def _start(self) -> None:
        if not any(Path(name).exists() for name in self._driver_files):
            self._hear("{}")
            return
        command, environment = python_module("autofuse.daemon.workers.list_gpus")
        try:
            self._process = subprocess.Popen(
                self._command or command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:  # too many processes, say
            self._hear("{}")
        self._asked_at = self._clock()

    def _hear(self, answer: str) -> None:
        """Take an answer; one that cannot be read, such as of a torch without CUDA, names no GPU."""
        self._process, self._told_at = None, self._clock()
        try:
            found = json.loads(answer)
            self._is_free = {str(key): is_free is True for key, is_free in found.items()}
        except (ValueError, AttributeError):
            self._is_free = {}
