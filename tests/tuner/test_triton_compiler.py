"""The compile process is killed at will, and what it once compiled nobody compiles again."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofuse import debug
from autofuse.codegen.triton import key as keys
from autofuse.codegen.triton.key import clean_environment
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource
from autofuse.db.store import Store
from autofuse.errors import CompilerError, StoreError
from autofuse.tuner import triton_compiler
from autofuse.tuner.ipc import Interrupted
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.worker_process import CandidateProblem
from tests.codegen.triton.sources import elementwise, row_softmax, two_passes

ALL = [NOTHING_ASSUMED, Assumptions(True, ("s0",))]


class Files:
    """A store in memory, which counts."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, bytes]] = {}
        self.saves = 0

    def load(self, key: str) -> dict[str, bytes] | None:
        return self.held.get(key)

    def save(self, key: str, files: Mapping[str, bytes]) -> None:
        self.saves += 1
        self.held.setdefault(key, {}).update(files)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def compiler(files: Files) -> Iterator[TritonCompiler]:
    with TritonCompiler(files.load, files.save, timeout_seconds=60.0) as opened:
        yield opened


def endless() -> TritonSource:
    """Sorting 16384 numbers in one warp: minutes in LLVM."""
    source = elementwise(block=16384, num_warps=1)
    text = source.text.replace("x = tl.load(x_ptr + at, mask=at < s0)", "x = tl.sort(tl.load(x_ptr + at))")
    return dataclasses.replace(source, text=text)


# ---- a process that does not survive ------------------------------------------------------------------------


def test_a_compiler_that_hangs_is_killed_and_the_next_request_works(files: Files) -> None:
    with TritonCompiler(files.load, files.save, timeout_seconds=30.0) as compiler:
        compiler.compile(elementwise(), "cuda:90", ALL)
        compiler.process.timeout_seconds = 2.0
        with pytest.raises(CandidateProblem) as caught:
            compiler.compile(endless(), "cuda:90", [NOTHING_ASSUMED])
        assert caught.value.status == "timeout" and compiler.pid is None
        compiler.process.timeout_seconds = 30.0
        compiler.compile(row_softmax(), "cuda:90", ALL)
        assert compiler.generation == 2


def test_a_compiler_that_dies_is_a_crash_and_the_next_request_works(files: Files) -> None:
    deaths = iter([True])

    def load(key: str) -> dict[str, bytes] | None:
        if next(deaths, False):
            assert compiler.pid is not None
            os.kill(compiler.pid, signal.SIGSEGV)
        return files.load(key)

    with TritonCompiler(load, files.save) as compiler:
        with pytest.raises(CandidateProblem, match="SIGSEGV") as caught:
            compiler.compile(elementwise(), "cuda:90", ALL)
        assert caught.value.status == "crash"
        assert len(compiler.compile(elementwise(), "cuda:90", ALL).images) == 2
        assert compiler.generation == 2


def test_a_compiler_without_memory_is_a_status(files: Files) -> None:
    with TritonCompiler(files.load, files.save, memory_bytes=1 << 20) as compiler:
        with pytest.raises(CandidateProblem) as caught:
            compiler.compile(elementwise(), "cuda:90", ALL)
        assert caught.value.status == "out_of_memory"


def test_a_wait_ends_when_the_daemon_is_asked_to_stop(files: Files) -> None:
    stops: list[bool] = []

    def load(key: str) -> None:
        stops.append(True)

    with TritonCompiler(load, files.save, is_stopping=lambda: bool(stops)) as compiler:
        with pytest.raises(Interrupted):
            compiler.compile(elementwise(), "cuda:90", ALL)
        assert compiler.pid is None


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from autofuse.tuner.triton_compiler import TritonCompiler\n"
        "from tests.codegen.triton.sources import elementwise\n"
        "compiler = TritonCompiler(lambda key: None, lambda key, files: None)\n"
        "compiler.compile(elementwise(), 'cuda:90', [])\n"
        "print(compiler.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pid = int(ran.stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


# ---- what it leaves behind -----------------------------------------------------------------------------------


def test_nothing_is_left_behind_and_the_home_folder_is_not_touched(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "memory" / "autofuse-triton-of-one-that-was-killed").mkdir()
    with TritonCompiler(files.load, files.save, in_memory=tmp_path / "memory") as compiler:
        compiler.compile(two_passes(), "cuda:90", ALL)
        (folder,) = (tmp_path / "memory").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.rglob("*")] == ["memory"]
    assert capfd.readouterr() == ("", "")
    kept = {Path(name).suffix for held in files.held.values() for name in held}
    assert kept == {".cubin", ".json"} and len(files.held) == 4


def test_without_triton_no_process_is_started(compiler: TritonCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "installed_triton", lambda: None)
    with pytest.raises(CompilerError, match=r"expected Triton 3\.6 or newer, found none; install it with: pip install"):
        compiler.compile(elementwise(), "cuda:90", ALL)
    with pytest.raises(CompilerError):
        compiler.start()
    assert compiler.pid is None and compiler.generation == 0


# ---- Triton's cache in the store -------------------------------------------------------------------------------

