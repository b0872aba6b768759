"""Compiling C: find the system compiler, know exactly what determines a binary, compile in private.

In: C text. Out: the bytes of a shared object, and the `CompileKey` it may be cached under.
Guarantee: no environment is read here except PATH by the look-up of names; the flags never include
``-ffast-math``, which would set flush-to-zero for the whole process and break NaN; compilation happens in a
directory only this user can read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from autofuse.codegen.c.target import NATIVE, flags, march
from autofuse.codegen.knobs import contracts
from autofuse.debug import Level, tell
from autofuse.errors import CompilerError, CompilerNotReady
from autofuse.ir.device import cpu_device
from autofuse.ir.records import CompileKey, Config
from autofuse.private_files import PrivateFolder, Untrusted

BASE_FLAGS = (
    "-O3", "-march=@MARCH@", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fPIC", "-shared",
    "-fvisibility=hidden", "-std=gnu11", "-w",
)  # fmt: skip

TEND_SECONDS = 0.05  # between two calls of ``tend`` while a compiler runs

_PROBES_AT_ONCE = 3

Tend = Callable[[int], float]


@dataclass(frozen=True)
class Toolchain:
    """A compiler and what it was found to be able to do."""

    command: tuple[str, ...]  # the program, and words that always follow it, as in "ccache gcc"
    version: str  # first line of ``cc --version``
    target: str  # instruction set that -march resolves to
    libmvec: int  # 0 none, 1 exp log sin cos pow (glibc 2.22), 2 the rest too (glibc 2.35)
    openmp: bool
    is_x86: bool
    march: str = NATIVE

    @property
    def path(self) -> str:
        """The command as a person would type it."""
        return shlex.join(self.command)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of every compilation, before those of a configuration."""
        flags = tuple(f.replace("@MARCH@", self.march) for f in BASE_FLAGS if f != "-fopenmp" or self.openmp)
        return (*flags, f"-DAF_LIBMVEC={self.libmvec}") if self.libmvec else flags


def find_toolchain(cc: str | None = None, folder: PrivateFolder | None = None) -> Toolchain:
    """The given compiler, else the first of cc, gcc, clang that PATH has.

    ``folder`` keeps what the probes of a program found for later processes, since they take 0.2 s of a start. Raises
    CompilerNotReady where there is no compiler, or where it cannot build a shared object.
    """
    names = [cc] if cc else ["cc", "gcc", "clang"]
    for name in names:
        command = _command(name)
        if command:
            return probe(command, march())[0] if folder is None else _known(command, march(), folder)
    raise CompilerNotReady(
        f"expected a C compiler, found none of {', '.join(names)}; "
        "install one (apt install gcc, dnf install gcc) or name it with the setting `cc`"
    )


def _command(name: str) -> tuple[str, ...]:
    """A compiler's program, or a program with arguments, as make and configure take CC; empty where there is none."""
    path = shutil.which(name)
    if path:
        return (path,)
    with contextlib.suppress(ValueError):  # an open quote
        first, *rest = shlex.split(name) or [""]
        path = shutil.which(first)
        return (path, *rest) if path else ()
    return ()


def _known(command: tuple[str, ...], march: str, folder: PrivateFolder) -> Toolchain:
    """The toolchain that an earlier process found with the same programs, processor and C library; else probed now."""
    programs = [path for word in command if (path := shutil.which(word))]  # "ccache gcc" has two
    found_there = [os.stat(path) for path in programs]  # os.stat follows links
    identities = [(found.st_size, found.st_mtime_ns, found.st_ino) for found in found_there]
    facts = (
        command, march, [*map(os.path.realpath, programs)], identities, platform.libc_ver(), sorted(flags()),
    )  # fmt: skip
    name = f"toolchain.{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, Untrusted, ValueError, TypeError):
        fields = json.loads(folder.read(name))
        return Toolchain(**fields | {"command": command, "march": march})
    found, is_final = probe(command, march)
    if is_final:
        with contextlib.suppress(OSError, Untrusted):
            folder.write(name, json.dumps(asdict(found)).encode())
    return found


