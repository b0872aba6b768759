"""The key of a Triton source's binary: the installed compiler, its options.

In: a source, a target, assumptions. Out: a `CompileKey` that differs wherever the binary may differ.
Guarantee: free of torch and of Triton, whose version and files are read from the package's own records; every option
is named here with its value, so that no default of another version and no variable of the environment decides.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.triton.artifact import MAGIC, Artifact
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.codegen.triton.targets import parse_target, total_resources
from autofuse.errors import CompilerNotReady
from autofuse.ir.records import CompileKey, KernelRecord

PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")  # that install a module ``triton``
OLDEST = (3, 6)

# Variables that change what Triton or its LLVM make of a source, or print; the compile process has none of them.
VARIABLES = re.compile(
    r"(TRITON|AMDGCN|MLIR|LLVM|NVPTX)_.*|DISABLE_(LLVM_OPT|MMA_V\d|PTXAS_OPT|FAST_REDUCTION)"
    r"|PTXAS_OPTIONS|USE_IR_LOC|ALLOW_LHS_TMEM_LAYOUT_CONVERSION"
)

Options = dict[str, int | bool | str]

_OPTIONS: Options = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "default_dot_input_precision": "ieee",
    "sanitize_overflow": False,
    "instrumentation_mode": "",
}
_OPTIONS_OF: dict[str, Options] = {
    "cuda": {"enable_reflect_ftz": True, "launch_pdl": False, "ptx_options": ""},
    "hip": {
        "waves_per_eu": 0, "matrix_instr_nonkdim": 0, "kpack": 1, "allow_flush_denorm": False, "schedule_hint": "none",
    },
}  # fmt: skip


@dataclass(frozen=True)
class TritonVersion:
    """The installed Triton."""

    package: str
    version: str  # "3.7.1"
    digest: str  # of its files, as its installer recorded them


def find_triton() -> TritonVersion:
    """The Triton that is installed, without importing it. Raises CompilerNotReady where it is missing or too old."""
    found = installed_triton()
    if found is None:
        raise CompilerNotReady(
            f"expected Triton {OLDEST[0]}.{OLDEST[1]} or newer, found none; "
            "install it with: pip install 'triton>=3.6,<3.10'"
        )
    number = re.match(r"(\d+)\.(\d+)", found.version)
    if number is None or (int(number[1]), int(number[2])) < OLDEST:
        raise CompilerNotReady(
            f"expected Triton {OLDEST[0]}.{OLDEST[1]} or newer, found {found.package} {found.version}; "
            "install one with: pip install 'triton>=3.6,<3.10'"
        )
    return found


@functools.cache
def installed_triton() -> TritonVersion | None:
    """The Triton that is installed, usable or not; None where there is none."""
    for package in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        # Only files of the module with a checksum: scripts name the folder of the interpreter, .pyc files have none.
        lines = (distribution.read_text("RECORD") or "").splitlines()
        files = sorted(line for line in lines if line.startswith("triton/") and "sha256=" in line)
        digest = hashlib.sha256("\n".join(files).encode()).hexdigest()[:12]
        return TritonVersion(package, distribution.version, digest)
    return None


def options_for(source: TritonSource, target: str) -> Options:
    """All options of a compilation that may change its result."""
    own: Options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    own["enable_fp_fusion"] = source.contracts
    own["debug"] = "tl.device_assert(" in source.text  # without it, assertions are left out
    return {**own, **_OPTIONS, **_OPTIONS_OF[parse_target(target).backend]}


def in_order(assumptions: Sequence[Assumptions]) -> tuple[Assumptions, ...]:
    """Each of the assumptions once, in a fixed order: the order in which they are given does not matter."""
    return tuple(sorted(set(assumptions), key=lambda a: (a.is_aligned, a.divisible)))


def compile_key(source: TritonSource, target: str, assumptions: Sequence[Assumptions]) -> CompileKey:
    """Exactly what determines the artifact. Raises CompilerNotReady without a usable Triton."""
    triton = find_triton()
    flags = {
        "artifact": MAGIC.decode().strip(),
        "options": options_for(source, target),
        "assumptions": [[a.is_aligned, list(a.divisible)] for a in in_order(assumptions)],
    }
    return CompileKey(
        source_hash=hashlib.sha256(json.dumps(source.to_json(), sort_keys=True).encode()).hexdigest(),
        compiler=f"triton {triton.version} ({triton.digest})",
        flags=json.dumps(flags, sort_keys=True),
        target=target,
    )


def kernel_record(artifact: Artifact) -> KernelRecord:
    """An artifact as the store keeps it."""
    source = artifact.source
    key = compile_key(source, artifact.target, artifact.assumptions)
    return KernelRecord(key, source.name, source.text, artifact.pack(), total_resources(artifact))


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment, without those that would change what Triton makes."""
    return {name: value for name, value in variables.items() if not VARIABLES.fullmatch(name)}
