"""PTX written by hand: what each kind of instruction does, and that faults and unordered accesses are found."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptx.arithmetic import RULES, TYPES, compared, converted
from ptx.machine import Launch, Machine, meeting_places, run
from ptx.memory import Conflicts, Fault, Global
from ptx.text import Address, Immediate, Unsupported, parse

HEAD = """.version 8.7
.target sm_80
.extern .shared .align 16 .b8 tile[];
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u64 k_param_1, .param .u32 k_param_2)
{ .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [k_param_0]; ld.param.b64 %rd2, [k_param_1]; ld.param.b32 %r1, [k_param_2];
  mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.s32 %r5, %r3, %r4, %r2;
  mad.wide.s32 %rd3, %r5, 4, %rd1; mad.wide.s32 %rd4, %r5, 4, %rd2; mov.u32 %r20, tile; shl.b32 %r6, %r2, 2;
  add.s32 %r7, %r20, %r6;
"""


def launch(
    body: str,
    given: Sequence[int],
    count: int,
    blocks: int = 1,
    threads: int = 64,
    argument: int = 0,
    shared: int = 1024,
) -> tuple[list[int], Conflicts]:
    """Run a kernel on words, and give the words that it has written, with the conflicts."""
    conflicts = Conflicts()
    memory = Global(conflicts)
    source, target = memory.reserve(4 * len(given)), memory.reserve(4 * count)
    memory.allocate()
    memory.write(source, struct.pack(f"<{len(given)}I", *given))
    memory.write(target, bytes(4 * count))
    program = parse(HEAD + body + "\nret; }")
    run(program, Launch(blocks, threads, shared, (source, target, argument)), memory, conflicts, {})
    return list(memory.read(target, 4 * count).view(np.uint32)), conflicts


NUMBERS = list(range(100, 228))
ADD_ONE = """setp.lt.s32 %p1, %r5, %r1;
  @%p1 ld.global.b32 { %r10 }, [ %rd3 + 0 ]; add.s32 %r10, %r10, 1; @%p1 st.global.b32 [ %rd4 + 0 ], { %r10 };"""


def test_a_part_of_the_lanes_loads_and_stores() -> None:
    found, conflicts = launch(ADD_ONE, NUMBERS[:100], 128, blocks=2, argument=100)
    assert found == [n + 1 for n in NUMBERS[:100]] + [0] * 28 and not conflicts.races


def test_memory_beyond_an_allocation_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"global memory: nothing was allocated at .* ld.global.b32"):
        launch(ADD_ONE, NUMBERS[:100], 128, blocks=2, argument=101)
    with pytest.raises(Fault, match="shared memory has 1024 bytes"):
        launch("st.shared.b32 [%r7+1000], %r2;", [0], 1)


def test_a_place_that_is_no_multiple_of_the_size_is_a_fault() -> None:
    with pytest.raises(Fault, match="expected multiples of 16 bytes"):
        launch("ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1+4];", NUMBERS, 1)


EXCHANGE = """ld.global.b32 %r10, [%rd3]; st.shared.b32 [%r7], %r10; {}
  xor.b32 %r11, %r6, 128; add.s32 %r11, %r11, %r20; ld.shared.b32 %r12, [%r11]; st.global.b32 [%rd4], %r12;"""


def test_what_another_warp_has_written_is_read_behind_a_barrier_alone() -> None:
    found, conflicts = launch(EXCHANGE.format("bar.sync 0;"), NUMBERS[:64], 64)
    assert found == NUMBERS[32:64] + NUMBERS[:32] and not conflicts.races
    _, conflicts = launch(EXCHANGE.format(""), NUMBERS[:64], 64)
    assert "read of what another wrote" in conflicts.races[0]
    _, conflicts = launch(EXCHANGE.format("bar.sync 0;") + "st.shared.b32 [%r7], %r2;", NUMBERS[:64], 64)
    assert "write to what another read" in conflicts.races[0]


@pytest.mark.parametrize(("value", "is_race"), [("%r2", True), ("7", False)])
def test_two_writes_to_one_place(value: str, is_race: bool) -> None:
    """Of equal values they are duplicates."""
    _, conflicts = launch(f"st.shared.b32 [tile], {value};", [0], 1)
    assert bool(conflicts.races) is is_race and (conflicts.counts["duplicates"] > 0)
    _, conflicts = launch(f"mov.b32 %r9, {value.replace('2', '3')}; st.global.b32 [%rd2], %r9;", [0], 1, blocks=2)
    assert bool(conflicts.races) is is_race


def test_a_barrier_that_a_part_of_a_block_reaches_is_a_fault() -> None:
    with pytest.raises(Fault, match="a part of a block reached a barrier"):
        launch("setp.lt.s32 %p1, %r2, 32; @%p1 bra $L1; bar.sync 0; $L1: mov.b32 %r9, 0;", [0], 1)


# The second way lies behind the end, as LLVM places what is rarely run.
APART = """setp.gt.s32 %p1, %r2, {}; @%p1 bra $FAR; mov.b32 %r9, 1;
$MEET: add.s32 %r9, %r9, %r2; mov.b32 %r8, -1; shfl.sync.bfly.b32 %r10, %r9, 16, 31, -1; st.global.b32 [%rd4], %r10;
  bra.uni $END;
$FAR: mov.b32 %r9, 1000; bra.uni $MEET;
$END: mov.b32 %r9, 0;"""


@pytest.mark.parametrize("last", [-1, 5, 40, 64])
def test_lanes_that_part_meet_again(last: int) -> None:
    found, _ = launch(APART.format(last), [0], 64)
    own = [n + (1000 if n > last else 1) for n in range(64)]
    assert found == [own[n ^ 16] for n in range(64)]


def test_loops_of_different_lengths() -> None:
    """Each thread adds its number so many times, and all go on together."""
    body = """mov.b32 %r9, 0; mov.b32 %r10, 0;
    $LOOP: setp.ge.s32 %p1, %r9, %r2; @%p1 bra $OUT; add.s32 %r10, %r10, %r2; add.s32 %r9, %r9, 1; bra.uni $LOOP;
    $OUT: bar.sync 0; st.global.b32 [%rd4], %r10;"""
    assert launch(body, [0], 64)[0] == [n * n for n in range(64)]


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx.machine.MOST_STEPS", 1000)
    with pytest.raises(Fault, match="a launch that ends"):
        launch("$L: bra.uni $L;", [0], 1)


def test_where_ways_meet() -> None:
    program = parse(HEAD + APART.format(5) + "ret; }")
    ((branch, place),) = meeting_places(program.code).items()
    assert program.code[branch].guard == "%p1" and program.code[place].text == "add.s32 %r9, %r9, %r2"


@pytest.mark.parametrize(("body", "expected"), [
    ("mov.b32 %r9, 255; st.shared.b8 [%r7], %r9; ld.shared.s8 %r10, [%r7];", 2**32 - 1),
    ("mov.b32 %r9, 255; cvt.s8.s32 %r10, %r9;", 2**32 - 1),
    ("mov.b32 %r9, 127; cvt.s8.s32 %r10, %r9;", 127),
    ("mov.b32 %r10, 5; { .reg .b32 %r10, t; mov.b32 %r10, 7; mov.b32 {%rs1, %rs2}, %r10; { .reg .b32 t; } }", 5),
    ("setp.eq.s32 %p1, %r2, %r2; setp.lt.and.s32 %p1|%p2, %r2, 0, %p1; selp.b32 %r10, 1, 0, %p2;", 1),
    ("mov.b32 %r9, 0x7fffffff; redux.sync.add.s32 %r10, %r9, -1;", 2**32 - 32),
])  # fmt: skip
def test_values_in_wider_registers_and_those_that_overflow(body: str, expected: int) -> None:
    assert launch(body + "st.global.b32 [%rd4], %r10;", [0], 64)[0] == [expected] * 64


@pytest.mark.parametrize("body", [
    "add.sat.s32 %r10, %r2, 1;", "cvt.sat.u8.s32 %r10, %r2;", ".reg .b32 %r9;",
    "setp.ne.s32 %p1, %r2, %r2; cp.async.ca.shared.global [tile], [%rd1], 4, %p1;",
])  # fmt: skip
def test_what_is_not_understood_is_unsupported(body: str) -> None:
    with pytest.raises(Unsupported):
        launch(body, [0], 64)


COPY = """cp.async.cg.shared.global [ %r21 + 0 ], [ %rd5 + 0 ], 0x10, %r22; cp.async.commit_group; {}
  ld.shared.b32 %r12, [%r7]; st.global.b32 [%rd4], %r12;"""


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0x0;", "cp.async.wait_group 0x1;"])
def test_an_asynchronous_copy_is_there_once_it_was_waited_for(wait: str) -> None:
    body = (
        "mad.wide.s32 %rd5, %r2, 16, %rd1; mad.lo.s32 %r21, %r2, 16, %r20; mov.b32 %r22, 12; setp.lt.s32 %p1, %r2, 16;"
    )
    body += COPY.format(wait + "bar.sync 0;").replace("cp.async.cg", "@%p1 cp.async.cg")
    found, _ = launch(body, NUMBERS[:64], 64)
    expected = [0 if n % 4 == 3 else NUMBERS[n] for n in range(64)]  # 12 of 16 bytes, then zeros
    assert (found == expected) is wait.endswith("0x0;")


def test_a_product_of_matrices() -> None:
    """Each lane holds the parts that the manual says, here packed by the test."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (16, 16)), rng.integers(-4, 5, (16, 8))
    half = lambda x: int(np.float16(x).view(np.uint16))  # noqa: E731
    words: list[int] = []
    for n in range(4):  # the registers of a, then of b, lane by lane
        for lane in range(32):
            row, column = lane // 4 + 8 * (n % 2), lane % 4 * 2 + 8 * (n // 2)
            words.append(half(a[row, column]) | half(a[row, column + 1]) << 16)
    for n in range(2):
        for lane in range(32):
            row, column = lane % 4 * 2 + 8 * n, lane // 4
            words.append(half(b[row, column]) | half(b[row + 1, column]) << 16)
    loads = "".join(f"ld.global.b32 %r{10 + n}, [%rd3+{128 * n}];" for n in range(6))
    body = (
        loads
        + """mov.b32 %r30, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r31, %r32, %r33, %r34 }, { %r10, %r11, %r12, %r13 },
      { %r14, %r15 }, { %r30, %r30, %r30, %r30 };"""
    )
    body += "".join(f"st.global.b32 [%rd4+{128 * n}], %r{31 + n};" for n in range(4))
    found = np.array(launch(body, words, 128, threads=32)[0], np.uint32).view(np.float32).reshape(4, 32)
    product = a @ b
    for n in range(4):
        expected = [product[lane // 4 + 8 * (n // 2), lane % 4 * 2 + n % 2] for lane in range(32)]
        assert list(found[n]) == expected


@pytest.mark.parametrize("turned", ["", ".trans"])
def test_matrices_are_stored_as_they_are_loaded(turned: str) -> None:
    """By a warp: two matrices in halves of registers to shared memory, whose rows it names, and back."""
    body = f"""ld.global.b32 %r10, [%rd3]; ld.global.b32 %r11, [%rd3+128];
    shl.b32 %r12, %r2, 4; add.s32 %r12, %r12, %r20;
    stmatrix.sync.aligned.m8n8.x2{turned}.shared.b16 [ %r12 + 0 ], {{ %r10, %r11 }}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x2{turned}.shared.b16 {{ %r13, %r14 }}, [ %r12 + 0 ];
    st.global.b32 [%rd4], %r13; st.global.b32 [%rd4+128], %r14;
    mad.lo.s32 %r15, %r2, 4, %r20; ld.shared.b32 %r16, [%r15]; st.global.b32 [%rd4+256], %r16;"""
    words = [2 * n | (2 * n + 1) << 16 for n in range(64)]
    found, conflicts = launch(body, words, 96, threads=32)
    assert found[:64] == words and not conflicts.races
    first = np.arange(64).reshape(8, 8)  # the elements of the first matrix, as its rows lie in shared memory
    laid = np.array(found[64:], np.uint32).view(np.uint16)
    assert list(laid) == list((first.T if turned else first).ravel())


# ---- numbers ----------------------------------------------------------------------------------------------

WORD, SIGNED = st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1)


def one(name: str, opcode: str, *operands: int | float) -> int | float:
    words = tuple(opcode.split("."))
    dtype = TYPES[words[-1]]
    given = [
        np.array([x]).astype(dtype if name not in ("shl", "shr", "bfe") or n == 0 else np.uint32)
        for n, x in enumerate(operands)
    ]
    with np.errstate(all="ignore"):
        return RULES[name](words, words[-1], *given)[0].item()  # type: ignore[no-any-return]


@given(SIGNED, SIGNED, SIGNED)
def test_products_and_quotients_of_integers(a: int, b: int, c: int) -> None:
    wrapped = lambda x: (x + 2**31) % 2**32 - 2**31  # noqa: E731
    assert one("mul", "mul.lo.s32", a, b) == wrapped(a * b)
    assert one("mul", "mul.wide.s32", a, b) == a * b
    assert one("mul", "mul.hi.s32", a, b) == a * b >> 32
    assert one("mul", "mul.hi.s64", a * b, b) == a * b * b >> 64
    assert one("mad", "mad.lo.s32", a, b, c) == wrapped(a * b + c)
    if b:
        towards_zero = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        assert one("div", "div.s32", a, b) == wrapped(towards_zero)
        assert one("rem", "rem.s32", a, b) == wrapped(a - towards_zero * b)


@given(WORD, st.integers(0, 70), st.integers(0, 40))
def test_shifts_and_fields(a: int, place: int, count: int) -> None:
    assert one("shl", "shl.b32", a, place) == (a << place) % 2**32
    assert one("shr", "shr.u32", a, place) == a >> place
    signed = a - 2**32 if a >= 2**31 else a
    assert one("shr", "shr.s32", signed, place) == signed >> place
    assert one("bfe", "bfe.u32", a, place, count) == (a >> place) & ((1 << count) - 1)


@pytest.mark.parametrize(
    ("name", "opcode", "operands", "expected"),
    [
        ("max", "max.f32", (float("nan"), 1.0), 1.0),
        ("min", "min.f32", (0.0, -0.0), -0.0),
        ("add", "add.rz.f32", (1.0, 2.0**-24), 1.0),
        ("add", "add.rp.f32", (1.0, 2.0**-24), 1.0 + 2.0**-23),
        ("mul", "mul.ftz.f32", (2.0**-100, 2.0**-40), 0.0),
        ("add", "add.sat.f32", (0.75, 0.75), 1.0),
        ("ex2", "ex2.approx.ftz.f32", (10.0,), 1024.0),
    ],
)
def test_floats(name: str, opcode: str, operands: tuple[float, ...], expected: float) -> None:
    found = one(name, opcode, *operands)
    assert found == expected and np.signbit(found) == np.signbit(expected)


def test_two_integers_of_a_register_are_added_each() -> None:
    given = [np.array([x], np.uint32) for x in (0x7FFF_FFFF, 0x0001_0002)]
    assert RULES["add"](("add", "s16x2"), "s16x2", *given)[0] == 0x8000_0001


def test_a_policy_of_the_caches_is_passed_over_and_a_part_of_a_grid_knows_its_place() -> None:
    """Blocks 3 and 4 of a grid of 2 x 3: each stores its place along x and y."""
    body = """mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y; mov.u32 %r12, %nctaid.y;
        mad.lo.s32 %r13, %r12, %r10, %r11; mad.wide.s32 %rd5, %r13, 4, %rd1;
        createpolicy.fractional.L2::evict_first.b64 %rd6, 1.0;
        st.global.L1::evict_first.L2::cache_hint.b32 [ %rd5 + 0 ], { %r13 }, %rd6; ret; }"""
    program = parse(HEAD + body)
    memory = Global(Conflicts())
    place = memory.reserve(24)
    memory.allocate()
    machine = Machine(program, Launch(2, 32, 64, (place, 0, 0)), memory, Conflicts(), {})
    machine.begin_at(3, (2, 3, 1))
    machine.run()
    found = memory.read(place, 24).view(np.int32)
    assert [n for n in found if n >= 0] == [2, 4]  # (1, 1) and (0, 2), of 3 along y


def test_nan_where_it_is_asked_for() -> None:
    assert np.isnan(one("max", "max.NaN.f32", float("nan"), 1.0))
    nan, number = np.array([np.nan], np.float32), np.array([1.0], np.float32)
    results = {
        word: bool(compared(("setp", word, "f32"), "f32", nan, number)[0]) for word in ("eq", "ne", "neu", "ltu", "nan")
    }
    assert results == {"eq": False, "ne": False, "neu": True, "ltu": True, "nan": True}


def test_two_halves_are_compared_each() -> None:
    body = """ld.global.b32 %r10, [%rd3]; mov.b32 %r11, 0x40003c00; setp.gt.f16x2 %p1|%p2, %r10, %r11;
    selp.b32 %r12, 1, 0, %p1; selp.b32 %r13, 2, 0, %p2; add.s32 %r12, %r12, %r13; st.global.b32 [%rd4], %r12;"""
    ones, twos, threes = 0x3C00, 0x4000, 0x4200
    given = [ones | ones << 16, twos | ones << 16, ones | threes << 16, twos | threes << 16, *[0] * 60]
    assert launch(body, given, 64)[0][:5] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("opcode", "given", "expected"),
    [
        ("cvt.rzi.s32.f32", 1e20, 2**31 - 1),
        ("cvt.rzi.s32.f32", float("nan"), 0),
        ("cvt.rni.s32.f32", 2.5, 2),
        ("cvt.rn.bf16.f32", 1.00390625, 0x3F80),  # a tie, to even
        ("cvt.rn.bf16.f32", float("nan"), 0x7FFF),
        ("cvt.rmi.f32.f32", -0.5, -1.0),
    ],
)
def test_conversions(opcode: str, given: float, expected: float) -> None:
    words = tuple(opcode.split("."))
    assert converted(words, np.array([given], TYPES[words[-1]]))[0] == expected


def test_a_function_with_one_argument_built_in_is_refused() -> None:
    body = """st.param.b64 [param0], %rd1; call (retval0), __internal_accurate_pow, (param0);
      ld.param.b64 %rd2, [retval0];"""
    with pytest.raises(Unsupported, match="a call of __internal_accurate_pow"):
        launch(body, [1], 1, threads=32)


def test_the_text() -> None:
    program = parse(HEAD + "@!%p1 ld.global.L1::evict_first.v2.b32 {%r8, %r9}, [%rd1+-8]; mov.f32 %r8, 0f3F800000; }")
    load, move = program.code[-2:]
    assert load.opcode == ("ld", "global", "v2", "b32") and load.is_negated and load.guard == "%p1"
    assert load.operands == (("%r8", "%r9"), Address("%rd1", -8)) and move.operands[1] == Immediate(0x3F800000, 32)
    with pytest.raises(Unsupported, match="wgmma"):
        launch("wgmma.fence.sync.aligned;", [0], 1)
