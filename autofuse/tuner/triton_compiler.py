"""The daemon's handle on the process in which Triton compiles.

In: a source, a target, assumptions; and where Triton's files are kept. Out: an `Artifact`.
Guarantee: a source that does not compile, crashes the compiler or keeps it busy for too long is a `CandidateProblem`
with the status to record, and the next request finds a new process; a Triton that is missing or too old is a
`CompilerError` that says what to type. Triton is never imported here. Temporary files of the process, also of one that
was killed, stand in a private folder in memory, where there is one, and go with the process; those of a daemon that
was killed go with the next one.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.key import clean_environment, find_triton
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.debug import Level, tell
from autofuse.errors import StoreError
from autofuse.tuner.worker_process import CandidateProblem, Main, Refused, WorkerProcess

MODULE = "autofuse.daemon.workers.triton_compile"
TIMEOUT_SECONDS = 120.0  # a kernel takes 0.1 to 2 s; with far too large blocks it may take hours
MEMORY_BYTES = 8 << 30  # address space, beyond what importing Triton takes
_ENOUGH_BYTES = 256 << 20  # free room that temporary files need
IN_MEMORY = Path("/dev/shm")
_PREFIX = "autofuse-triton-"

LoadFiles = Callable[[str], Mapping[str, bytes] | None]
SaveFiles = Callable[[str, Mapping[str, bytes]], None]


class TritonCompiler:
    """A process that compiles Triton, started at the first request and again after each loss."""

    def __init__(
        self,
        load: LoadFiles,
        save: SaveFiles,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        is_stopping: Callable[[], bool] = lambda: False,
        stderr: IO[bytes] | int | None = None,
        tend: Callable[[int], float] | None = None,
        in_memory: Path = IN_MEMORY,
    ) -> None:
        """``load`` and ``save`` keep Triton's files, as ``Kernels.get_triton_files`` and ``put_triton_files`` do;
        ``tend``: as in `WorkerProcess`; ``in_memory``: the folder for temporary files, if it is there and has room."""
        self._load = load
        self._save = save
        self._folders = _Folders(in_memory)
        self._clean_up = weakref.finalize(self, self._folders.remove)
        self.process = WorkerProcess(
            memory_bytes=memory_bytes,
            timeout_seconds=timeout_seconds,
            is_stopping=is_stopping,
            stderr=stderr,
            main=Main(MODULE, environment=self._folders.environment),
            answers={"load": self._answer_load, "save": self._answer_save},
            tend=tend,
        )

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def generation(self) -> int:
        """A number that grows with each started process."""
        return self.process.generation

    def start(self) -> None:
        """Start the process, unless it runs, without waiting for it. Raises CompilerError without a usable Triton."""
        find_triton()
        self.process.start()

    def compile(
        self, source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool = False
    ) -> Artifact:
        """Compile all passes of a source under each of the assumptions; ``reads_code`` as in `compile_source`.

        Raises CandidateProblem ("compile_error", "crash", "timeout", "out_of_memory"), CompilerError without a usable
        Triton, Interrupted once ``is_stopping``.
        """
        find_triton()
        try:
            reply = self.process.ask(
                "compile",
                source=source.to_json(),
                target=target,
                assumptions=[[a.is_aligned, list(a.divisible)] for a in assumptions],
                reads_code=reads_code,
            )
        except CandidateProblem as problem:
            told = f"{problem.status}: {problem}"
            tell(Level.COMPILER, lambda: f"Triton, {source.name} for {target}: {told}")
            raise
        try:
            artifact = Artifact.unpack(base64.b64decode(reply["artifact"]))
        except StoreError as error:
            raise Refused("compile_error", f"the compile process sent no artifact: {error}") from None
        tell(Level.COMPILER, lambda: _said(artifact))
        return artifact

    def close(self) -> None:
        """End the process and remove its files; the next request starts a new one."""
        self.process.kill()
        self._folders.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where the store cannot be read or written, sources are compiled again.

    def _answer_load(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            files = self._load(str(question["key"]))
        except StoreError:
            files = None
        return {"files": files and {name: base64.b64encode(data).decode() for name, data in files.items()}}

    def _answer_save(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._save(str(question["key"]), {n: base64.b64decode(data) for n, data in question["files"].items()})
        except StoreError:
            return {"is_saved": False}
        return {"is_saved": True}


def _said(artifact: Artifact) -> str:
    """The compiler's results for a source as text: a line for each image."""
    lines = [f"Triton, {artifact.source.name} for {artifact.target}: {len(artifact.images)} images"]
    for image in artifact.images:
        found, assumed = image.resources, image.assumptions
        lines.append(
            f"  {image.function} (aligned: {assumed.is_aligned}, divisible: {', '.join(assumed.divisible) or 'none'}): "
            f"{found.registers} registers, {found.spill_bytes} bytes spilled, {found.shared_bytes} bytes shared, "
            f"{found.threads} threads, {len(image.image)} bytes"
        )
    return "\n".join(lines)


class _Folders:
    """The temporary folder of the current compile process, locked for as long as this process lives."""

    def __init__(self, in_memory: Path) -> None:
        self._in_memory = in_memory
        self._folder: tuple[str, int] | None = None  # path and descriptor

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of a new process, with a new temporary folder."""
        self.remove()
        parent = _parent(self._in_memory)
        _remove_abandoned(parent)
        self._folder = path, _ = _make_locked(parent)
        return {**clean_environment(variables), "TMPDIR": path}

    def remove(self) -> None:
        if self._folder is not None:
            path, descriptor = self._folder
            self._folder = None
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _make_locked(parent: Path) -> tuple[str, int]:
    """A new folder of mode 0700, and the descriptor that holds its lock.

    Until it is locked it looks abandoned: whoever else cleans up just then takes it, and another one is made.
    """
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = _lock(path)
            if os.path.exists(path):
                return path, descriptor
            os.close(descriptor)


def _lock(folder: str | Path) -> int:
    """Lock a folder; the descriptor that holds the lock. Raises OSError where it is locked or cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of daemons that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _parent(in_memory: Path) -> Path:
    """The parent of temporary folders: in memory if there is room, else the system's choice."""
    with contextlib.suppress(OSError):
        room = os.statvfs(in_memory)
        if room.f_bavail * room.f_frsize >= _ENOUGH_BYTES and os.access(in_memory, os.W_OK | os.X_OK):
            return in_memory
    return Path(tempfile.gettempdir())