@functools.lru_cache(maxsize=8)
def probe(command: tuple[str, ...], march: str) -> tuple[Toolchain, bool]:
    """What a compiler can do, and whether all of that is its own verdict: not where, say, memory or a disk was full.

    A run of the compiler counts as successful only by the file that it has written: where a script ignores SIGCHLD, or
    waits for all of its children, the exit codes of our children are lost, and Python gives 0. The probes run side by
    side, because a script waits for them when it is first captured; one by one they take 0.4 s.
    """
    nothing = "int af_probe(void) { return 0; }"
    with tempfile.TemporaryDirectory(prefix="autofuse-cc-") as folder, ThreadPoolExecutor(_PROBES_AT_ONCE) as pool:

        def compiles(number: int, text: str, *flags: str) -> Future[bool | None]:
            return pool.submit(_compiles, command, text, flags, Path(folder, f"probe{number}"))

        version = pool.submit(_run, [*command, "--version"], 20)
        has_openmp = compiles(0, nothing, "-fopenmp")
        macros = pool.submit(_macros, command, march, Path(folder, "macros"))
        openmp = has_openmp.result()
        if not openmp and not compiles(1, nothing).result():
            raise CompilerNotReady(
                f"expected {shlex.join(command)} to build a shared object, found that it cannot; "
                f"try `{shlex.join(command)} --version`"
            )
        flags = ("-O3", f"-march={march}", "-fno-math-errno", *(("-fopenmp",) if openmp else ()))
        levels = {level: compiles(1 + level, text, *flags) for level, text in _LIBMVEC_PROBES}
        libmvec = max((level for level, found in levels.items() if found.result()), default=0)
        first_line = version.result().stdout.partition("\n")[0].strip()
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        verdicts = [openmp, *(found.result() for found in levels.values())]
        is_final = None not in (*verdicts, macros.result()) and version.result().returncode == 0 and bool(first_line)
        text = target_text(macros.result() or "")
        return Toolchain(command, first_line, text, libmvec, bool(openmp), is_x86, march), is_final


def _vector_probe(functions: Sequence[str]) -> str:
    text = ""
    for f in functions:
        text += f"#pragma omp declare simd notinbranch\nextern float {f}f(float);\n"
        text += f"void t_{f}(float* restrict y, const float* restrict x, long n) {{\n#pragma omp simd\n"
        text += f"for (long i = 0; i < n; ++i) y[i] = {f}f(x[i]); }}\n"
    return text


_LIBMVEC_PROBES = (
    (1, _vector_probe(["exp", "log", "sin", "cos"])),
    (2, _vector_probe(["exp", "tanh", "erf", "erfc", "log1p", "expm1", "exp2", "log2", "log10", "atan"])),
)


def _compiles(command: Sequence[str], text: str, flags: Sequence[str], stem: Path) -> bool | None:
    """Whether the compiler builds this text; None where it came to no verdict, and may at another time."""
    source, binary = stem.with_suffix(".c"), stem.with_suffix(".so")
    source.write_text(text)
    # --no-undefined: a vector variant that libmvec lacks must fail here, not when the kernel is loaded
    arguments = [
        *command,
        *flags,
        "-fPIC",
        "-shared",
        "-w",
        str(source),
        "-o",
        str(binary),
        "-Wl,--no-undefined",
        "-lm",
    ]
    result = _run(arguments, 60)
    if result.returncode == 0 and binary.exists():
        return True
    return False if any(sign in result.stderr for sign in (f"{source}:", *_VERDICTS)) else None


# Words that make a message a verdict: on the program, or on what is missing for it (functions of libmvec, OpenMP).
_VERDICTS = ("undefined reference", "undefined symbol", "-fopenmp", "gomp", "libomp", "-lomp")


def _macros(command: Sequence[str], march: str, place: Path) -> str | None:
    """The macros that the compiler defines for this ``-march`` here; None where the run failed."""
    result = _run([*command, f"-march={march}", "-dM", "-E", "-x", "c", "/dev/null", "-o", str(place)], 20)
    return place.read_text() if result.returncode == 0 and place.exists() else None


