"""Checks that this machine has what autofuse needs.

In: the settings. Out: findings; where something is missing, with the command to type. Each check stands alone: one that
raises becomes a finding of its own, the others still run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.codegen.triton.key import find_triton
from autofuse.codegen.triton.targets import LIMITS, target_of
from autofuse.db.file_systems import network_type
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store
from autofuse.errors import AutofuseError, CompilerError, FleetError, StoreVersionError
from autofuse.private_files import check_above, check_beside
from autofuse.settings.layers import Settings

TORCH_RANGE: Final = ((2, 11), (2, 16))  # as in pyproject.toml: from, up to but not including

LEAST_BYTES, SOME_BYTES = 2**26, 2**30  # of a disk: less is an error, or worth a note
CLOCK_FILES: Final = "/sys/devices/system/clocksource/clocksource0"
FAST_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter")  # read without a call of the kernel
SLOW_CLOCK_US, CLOCK_CALLS = 0.5, 20_000  # tsc takes 0.03 to 0.1 us, hpet and acpi_pm over 1 us
SILENT_SECONDS = 600.0  # without a heartbeat of a daemon, which makes one at each job
MANAGERS: Final = (
    ("apt-get", "apt-get install"),
    ("dnf", "dnf install"),
    ("zypper", "zypper install"),
    ("pacman", "pacman -S"),
    ("apk", "apk add"),
)
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+) *(?P<bounds>[<>=\d.,]*)")
_BOUND = re.compile(r"(>=|<)([\d.]+)")

# Compiled and run as kernels are: OpenMP, vector math, a shared object loaded into this process.
_TEST_SOURCE = """\
#include <math.h>
#include <stdint.h>
__attribute__((visibility("default"))) int64_t autofuse_doctor(int64_t n) {
    double total = 0.0;
    #pragma omp parallel for reduction(+:total)
    for (int64_t i = 0; i < n; i++) total += expf(0.0f);
    return (int64_t)total;
}
"""


# Run by a process of its own: it brings torch, and a driver in trouble may take the process down.
_GPU_PROBE = """\
import json, torch
from autofuse.gpu.devices import device_count, gpu_device, supports_bf16
from autofuse.gpu.driver import torch_driver
found = {"build": "", "gpus": [], "driver": "", "problem": ""}
if torch.version.hip or torch.version.cuda:
    found["build"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
for index in range(device_count()):
    gpu = gpu_device(index)
    found["gpus"].append([gpu.name, gpu.isa, gpu.cores, gpu.memory_bytes, supports_bf16(index)])
if found["gpus"]:
    try:
        found["driver"] = torch_driver().path
    except Exception as error:
        found["problem"] = str(error)
print(json.dumps(found))
"""
# What a GPU's driver puts there, whether or not torch can use it.
GPU_FILES = (("/dev/nvidiactl", "NVIDIA", "cuda"), ("/dev/kfd", "AMD", "rocm"))
_NOT_NEEDED = "not needed: torch sees no GPU"


class Gpu(NamedTuple):
    """One GPU, as torch sees it."""

    name: str
    isa: str
    multiprocessors: int
    memory_bytes: int
    has_bf16: bool  # in hardware


@dataclass(frozen=True)
class GpuFacts:
    """What a process with torch says of the GPUs."""

    build: str  # "CUDA 12.8", "ROCm 6.4"; empty for a torch of the CPU
    gpus: tuple[Gpu, ...]
    driver: str  # its library
    problem: str  # why that cannot be loaded


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    ok: bool
    found: str
    remedy: str = ""  # what to type, where not ok
    essential: bool = True  # without it nothing is fused; otherwise only something is lost


def examine(settings: Settings, only: Collection[str] = ()) -> Iterator[Finding]:
    """All checks, or ``only`` those of these names, in the order in which to mend what they find."""
    checks: list[tuple[str, Callable[[Settings], Finding]]] = [
        ("Python", _check_python),
        ("torch", _check_torch),
        ("packages", _check_packages),
        ("torch's private names", _check_private_names),
        ("C compiler", _check_compiler),
        ("graphs in C", _check_graphs_in_c),
        ("OpenMP", _check_openmp),
        ("vector math", _check_vector_math),
        ("cores", _check_cores),
        ("GPU", _check_gpu),
        ("GPU driver", _check_gpu_driver),
        ("Triton", _check_triton),
        ("GPU launcher", _check_gpu_launcher),
        ("clock", _check_clock),
        ("store", _check_store),
        ("disk", _check_disk),
        ("daemon", _check_daemon),
        ("fleet", _check_fleet),
    ]
    for name, check in checks:
        if only and name not in only:
            continue
        try:
            yield check(settings)
        except Exception as error:
            yield Finding(name, False, f"the check itself failed: {error}", "autofuse doctor, once this is mended")


def _check_python(settings: Settings) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = f"{install_command('python3')}, for 3.11, 3.12 or 3.13"
    return Finding("Python", ok, f"{version} at {sys.executable}", remedy)


def _check_torch(settings: Settings) -> Finding:
    low, high = (".".join(map(str, version)) for version in TORCH_RANGE)
    remedy = f"pip install 'torch>={low},<{high}'"
    try:
        text = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", False, "not installed", remedy)
    parts = text.split("+")[0].split(".")
    inside = TORCH_RANGE[0] <= (int(parts[0]), int(parts[1])) < TORCH_RANGE[1]
    return Finding("torch", inside, text if inside else f"{text}, outside of {low} up to {high}", remedy)


def _check_packages(settings: Settings) -> Finding:
    """All others that autofuse needs, in the versions that it is made for."""
    wrong, count = [], 0
    for line in importlib.metadata.requires("autofuse") or ():
        found = _REQUIREMENT.fullmatch(line)
        if found is None or found["name"] == "torch":  # of an extra; or has a check of its own
            continue
        count += 1
        try:
            version = importlib.metadata.version(found["name"])
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or not all(_is_within(version, *bound) for bound in _BOUND.findall(found["bounds"])):
            wrong.append((f"{found['name']} {version or 'not installed'}", f"'{found['name']}{found['bounds']}'"))
    if not wrong:
        return Finding("packages", True, f"all {count} are there")
    asked = " ".join(requirement for _, requirement in wrong)
    return Finding("packages", False, "; ".join(found for found, _ in wrong), f"pip install {asked}")


def _is_within(version: str, operator: str, bound: str) -> bool:
    """Whether a version keeps to a bound such as ``>= 2.0``; numbers alone are compared."""
    ours, theirs = ([int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]] for text in (version, bound))
    ours, theirs = ([*numbers, 0, 0][:3] for numbers in (ours, theirs))
    return ours >= theirs if operator == ">=" else ours < theirs


def _check_private_names(settings: Settings) -> Finding:
    """In a process of its own, as all that imports torch."""
    code = (
        "import json\n"
        "from autofuse.torch_compat import count, missing\n"
        "print(json.dumps([count(), [[g.purpose, g.lost, g.is_essential, names] for g, names in missing().items()]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the probe ended without a word"])[-1])
    names, lacks = json.loads(done.stdout.splitlines()[-1])
    return names_finding(names, [Lack(*lack) for lack in lacks])


class Lack(NamedTuple):
    """Private names of torch that are gone."""

    purpose: str
    lost: str  # what does not work without them
    is_essential: bool  # nothing does
    names: Sequence[str]


def names_finding(count: int, lacks: Sequence[Lack]) -> Finding:
    """Tells which of torch's private names, ``count`` in all, are gone."""
    name = "torch's private names"
    if not lacks:
        return Finding(name, True, f"all {count} that autofuse uses are there")
    found = "; ".join(f"{', '.join(lack.names)} gone ({lack.purpose}): {lack.lost}" for lack in lacks)
    low, high = (".".join(map(str, version)) for version in TORCH_RANGE)
    remedy = f"pip install 'torch>={low},<{high}', or pip install --upgrade autofuse"
    return Finding(name, False, found, remedy, any(lack.is_essential for lack in lacks))


def _check_compiler(settings: Settings) -> Finding:
    remedy = f"{install_command('gcc')}, or name one: export AUTOFUSE_CC=/path/to/gcc"
    try:
        toolchain = find_toolchain(settings.run.cc or None)
        library = compile_source(_TEST_SOURCE, toolchain, toolchain.flags, timeout=60.0)
    except CompilerError as error:
        return Finding("C compiler", False, str(error).splitlines()[0], remedy)
    with tempfile.TemporaryDirectory(prefix="autofuse-doctor-") as folder:
        path = Path(folder, "test.so")
        path.write_bytes(library)
        # In a process of its own: the library brings its OpenMP runtime, and a crash stays there.
        call = f"import ctypes; assert ctypes.CDLL({str(path)!r}).autofuse_doctor(ctypes.c_int64(1000)) == 1000"
        if subprocess.run([sys.executable, "-c", call], capture_output=True, timeout=60).returncode != 0:
            return Finding("C compiler", False, f"what {toolchain.path} compiled does not run", remedy)
    return Finding("C compiler", True, f"{toolchain.version} at {toolchain.path}")


def _check_graphs_in_c(settings: Settings) -> Finding:
    """In a process of its own: what is loaded there reaches into torch."""
    code = (
        "from autofuse.codegen.c.build import find_toolchain\n"
        "from autofuse.wrapper.native_library import compile_runner, load_runner\n"
        f"load_runner(compile_runner(find_toolchain({settings.run.cc or None!r})).binary)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return Finding("graphs in C", True, "captured graphs can be called from C")
    last = (done.stderr.strip().splitlines() or [f"the probe ended with {done.returncode}"])[-1]
    remedy = "nothing to do: captured graphs are called from Python, some us an operator slower"
    return Finding("graphs in C", False, last, remedy, False)


def _check_openmp(settings: Settings) -> Finding:
    """Kernels must share torch's OpenMP runtime; two in one process fight over the cores."""
    code = (
        "import torch\n"
        "print(torch.get_num_threads(), *sorted({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("OpenMP", False, f"import torch fails: {last}", "pip install --force-reinstall torch")
    threads, *libraries = done.stdout.split()
    runtimes = [path for path in libraries if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    if not runtimes:
        return Finding(
            "OpenMP", False, "this torch has no OpenMP runtime; kernels run on one thread", "pip install torch", False
        )
    return Finding("OpenMP", True, f"{Path(runtimes[0]).name} of torch, {threads} threads")


def _check_vector_math(settings: Settings) -> Finding:
    remedy = "nothing to do: kernels with exp, tanh and the like are slower, and eager may win there"
    try:
        level = find_toolchain(settings.run.cc or None).libmvec
    except CompilerError:
        return Finding("vector math", False, "unknown without a C compiler", "see C compiler", False)
    if level == 0:
        return Finding("vector math", False, "no libmvec; it comes with glibc on x86-64", remedy, False)
    some = "exp, log, sin, cos and pow" if level == 1 else "all functions"
    return Finding("vector math", True, f"libmvec of glibc, {some}")


def _check_cores(settings: Settings) -> Finding:
    cores = len(os.sched_getaffinity(0))
    remedy = "autofuse run --tune wait, so that tuning and the script take turns"
    found = f"{cores} usable" if cores > 1 else "only one: tuning in the background slows the script"
    return Finding("cores", cores > 1, found, remedy, False)


@functools.cache
def gpu_facts() -> GpuFacts:
    """Asked once for all checks. Raises RuntimeError with the probe's last line."""
    done = subprocess.run([sys.executable, "-c", _GPU_PROBE], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the probe ended without a word"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return GpuFacts(found["build"], tuple(Gpu(*gpu) for gpu in found["gpus"]), found["driver"], found["problem"])


def _check_gpu(settings: Settings) -> Finding:
    facts = gpu_facts()
    build = f"torch is built for {facts.build or 'the CPU only'}"
    if facts.gpus:
        described = [
            f"{gpu.name} ({gpu.isa}, {gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 2**30:.0f} GiB"
            f"{'' if gpu.has_bf16 else ', no bf16'})"
            for gpu in facts.gpus
        ]
        unknown = [gpu for gpu in facts.gpus if target_of(gpu.isa) not in LIMITS]
        remedy = "nothing to do: its nodes run on eager's kernels, since its limits are not known"
        return Finding("GPU", not unknown, f"{', '.join(described)}; {build}", remedy, False)
    for path, vendor, wheel in GPU_FILES:
        if Path(path).exists():
            remedy = (
                f"check it with nvidia-smi or rocm-smi; install a torch for it: https://pytorch.org, choose {wheel}"
            )
            return Finding("GPU", False, f"a driver of {vendor} is here, but torch sees no GPU; {build}", remedy, False)
    return Finding("GPU", True, f"none; {build}")


def _check_gpu_driver(settings: Settings) -> Finding:
    facts = gpu_facts()
    if not facts.gpus:
        return Finding("GPU driver", True, _NOT_NEEDED)
    remedy = "check the driver with nvidia-smi or rocm-smi"
    return Finding("GPU driver", not facts.problem, facts.problem or facts.driver, remedy, False)


def _check_triton(settings: Settings) -> Finding:
    try:
        triton = find_triton()
    except CompilerError as error:
        found, _, remedy = str(error).partition("; ")
        if not gpu_facts().gpus:
            return Finding("Triton", True, f"{_NOT_NEEDED} ({found})")
        return Finding("Triton", False, found, remedy.partition(": ")[2] or remedy, False)
    return Finding("Triton", True, f"{triton.package} {triton.version}; compiles kernels without a C compiler")


def _check_gpu_launcher(settings: Settings) -> Finding:
    if not gpu_facts().gpus:
        return Finding("GPU launcher", True, _NOT_NEEDED)
    try:
        find_toolchain(settings.run.cc or None)
    except CompilerError:
        found = "through ctypes, some us a launch slower than the one in C"
        return Finding("GPU launcher", False, found, "see C compiler", False)
    return Finding("GPU launcher", True, "in C, compiled at the first use of a GPU")


def _check_store(settings: Settings) -> Finding:
    path = settings.run.store
    remedy = "choose another: autofuse run --store PATH, or export AUTOFUSE_STORE=PATH"
    try:
        if path.exists():
            with Store.open(path, readonly=True):
                pass
            with path.open("r+b"):
                pass
        else:
            folder = next(parent for parent in path.parents if parent.exists())
            if folder == path.parent:
                check_beside(path)
            else:
                check_above(path.parent)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        return Finding("store", False, f"{path} cannot be written: {error.strerror}", remedy)
    except StoreVersionError as error:
        return Finding("store", False, str(error), "pip install --upgrade autofuse; or " + remedy)
    except AutofuseError as error:
        return Finding("store", False, str(error), remedy)
    kind = network_type(path)
    found = (
        f"{path} on {kind}, which other machines may share: a store on a local disk is faster" if kind else str(path)
    )
    return Finding("store", True, found if path.exists() else f"{found}, to be made by the first run")


def _check_disk(settings: Settings) -> Finding:
    """Room for the store, and for the files of a compilation."""
    folder = next(parent for parent in settings.run.store.parents if parent.exists())
    free = {str(place): shutil.disk_usage(place).free for place in (folder, Path(tempfile.gettempdir()))}
    place, least = min(free.items(), key=lambda item: item[1])
    found = f"{least / 2**30:.1f} GiB free at {place}"
    if place == str(folder):
        remedy = f"autofuse store prune --store {settings.run.store}, or export AUTOFUSE_STORE=PATH on a larger disk"
    else:
        remedy = f"make room: du -sh {place}/* | sort -h | tail, or export TMPDIR=PATH on a larger disk"
    return Finding("disk", least >= SOME_BYTES, found, remedy, least < LEAST_BYTES)


def _check_clock(settings: Settings) -> Finding:
    """Races measure some us: a clock that is asked through the kernel adds its own time, and noise."""
    began = time.perf_counter()
    for _ in range(CLOCK_CALLS):
        time.perf_counter()
    cost_us = (time.perf_counter() - began) / CLOCK_CALLS * 1e6
    try:
        source, others = (
            Path(CLOCK_FILES, name).read_text().strip() for name in ("current_clocksource", "available_clocksource")
        )
    except OSError:
        source, others = "unknown", ""
    found = f"source {source}, {1000 * cost_us:.0f} ns a call"
    better = next((name for name in FAST_CLOCKS if name in others.split()), "")
    remedy = "nothing to do: races take more rounds here"
    if better and better != source:
        remedy = f"echo {better} | sudo tee {CLOCK_FILES}/current_clocksource"
    return Finding("clock", cost_us < SLOW_CLOCK_US, found, remedy, False)


def _check_daemon(settings: Settings) -> Finding:
    from autofuse.daemon import control  # here, so that a broken tuner is a finding and not the end of the examination

    state = control.status(settings)
    if state is None:
        return Finding("daemon", True, "not running; 'autofuse run' starts it when there is work")
    found = f"process {state.pid}, {state.state}, {state.queued} queued"
    silent = time.time() - state.heartbeat_at if state.heartbeat_at else 0.0
    if silent < SILENT_SECONDS:
        return Finding("daemon", True, found)
    option = f" --store {settings.run.store}" if settings.origin("run.store") == "command line" else ""
    remedy = f"autofuse daemon stop{option}; autofuse daemon logs{option} says what it did last"
    return Finding("daemon", False, f"{found}, no sign of life for {silent:.0f} s", remedy)


def _check_fleet(settings: Settings) -> Finding:
    if not settings.fleet.url:
        return Finding("fleet", True, "none; docs/guides/fleet.md tells how hosts share what is tuned")
    try:
        with contextlib.closing(FleetServer(settings.fleet.url, settings.fleet.connect_seconds)) as server:
            server.check()
    except FleetError as error:
        return Finding("fleet", False, str(error), "autofuse fleet status, once this is mended", False)
    return Finding("fleet", True, f"{server.path} answers")


def install_command(package: str) -> str:
    """The command that installs a package with this system's package manager."""
    command = next((command for name, command in MANAGERS if shutil.which(name)), "apt-get install")
    return f"{'' if os.geteuid() == 0 else 'sudo '}{command} {package}"
