"""What is said of all schedules of a launch, of PTX written by hand: a race is found whatever the inputs hold, and
writes of one value are told from writes that happen to be equal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptx.accesses import READ, Access, Findings, problem
from ptx.machine import Launch
from ptx.memory import Conflicts, Global
from ptx.schedules import AllSchedules
from ptx.text import Unsupported, parse
from tests.ptx.test_machine import COPY, EXCHANGE, HEAD, launch

WORDS = 512


def findings(body: str, blocks: int = 1, threads: int = 64, argument: int = 0, shared: int = 1024) -> Findings:
    """Of a kernel with a tensor that it reads, and one that it writes."""
    memory = Global(Conflicts())
    source, target = memory.reserve(4 * WORDS), memory.reserve(4 * WORDS)
    memory.allocate()
    memory.launches += 1
    program = parse(HEAD + body + "\nret; }")
    return AllSchedules(program, Launch(blocks, threads, shared, (source, target, argument)), memory, {}).findings()


# ---- values ----------------------------------------------------------------------------------------------

# Each thread reads the word of its lane, so that both warps hold the same ones, and %r12 is its lane.
LANES = "and.b32 %r12, %r2, 31; mad.wide.s32 %rd5, %r12, 4, %rd1; ld.global.b32 %r10, [%rd5];"
TO_ITS_LANE = "shl.b32 %r13, %r12, 2; add.s32 %r13, %r13, %r20; st.shared.b32 [%r13], %r14;"


@pytest.mark.parametrize("value", [
    "add.f32 %r14, %r10, %r10;", "mov.b32 %r14, 7;", "mov.b32 %r14, %r12;", "ex2.approx.f32 %r14, %r10;",
    "st.shared.b32 [%r7+512], %r10; ld.shared.b32 %r14, [%r7+512];",
    "mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r14, {%rs1, %rs2};",
    "setp.gt.f32 %p1, %r10, 0f00000000; selp.b32 %r14, %r10, %r12, %p1;",
])  # fmt: skip
def test_what_two_threads_compute_alike_is_one_value(value: str) -> None:
    found = findings(LANES + value + TO_ITS_LANE)
    assert not found.races and found.one_value == 4 * 32


@pytest.mark.parametrize("value", ["mov.b32 %r14, %r2;", "ld.global.b32 %r14, [%rd3];"])
def test_what_may_differ_is_a_race_though_it_is_equal_here(value: str) -> None:
    """The executor, which sees the bits, finds words that happen to be equal; all schedules and inputs do not."""
    found = findings(LANES + value + TO_ITS_LANE)
    assert "may differ" in found.races[0] and "shared memory" in found.races[0]
    if "global" in value:
        _, conflicts = launch(LANES + value + TO_ITS_LANE, [5] * WORDS, 1)
        assert not conflicts.races and conflicts.counts["duplicates"]


@pytest.mark.parametrize(("word", "is_one"), [
    ("add.f32", True), ("mul.f32", True), ("max.NaN.f32", True), ("sub.f32", False), ("div.rn.f32", False),
])  # fmt: skip
def test_operands_of_what_is_commutative_may_change_places(word: str, is_one: bool) -> None:
    """The first warp computes a of b, the second b of a."""
    body = f"""ld.global.b32 %r10, [%rd1]; ld.global.b32 %r11, [%rd1+4]; setp.lt.s32 %p1, %r2, 32;
    selp.b32 %r12, %r10, %r11, %p1; selp.b32 %r13, %r11, %r10, %p1; {word} %r14, %r12, %r13;
    st.shared.b32 [tile], %r14;"""
    found = findings(body)
    assert bool(found.races) is not is_one


# Lane 0 and lane 1 add the same two products. The assembler rounds one of them together with the sum.
PRODUCTS = """ld.global.b32 %r10, [%rd3]; ld.global.b32 %r11, [%rd3+256]; shfl.sync.bfly.b32 %r12, %r10, 1, 31, -1;
  shfl.sync.bfly.b32 %r13, %r11, 1, 31, -1; mul.f32 %r14, %r10, %r11; mul.f32 %r15, %r12, %r13;
  add.f32 %r16, %r14, %r15; setp.lt.s32 %p1, %r2, 2; @%p1 st.shared.b32 [tile], %r16;"""


def test_a_product_and_its_sum_may_be_rounded_once() -> None:
    assert findings(PRODUCTS).races
    assert findings(PRODUCTS.replace("add.f32 %r16", "neg.f32 %r14, %r14; sub.f32 %r16")).races
    rounded = findings(PRODUCTS.replace("mul.f32", "mul.rn.f32"))
    assert not rounded.races and rounded.one_value == 4


def test_one_instruction_rounds_alike_in_all_lanes() -> None:
    found = findings(LANES + "mul.f32 %r11, %r10, %r10; add.f32 %r14, %r11, %r10;" + TO_ITS_LANE)
    assert not found.races and found.one_value == 4 * 32


def test_float64_keeps_the_bits_of_a_nan() -> None:
    body = """ld.global.b64 %rd5, [%rd1]; ld.global.b64 %rd6, [%rd1+8]; setp.lt.s32 %p1, %r2, 32;
    selp.b64 %rd7, %rd5, %rd6, %p1; selp.b64 %rd8, %rd6, %rd5, %p1; add.f64 %rd5, %rd7, %rd8;
    st.shared.b64 [tile], %rd5;"""
    assert findings(body).races


def shuffled_sum(word: str, distances: Sequence[int]) -> str:
    steps = "".join(
        f"shfl.sync.bfly.b32 %r11, %r10, {distance}, 31, -1; {word} %r10, %r10, %r11;" for distance in distances
    )
    return LANES + steps + "st.shared.b32 [tile], %r10;"


def test_a_sum_over_a_warp_is_one_value_in_all_its_lanes() -> None:
    found = findings(shuffled_sum("add.f32", (16, 8, 4, 2, 1)))
    assert not found.races and found.one_value == 4
    assert findings(shuffled_sum("sub.f32", (16, 8, 4, 2, 1))).races
    assert findings(shuffled_sum("add.f32", (16, 8, 4, 2))).races  # two halves that were never added


@pytest.mark.parametrize("word", ["vote.sync.any.pred %p2, %p1, -1; selp.b32 %r14, 1, 0, %p2;",
                                  "redux.sync.max.s32 %r14, %r10, -1;"])  # fmt: skip
def test_what_a_warp_finds_together(word: str) -> None:
    body = f"{LANES} setp.gt.s32 %p1, %r10, 5; {word} st.shared.b32 [tile], %r14;"
    assert not findings(body).races
    assert findings(body.replace("[%rd5]", "[%rd3]")).races  # each warp of its own words


# ---- order -----------------------------------------------------------------------------------------------


def test_a_barrier_orders() -> None:
    assert not findings(EXCHANGE.format("bar.sync 0;")).races
    assert "reads what" in findings(EXCHANGE.format("")).races[0]
    assert findings(EXCHANGE.format("bar.warp.sync -1;")).races  # the words of another warp
    assert findings(EXCHANGE.format("bar.sync 0;") + "st.shared.b32 [%r7], %r2;").races  # over what another reads


def test_a_barrier_of_a_warp_orders_its_own_threads() -> None:
    """Which the executor cannot tell: lanes of a warp go in step there."""
    own = EXCHANGE.replace("xor.b32 %r11, %r6, 128", "xor.b32 %r11, %r6, 4")
    assert not findings(own.format("bar.warp.sync -1;")).races
    assert findings(own.format("")).races
    assert not launch(own.format(""), list(range(64)), 64)[1].races


def test_blocks_are_ordered_by_nothing() -> None:
    assert findings("bar.sync 0; st.global.b32 [%rd2], %r3;", blocks=2).races
    found = findings("st.global.b32 [%rd4], %r3;", blocks=2)
    assert not found.races and not found.one_value


def test_a_thread_may_read_what_it_has_written_itself() -> None:
    body = "mov.b32 %r9, 7; st.shared.b32 [tile], %r9; ld.shared.b32 %r10, [tile]; st.global.b32 [%rd4], %r10;"
    found = findings(body)
    assert not found.races and found.one_value == 4
    assert findings(
        body.replace("st.shared", "@%p1 st.shared", 1).replace("mov", "setp.lt.s32 %p1, %r2, 32; mov")
    ).races


def test_a_copy_may_write_until_it_is_waited_for() -> None:
    copy = (
        "setp.lt.s32 %p1, %r2, 16; mad.wide.s32 %rd5, %r2, 16, %rd1; mad.lo.s32 %r21, %r2, 16, %r20; mov.b32 %r22, 16;"
    )
    copy += COPY.replace("cp.async.cg", "@%p1 cp.async.cg")
    assert not findings(copy.format("cp.async.wait_group 0x0; bar.sync 0;")).races
    others = "setp.gt.s32 %p2, %r2, 31; @%p2 ld.shared.b32 %r9, [tile]; cp.async.wait_group 0x0; bar.sync 0;"
    assert "reads what" in findings(copy.format(others)).races[0]
    assert findings(copy.format("bar.sync 0;" + others)).races
    before = "ld.shared.b32 %r9, [tile]; bar.sync 0;"
    assert not findings(before + copy.format("cp.async.wait_group 0x0; bar.sync 0;")).races
    forgotten = copy.partition("cp.async.commit_group;")[0].replace(
        "mad.lo.s32 %r21, %r2, 16, %r20", "mov.b32 %r21, %r20"
    )
    assert findings(forgotten).races  # all into one place, and nobody waits


ONE_WORD = "mad.lo.s32 %r21, %r2, 4, %r20; mad.wide.s32 %rd5, %r2, 4, %rd1;"
COPY_A_WORD = ONE_WORD + "{} cp.async.ca.shared.global [%r21], [%rd5], 4; cp.async.commit_group; {}"
HALVES = "and.b32 %r12, %r2, 16; mov.b32 %r13, 0xffff; shl.b32 %r13, %r13, %r12; ld.global.b32 %r10, [%rd3];"


@pytest.mark.parametrize("body", [
    COPY_A_WORD.format("", "ld.shared.b32 %r10, [%r21]; cp.async.wait_group 0;"),  # its own copy
    COPY_A_WORD.format("mov.b32 %r9, 0;", "st.global.b32 [%rd5], %r9; cp.async.wait_group 0;"),
    COPY_A_WORD.format("", "cp.async.ca.shared.global [%r21], [%rd5+4], 4; cp.async.wait_group 0;"),
    COPY_A_WORD.format("setp.eq.s32 %p1, %r2, 0;", "@%p1 cp.async.wait_group 0; bar.sync 0;"),
    ONE_WORD + "setp.ne.s32 %p1, %r2, %r2; cp.async.ca.shared.global [tile], [%rd5], 4, %p1;",
    HALVES + "bar.warp.sync %r13;",
    HALVES + "redux.sync.max.s32 %r14, %r10, %r13;",
    HALVES + "setp.gt.s32 %p2, %r10, 0; vote.sync.ballot.b32 %r14, %p2, %r13;",
    "setp.lt.s32 %p1, %r2, 16; @%p1 shfl.sync.bfly.b32 %r11, %r2, 1, 31, -1;",
    "shr.u32 %r12, %r2, 5; bar.sync %r12;",
    "ld.global.nc.b32 %r10, [%rd4]; st.global.b32 [%rd4], %r2;",
    "mov.b32 %r9, 0f3E99999A; ex2.approx.f32 %r10, %r9; setp.ne.s32 %p1, %r10, 7; @%p1 st.shared.b32 [tile], %r2;",
])  # fmt: skip
def test_what_is_not_ordered_by_rules_that_are_known_here_is_refused(body: str) -> None:
    with pytest.raises(Unsupported):
        findings(body)


def test_warps_must_be_whole() -> None:
    with pytest.raises(Unsupported, match="48 threads"):
        findings("", threads=48)


@pytest.mark.parametrize("body", [
    "ld.global.b32 %r10, [%rd3]; setp.gt.s32 %p1, %r10, 0; @%p1 bra $L; mov.b32 %r9, 1; $L: mov.b32 %r9, 2;",
    "ld.global.b32 %r10, [%rd3]; and.b32 %r10, %r10, 60; add.s32 %r10, %r10, %r20; st.shared.b32 [%r10], %r2;",
    "ld.global.b32 %r10, [%rd3]; setp.gt.s32 %p1, %r10, 0; @%p1 st.shared.b32 [%r7], %r2;",
    "add.cc.u32 %r10, %r2, %r2;",
])  # fmt: skip
def test_what_depends_on_data_is_not_known(body: str) -> None:
    with pytest.raises(Unsupported):
        findings(body)


# ---- every schedule, tried -------------------------------------------------------------------------------

THREADS = st.lists(st.lists(st.sampled_from([READ, 1, 2]), min_size=1, max_size=3), min_size=2, max_size=3)


def outcomes(threads: Sequence[Sequence[int]]) -> set[tuple[object, ...]]:
    """What the reads of all threads find, and what is left, over all schedules of accesses to one byte."""
    found = set()
    turns = [n for n, own in enumerate(threads) for _ in own]
    for schedule in set(itertools.permutations(turns)):
        places, value, reads = [0] * len(threads), -1, {}
        for thread in schedule:
            access = threads[thread][places[thread]]
            if access == READ:
                reads[thread, places[thread]] = value
            else:
                value = access
            places[thread] += 1
        found.add((*sorted(reads.items()), value))
    return found


def problem_of(threads: Sequence[Sequence[int]]) -> str:
    """Of threads of different warps."""
    accesses = [Access(0, 32 * n, 0, 0, value) for n, own in enumerate(threads) for value in own]
    return problem(accesses, 32 * len(threads))[0]


@given(THREADS)
def test_without_a_race_every_schedule_shows_the_same(threads: list[list[int]]) -> None:
    assert problem_of(threads) or len(outcomes(threads)) == 1


@given(THREADS)
def test_two_threads_that_write_different_values_race(threads: list[list[int]]) -> None:
    written = [set(own) - {READ} for own in threads]
    differ = any(first | second == {1, 2} for first, second in itertools.combinations(written, 2) if first and second)
    assert problem_of(threads) or not differ
