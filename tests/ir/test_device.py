"""The key of a machine: processors that know other instructions have other ones."""

from autofuse.ir.device import cpu_device, instruction_set

ICE_LAKE = frozenset(
    [
        "sse2",
        "avx",
        "avx2",
        "fma",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512_vbmi",
        "avx512_vnni",
        "gfni",
        "ibpb",
        "md_clear",
    ]
)


def test_instructions_that_are_missing_make_another_key() -> None:
    for flag in ("avx512_vbmi", "avx512_vnni", "gfni", "fma"):
        assert instruction_set(ICE_LAKE - {flag}) != instruction_set(ICE_LAKE)
        assert instruction_set(ICE_LAKE - {flag}).startswith("avx512-")
    assert instruction_set(ICE_LAKE | {"amx_tile"}) != instruction_set(ICE_LAKE)


def test_what_kernels_and_microcode_add_makes_none() -> None:
    assert instruction_set(ICE_LAKE - {"ibpb", "md_clear"}) == instruction_set(ICE_LAKE)


def test_this_machine_has_one() -> None:
    assert cpu_device() is cpu_device() and cpu_device().isa in cpu_device().key