def target_text(macros: str) -> str:
    """The machine, its instruction set, and a digest of the macros that the compiler defines for it."""
    names = sorted(line.split()[1] for line in macros.splitlines() if line.startswith("#define __"))
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]
    return f"{platform.machine()}:{cpu_device().isa}:{digest}"


def is_for_this_cpu(target: str) -> bool:
    """Whether a stored kernel's target names this machine and its instruction set."""
    return target.split(":")[:-1] == [platform.machine(), cpu_device().isa]


def _environment() -> dict[str, str]:
    """The environment of compilers: with it their messages are in English, as `_compiles` expects."""
    return {**os.environ, "LC_ALL": "C"}


def _told(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    parts = (f"{shlex.join(result.args)}: exit code {result.returncode}", result.stdout, result.stderr)
    tell(Level.COMPILER, lambda: "\n".join(part.strip() for part in parts if part.strip()))
    return result


def _run(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return _told(
            subprocess.run(
                arguments, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=_environment()
            )
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerNotReady(
            f"expected {arguments[0]} to run, found {error}; name another compiler with `cc`"
        ) from error


def flags_for(toolchain: Toolchain, config: Config = ()) -> tuple[str, ...]:
    """All flags of a compilation: the toolchain's and those a configuration asks for."""
    knobs = dict(config)
    flags = list(toolchain.flags)
    if toolchain.is_x86 and "vector_bits" in knobs:
        flags.append(f"-mprefer-vector-width={knobs['vector_bits']}")
    if not contracts(config):
        flags.append("-ffp-contract=off")
    return tuple(flags)


def compile_key(source: str, toolchain: Toolchain, flags: Sequence[str]) -> CompileKey:
    """Exactly what determines the binary of this text."""
    return CompileKey(
        source_hash=hashlib.sha256(source.encode()).hexdigest(),
        compiler=toolchain.version,
        flags=" ".join([*toolchain.command[1:], *flags]),
        target=toolchain.target,
    )


def _run_tended(arguments: Sequence[str], timeout: float, tend: Tend) -> subprocess.CompletedProcess[str]:
    """As `_run`, with a process group for the compiler, which ``tend`` may make stand still."""
    try:
        with subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            process_group=0,
        ) as process:
            try:
                deadline = time.monotonic() + timeout
                while True:
                    try:
                        output, errors = process.communicate(timeout=TEND_SECONDS)
                        return _told(subprocess.CompletedProcess(arguments, process.returncode, output, errors))
                    except subprocess.TimeoutExpired:
                        deadline += tend(process.pid)
                        if time.monotonic() > deadline:
                            raise CompilerError(f"expected {arguments[0]} to end within {timeout:g} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    except OSError as error:
        raise CompilerNotReady(
            f"expected {arguments[0]} to run, found {error}; name another compiler with `cc`"
        ) from error


def compile_source(
    source: str, toolchain: Toolchain, flags: Sequence[str], timeout: float = 120.0, tend: Tend | None = None
) -> bytes:
    """Compile a translation unit to the bytes of a shared object, within ``timeout`` seconds.

    Raises CompilerError with the compiler's first error lines; its subclass CompilerNotReady where they are not about
    the text; OSError where there is no room for the files. While the compiler runs, ``tend`` is called with its process
    group again and again. It may make the group stand still, and returns for how many seconds: these do not count
    towards the timeout.
    """
    with tempfile.TemporaryDirectory(prefix="autofuse-cc-") as folder:
        text, binary = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        text.write_text(source)
        command = [*toolchain.command, *flags, str(text), "-o", str(binary), "-lm"]
        result = _run(command, timeout) if tend is None else _run_tended(command, timeout, tend)
        if result.returncode != 0 or not binary.exists():
            errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            # Errors about the text name a place in it, or a name that is not defined; others are no fault of it.
            ours = [line for line in errors if f"{text}:" in line or "undefined reference" in line]
            if ours:
                raise CompilerError("expected the generated C to compile, found:\n" + "\n".join(ours[:5]))
            found = "; ".join(errors[:3]) or f"exit code {result.returncode}"
            raise CompilerNotReady(f"expected {toolchain.path} to work, found: {found}")
        return binary.read_bytes()
