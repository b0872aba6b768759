"""What doctor says of GPUs and Triton, for machines that the tests do not run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofuse import doctor
from autofuse.doctor import Finding, Gpu, GpuFacts, examine
from autofuse.errors import CompilerError
from autofuse.settings.layers import Settings

H200 = Gpu("NVIDIA H200", "sm_90", 132, 141 * 2**30, True)
V100 = Gpu("Tesla V100", "sm_70", 80, 16 * 2**30, False)
NO_GPU = GpuFacts("", (), "", "")
NAMES = ("GPU", "GPU driver", "Triton", "GPU launcher")

Findings = Callable[[GpuFacts], dict[str, Finding]]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Findings:
    def make(facts: GpuFacts) -> dict[str, Finding]:
        monkeypatch.setattr(doctor, "gpu_facts", lambda: facts)
        found = {finding.name: finding for finding in examine(Settings(), NAMES)}
        assert list(found) == list(NAMES)
        assert not any(finding.essential for finding in found.values() if not finding.ok), "the CPU works without"
        return found

    return make


def raising(message: str) -> Callable[..., Any]:
    def find(*_: Any) -> None:
        raise CompilerError(message)

    return find


def test_a_machine_without_a_gpu_lacks_nothing(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_triton", raising("expected Triton 3.6 or newer, found none; install it with: x"))
    monkeypatch.setattr(doctor, "GPU_FILES", ())
    found = findings(NO_GPU)
    assert all(finding.ok for finding in found.values())
    assert found["GPU"].found == "none; torch is built for the CPU only"
    assert "not needed" in found["Triton"].found and "found none" in found["Triton"].found


def test_a_gpu_with_all_it_needs(findings: Findings) -> None:
    found = findings(GpuFacts("CUDA 12.8", (H200,), "libcuda.so.1", ""))
    assert all(finding.ok for finding in found.values())
    assert found["GPU"].found == "NVIDIA H200 (sm_90, 132 multiprocessors, 141 GiB); torch is built for CUDA 12.8"
    assert found["GPU driver"].found == "libcuda.so.1"
    assert "without a C compiler" in found["Triton"].found and "in C" in found["GPU launcher"].found


@pytest.mark.parametrize("version", ["none", "triton 3.2.0"])
def test_triton_missing_or_too_old(version: str, findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"expected Triton 3.6 or newer, found {version}; install it with: pip install 'triton>=3.6,<3.8'"
    monkeypatch.setattr(doctor, "find_triton", raising(message))
    triton = findings(GpuFacts("CUDA 12.8", (H200,), "libcuda.so.1", ""))["Triton"]
    assert not triton.ok and triton.found == f"expected Triton 3.6 or newer, found {version}"
    assert triton.remedy == "pip install 'triton>=3.6,<3.8'"


def test_what_is_half_there(findings: Findings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_toolchain", raising("no compiler"))
    found = findings(GpuFacts("CUDA 12.8", (V100,), "", "expected the GPU's driver, found none of libcuda.so.1"))
    assert not found["GPU"].ok and "no bf16" in found["GPU"].found and "eager" in found["GPU"].remedy
    assert not found["GPU driver"].ok and "nvidia-smi" in found["GPU driver"].remedy
    assert not found["GPU launcher"].ok and "ctypes" in found["GPU launcher"].found
    monkeypatch.setattr(doctor, "GPU_FILES", ((str(tmp_path), "NVIDIA", "cuda"),))
    unused = findings(NO_GPU)["GPU"]
    assert not unused.ok and "torch sees no GPU" in unused.found and "pytorch.org" in unused.remedy


def test_the_probe_runs_on_this_machine() -> None:
    facts = doctor.gpu_facts()
    assert isinstance(facts.build, str) and bool(facts.gpus) == bool(facts.driver or facts.problem)