COUNTING = """
import json, subprocess, sys
from pathlib import Path
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from autofuse.codegen.triton import cache
from autofuse.codegen.triton.compile import compile_source
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions
from autofuse.db.store import Store
from tests.codegen.triton.sources import two_passes

stages = []
for backend in (CUDABackend, HIPBackend):
    for name in ("make_ttir", "make_ttgir", "make_llir", "make_ptx", "make_cubin", "make_amdgcn", "make_hsaco"):
        if hasattr(backend, name):
            def counted(*args, inner=getattr(backend, name), name=name):
                stages.append(name)
                return inner(*args)
            setattr(backend, name, staticmethod(counted) if isinstance(vars(backend)[name], staticmethod) else counted)
commands = []
run = subprocess.run
subprocess.run = lambda command, *a, **k: (commands.append(command), run(command, *a, **k))[1]

store = Store.open(Path(sys.argv[1]))
cache.install(store.kernels.get_triton_files, store.kernels.put_triton_files)
made = [compile_source(two_passes(), t, [NOTHING_ASSUMED, Assumptions(True, ("s0",))]) for t in sys.argv[2:]]
builds = [command for command in commands if "ptxas" in command[0] and "--version" not in command]
print(json.dumps({"stages": stages, "builds": builds, "artifacts": [a.pack().hex() for a in made]}))
"""


def count(path: Path, *targets: str) -> dict[str, Any]:
    command = [sys.executable, "-c", COUNTING, str(path), *targets]
    environment = {**clean_environment(os.environ), "HOME": str(path.parent)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def test_a_fresh_process_with_the_same_store_compiles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    targets = ("cuda:80", "cuda:90", "hip:gfx942")
    first = count(path, *targets)
    assert first["stages"].count("make_cubin") == len(first["builds"]) == 2 * 2 * 2
    assert first["stages"].count("make_hsaco") == 2 * 2 and first["stages"].count("make_llir") == 3 * 2 * 2
    second = count(path, *targets)
    assert second["stages"] == [] and second["builds"] == []
    assert second["artifacts"] == first["artifacts"]


@pytest.mark.parametrize("name", ["%.cubin", "resources.json", "__grp__%", "af_mul_relu.json"])
@pytest.mark.parametrize("change", ["data = x'00'", "data = NULL"], ids=["damaged", "missing"])
def test_a_damaged_or_missing_file_is_compiled_again(tmp_path: Path, name: str, change: str) -> None:
    with Store.open(tmp_path / "store.db") as store:
        with TritonCompiler(store.kernels.get_triton_files, store.kernels.put_triton_files) as compiler:
            first = compiler.compile(elementwise(), "cuda:90", [NOTHING_ASSUMED])
            connection = sqlite3.connect(tmp_path / "store.db")
            with connection:
                changed = connection.execute(f"UPDATE triton_files SET {change} WHERE name LIKE ?", (name,)).rowcount
            connection.close()
            assert changed == 1
            assert compiler.compile(elementwise(), "cuda:90", [NOTHING_ASSUMED]) == first
        assert len(store.notes.events()) == (change == "data = x'00'")
        saves: list[str] = []
        with TritonCompiler(store.kernels.get_triton_files, lambda key, files: saves.extend(files)) as compiler:
            assert compiler.compile(elementwise(), "cuda:90", [NOTHING_ASSUMED]) == first
        assert saves == []


def test_a_store_in_trouble_only_costs_compilations() -> None:
    def refuse(*_: object) -> None:
        raise StoreError("locked")

    with TritonCompiler(refuse, refuse) as compiler:
        assert len(compiler.compile(elementwise(), "hip:gfx942", ALL).images) == 2
        assert len(compiler.compile(elementwise(), "hip:gfx942", ALL).images) == 2
        assert compiler.generation == 1


@pytest.mark.parametrize("level", [5, 6])
def test_what_the_compiler_made_is_told(compiler: TritonCompiler, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(debug, "say", told.append)
    debug.set_level(level)
    try:
        artifact = compiler.compile(elementwise(), "cuda:90", ALL)
        with pytest.raises(CandidateProblem):
            compiler.compile(dataclasses.replace(elementwise(), text="def broken("), "cuda:90", ALL)
    finally:
        debug.set_level(0)
    assert len(told) == (2 if level == 6 else 0)
    if told:
        made, failed = told
        assert made.startswith(f"Triton, {artifact.source.name} for cuda:90: {len(artifact.images)} images\n")
        assert all(f"  {i.function} (aligned: {i.assumptions.is_aligned}, " in made for i in artifact.images)
        assert all(f"{i.resources.registers} registers" in made for i in artifact.images)
        assert failed.startswith(f"Triton, {artifact.source.name} for cuda:90: compile_error: ")


# ---- folders ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_cleaned_away_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: Any) -> None:
    real, taken = triton_compiler._lock, []

    def lock(folder: str | Path) -> int:
        if not taken:  # another process, which cleans up, is first
            taken.append(folder)
            os.rmdir(folder)
        return real(folder)

    monkeypatch.setattr(triton_compiler, "_lock", lock)
    path, descriptor = triton_compiler._make_locked(tmp_path)
    assert taken and taken[0] != path and os.listdir(tmp_path) == [os.path.basename(path)]
    os.close(descriptor)


def test_many_compilers_begin_at_once(tmp_path: Path) -> None:
    """Each cleans up what looks abandoned before it makes a folder of its own."""
    folders = [triton_compiler._Folders(tmp_path) for _ in range(8)]

    def begin(folder: Any) -> list[str]:
        return [folder.environment({})["TMPDIR"] for _ in range(40)]

    with ThreadPoolExecutor(8) as threads:
        made = [path for paths in threads.map(begin, folders) for path in paths]
    assert len(set(made)) == len(made) == 320
    held = [folder._folder[0] for folder in folders if folder._folder is not None]
    assert len(held) == 8 and all(os.path.isdir(path) for path in held)
    for folder in folders:
        folder.remove()
    assert [p for p in made if os.path.exists(p)] == []
