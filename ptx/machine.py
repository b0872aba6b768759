"""Executes one launch: all threads of all blocks as the lanes of numpy vectors, in lockstep.

In: a `Program`, its grid, the number of threads of a block, arguments, global memory. Out: global memory as the launch
leaves it, and the conflicts. Lanes that part at a branch meet again where both of its ways join. Guarantee: what
hardware leaves undefined raises Fault or is counted as a conflict: a barrier that a part of a block reaches, memory
beyond allocations, unordered accesses. What is not known here raises Unsupported. Warps have 32 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np

from ptx import warps
from ptx.arithmetic import TYPES, compared, converted, halves, joined, rule_of
from ptx.memory import Conflicts, Fault, Global, Tracked
from ptx.text import SIZES, Address, Immediate, Instruction, Operand, Program, Unsupported

WARP = 32
MOST_STEPS = 3_000_000  # instructions of a launch: a loop that does not end
_WORDS = {"relu", "xorsign", "abs"}  # of an opcode, which no rule of `ptx.arithmetic` knows
_SPACES = ("global", "shared", "local", "param")
Array = Any
# Of NVIDIA's libdevice, which are not inlined. This one gets the absolute value of a base, and no special numbers.
FUNCTIONS: dict[str, Callable[..., Array]] = {"__internal_accurate_pow": np.power}


@dataclass(frozen=True)
class Launch:
    """How a program is launched."""

    blocks: int
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    arguments: tuple[int, ...]  # in the order of the parameters


@dataclass(frozen=True)
class Copy:
    """An asynchronous copy that nobody has waited for: each lane's places, and how many of its bytes are given."""

    text: str
    to: Array
    source: Array
    given: Array
    mask: Array
    size: int
    begun: Array  # the barriers that each block had passed


@dataclass
class _Path:
    """Lanes that are at one place, and where they wait for others."""

    lanes: Array
    place: int
    end: int


def meeting_places(code: Sequence[Instruction]) -> dict[int, int]:
    """Of each branch the first instruction that both of its ways lead to; the number of instructions: the end."""
    end = len(code)
    ways = networkx.DiGraph()
    for n, item in enumerate(code):
        name = item.opcode[0]
        is_over = name in ("ret", "exit", "trap") and not item.guard
        follows = [end] if is_over else [item.target] if name == "bra" else [n + 1]
        ways.add_edges_from((place, n) for place in follows)  # backwards: from the end
        if name in ("bra", "ret", "exit") and item.guard:
            ways.add_edge(n + 1, n)
    nearest = networkx.immediate_dominators(ways, end)
    return {n: nearest.get(n, end) for n, item in enumerate(code) if item.opcode[0] == "bra" and item.guard}


class Machine:
    """Of one launch."""

    def __init__(
        self, program: Program, launch: Launch, memory: Global, conflicts: Conflicts, named: dict[str, int]
    ) -> None:
        """``named``: addresses of the module's own global memory."""
        self._program, self._launch, self._global = program, launch, memory
        self.lanes = launch.blocks * launch.threads
        self._registers = {
            name: np.zeros(self.lanes, TYPES[kind] if kind == "pred" else np.dtype(f"u{SIZES[kind]}"))
            for name, kind in program.registers.items()
        }
        lane = np.arange(self.lanes)
        self._block = lane // launch.threads
        self._warp = lane // WARP
        self._epoch = np.zeros(launch.blocks, np.int32)  # barriers that each block has passed
        self._special = {
            "%tid.x": lane % launch.threads, "%ctaid.x": self._block, "%laneid": lane % WARP,
            "%ntid.x": np.full(self.lanes, launch.threads), "%nctaid.x": np.full(self.lanes, launch.blocks),
        }  # fmt: skip
        for name in ("tid", "ctaid", "ntid", "nctaid"):
            for axis in "yz":
                self._special[f"%{name}.{axis}"] = np.full(self.lanes, int(name[0] == "n"))
        self._places = dict(named)
        self._lay_out()
        self.shared = Tracked(launch.blocks * self._shared_size, conflicts, "shared memory")
        self.shared.valid[:] = True
        self._local = np.zeros((self.lanes, max(self._local_size, 1)), np.uint8)
        self._passed: dict[str, Array] = {}  # parameters and results of calls
        self._carry = np.zeros(self.lanes, np.uint64)
        self._copies: list[Copy | None] = []  # None: the end of a group
        self._parameters = dict(zip((p.name for p in program.parameters), launch.arguments, strict=True))
        self._steps = [self._step(item) for item in program.code]

    def _lay_out(self) -> None:
        """Places of shared and local memory; dynamic shared memory comes last."""
        sizes = {"shared": 0, "local": 0}
        for name, item in sorted(self._program.memory.items(), key=lambda pair: pair[1].size == 0):
            if item.space in sizes:
                at = -(-sizes[item.space] // item.align) * item.align
                self._places[name] = at
                sizes[item.space] = at + item.size
        self._shared_size = -(-(sizes["shared"] + self._launch.shared_bytes) // 16) * 16
        self._local_size = sizes["local"]

    def begin_at(self, block: int, grid: tuple[int, int, int]) -> None:
        """Be a part of a launch of more blocks, in three axes: those from this one on, x varying fastest."""
        x, y, z = grid
        number = self._block + block
        for axis, place, count in (("x", number % x, x), ("y", number // x % y, y), ("z", number // (x * y), z)):
            self._special[f"%ctaid.{axis}"] = place
            self._special[f"%nctaid.{axis}"] = np.full(self.lanes, count)

    # ---- running -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all lanes to their end. Lanes that part at a branch go one way after the other, to where these meet."""
        meeting = meeting_places(self._program.code)
        alive = np.ones(self.lanes, np.bool_)
        paths = [_Path(alive.copy(), 0, len(self._program.code))]
        with np.errstate(all="ignore"):
            for _ in range(MOST_STEPS):
                path = paths[-1]
                active = path.lanes & alive
                if path.place == path.end or not active.any():
                    paths.pop()
                    if not paths:
                        return
                    continue
                item, here = self._program.code[path.place], path.place
                path.place += 1
                mask = self._guarded(item, active)
                if not mask.any():
                    continue
                if item.opcode[0] in ("ret", "exit"):
                    alive &= ~mask
                elif item.opcode[0] != "bra":
                    self._steps[here](mask)
                elif (mask == active).all():
                    path.place = item.target
                else:
                    path.place = meeting[here]
                    paths.append(_Path(active & ~mask, here + 1, meeting[here]))
                    paths.append(_Path(mask, item.target, meeting[here]))
        raise Fault("expected a launch that ends, found one that goes on")

    def _guarded(self, item: Instruction, active: Array) -> Array:
        """The active lanes that execute an instruction."""
        if not item.guard:
            return active
        guard = self._registers[item.guard]
        return active & (~guard if item.is_negated else guard)

    # ---- operands ------------------------------------------------------------------------------------------

    def _read(self, operand: Operand, kind: str) -> Array:
        """The vector of an operand as numbers of a type."""
        dtype = TYPES[kind]
        if isinstance(operand, Immediate):
            return np.broadcast_to(_immediate(operand, dtype), (self.lanes,))
        assert isinstance(operand, str), operand
        if operand in self._registers:
            return _as(self._registers[operand], dtype)
        if operand in self._special:
            return self._special[operand].astype(dtype)
        if operand in self._places:
            return np.full(self.lanes, self._places[operand]).astype(dtype)
        raise Unsupported(f"operand {operand}")

    def _write(self, operand: Operand, values: Array, mask: Array) -> None:
        if operand == "_":
            return
        register = self._registers[str(operand)]
        values = np.ascontiguousarray(values)
        if register.dtype != values.dtype:
            if values.dtype.itemsize == register.dtype.itemsize and register.dtype != np.bool_:
                values = values.view(register.dtype)
            else:  # a value in a larger register
                values = values.view(f"u{values.dtype.itemsize}").astype(register.dtype)
        np.copyto(register, values, where=mask)

    def _address(self, operand: Operand) -> Array:
        assert isinstance(operand, Address)
        if operand.base in self._registers:
            return self._registers[operand.base].astype(np.int64) + operand.offset
        if operand.base not in self._places:
            raise Unsupported(f"address {operand.base}")
        return np.full(self.lanes, self._places[operand.base] + operand.offset)

    # ---- instructions --------------------------------------------------------------------------------------

    def _step(self, item: Instruction) -> Callable[[Array], None]:
        """What an instruction does to the lanes of a mask. Raises Unsupported."""
        name = item.opcode[0]
        special = getattr(self, f"_do_{name}", None)
        if special is not None:
            return lambda mask: special(item, mask)
        if name in ("bra", "ret", "exit"):
            return lambda mask: None
        rule = rule_of(name)
        words, kind = item.opcode, item.opcode[-1]
        if not _WORDS.isdisjoint(words[1:]) or ("sat" in words and kind[0] in "su"):
            raise Unsupported(item.text)
        kinds = self._operand_types(item)
        destination, *sources = item.operands

        def run(mask: Array) -> None:
            given = [self._read(source, own) for source, own in zip(sources, kinds, strict=True)]
            self._write(destination, rule(words, kind, *given), mask)

        return run

    def _operand_types(self, item: Instruction) -> list[str]:
        name, kind, count = item.opcode[0], item.opcode[-1], len(item.operands) - 1
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in item.opcode else kind
        if name == "mad":
            return [kind, kind, wide]
        if name in ("shl", "shr"):
            return [kind, "u32"]
        if name == "bfe":
            return [kind, "u32", "u32"]
        if name == "bfi":
            return [kind, kind, "u32", "u32"]
        if name == "lop3":
            return [kind] * 3 + ["u32"]
        return [kind] * count

    def _do_mov(self, item: Instruction, mask: Array) -> None:
        to, source = item.operands
        kind = item.opcode[-1]
        if isinstance(source, tuple):  # joins parts, the lowest first
            size = SIZES[kind] // len(source)
            parts = [self._read(part, f"u{8 * size}").astype(f"u{SIZES[kind]}") for part in source]
            self._write(to, sum(p << p.dtype.type(8 * size * n) for n, p in enumerate(parts)), mask)
        elif isinstance(to, tuple):
            size = SIZES[kind] // len(to)
            whole = self._read(source, f"u{SIZES[kind] * 8}")
            for n, part in enumerate(to):
                self._write(part, (whole >> whole.dtype.type(8 * size * n)).astype(f"u{size}"), mask)
        else:
            self._write(to, self._read(source, kind), mask)

    def _do_cvta(self, item: Instruction, mask: Array) -> None:
        self._write(item.operands[0], self._read(item.operands[1], item.opcode[-1]), mask)

    def _do_cvt(self, item: Instruction, mask: Array) -> None:
        to, *sources = item.operands
        if "sat" in item.opcode and all(word[0] in "su" for word in item.opcode[-2:]):
            raise Unsupported(item.text)
        found = converted(item.opcode, *(self._read(s, item.opcode[-1]) for s in sources))
        self._write(to, self._extended(to, found) if found.dtype.kind == "i" else found, mask)

    def _extended(self, to: Operand, values: Array) -> Array:
        """Signed numbers as wide as a register that is wider: their sign is repeated."""
        size = max(values.dtype.itemsize, self._width(to))
        return values.astype(f"i{size}")

    def _width(self, operand: Operand) -> int:
        """Bytes of a register; 0 of anything else."""
        found = self._registers.get(operand) if isinstance(operand, str) else None
        return 0 if found is None else found.dtype.itemsize

    def _do_setp(self, item: Instruction, mask: Array) -> None:
        kind = item.opcode[-1]
        *to, a, b = item.operands if item.opcode[2] not in ("and", "or", "xor") else item.operands[:-1]
        if kind in ("f16x2", "bf16x2"):  # a register for each half
            pairs = zip(to, halves(self._read(a, "b32")), halves(self._read(b, "b32")), strict=True)
            for register, *half in pairs:
                half = [x.view(np.float16) for x in half] if kind == "f16x2" else half
                self._write(register, compared(item.opcode, kind[:-2], *half), mask)
            return
        found = compared(item.opcode, kind, self._read(a, kind), self._read(b, kind))
        others = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
        values = [found, ~found][: len(to)]
        if item.opcode[2] in others:
            third = self._read(item.operands[-1], "pred").copy()  # which may be written here
            values = [others[item.opcode[2]](value, third) for value in values]
        for register, value in zip(to, values, strict=True):
            self._write(register, value, mask)

    def _do_selp(self, item: Instruction, mask: Array) -> None:
        to, a, b, chosen = item.operands
        kind = item.opcode[-1]
        self._write(to, np.where(self._read(chosen, "pred"), self._read(a, kind), self._read(b, kind)), mask)

    def _do_testp(self, item: Instruction, mask: Array) -> None:
        to, source = item.operands
        x, word = self._read(source, item.opcode[-1]), item.opcode[1]
        rules = {"finite": np.isfinite, "infinite": np.isinf, "number": lambda v: ~np.isnan(v), "notanumber": np.isnan}
        if word not in rules:
            raise Unsupported(item.text)
        self._write(to, rules[word](x), mask)

    def _with_carry(self, item: Instruction, mask: Array, total: Array) -> None:
        """Write the lower 32 bits; the rest is the carry."""
        if "cc" in item.opcode:
            np.copyto(self._carry, total >> np.uint64(32), where=mask)
        self._write(item.operands[0], (total & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)

    def _do_mad(self, item: Instruction, mask: Array) -> None:
        if "cc" not in item.opcode:
            rule = rule_of("mad")
            given = [self._read(s, k) for s, k in zip(item.operands[1:], self._operand_types(item), strict=True)]
            self._write(item.operands[0], rule(item.opcode, item.opcode[-1], *given), mask)
        else:
            self._with_carry(item, mask, self._half_product(item))

    def _do_madc(self, item: Instruction, mask: Array) -> None:
        self._with_carry(item, mask, self._half_product(item) + self._carry)

    def _half_product(self, item: Instruction) -> Array:
        if item.opcode[-1] != "u32":
            raise Unsupported(item.text)
        a, b, c = (self._read(source, "u32").astype(np.uint64) for source in item.operands[1:])
        product = a * b
        return (product >> np.uint64(32) if "hi" in item.opcode else product & np.uint64(0xFFFFFFFF)) + c

    def _do_addc(self, item: Instruction, mask: Array) -> None:
        a, b = (self._read(source, "u32").astype(np.uint64) for source in item.operands[1:])
        self._with_carry(item, mask, a + b + self._carry)

    # ---- memory --------------------------------------------------------------------------------------------

    def _do_ld(self, item: Instruction, mask: Array) -> None:
        to, source, *_ = item.operands  # and perhaps a policy of the caches
        kind, space = item.opcode[-1], self._space(item)
        if space == "param":
            assert isinstance(source, Address)
            if source.base in self._passed:  # the result of a call
                self._write(to, self._passed[source.base].view(f"u{SIZES[kind]}"), mask)
                return
            value = self._parameters[source.base] % (1 << (8 * SIZES[kind]))
            self._write(to, np.full(self.lanes, value, f"u{SIZES[kind]}"), mask)
            return
        parts = to if isinstance(to, tuple) else (to,)
        size = SIZES[kind]
        at = self._address(source)[mask]
        self._aligned(at, size * len(parts), item)
        for n, part in enumerate(parts):
            found = np.zeros(self.lanes, f"u{size}")
            found[mask] = self._load(space, at + size * n, size, mask, item.text)
            self._write(part, self._extended(part, found.view(TYPES[kind])) if kind[0] == "s" else found, mask)

    def _do_st(self, item: Instruction, mask: Array) -> None:
        to, source, *_ = item.operands
        kind, space = item.opcode[-1], self._space(item)
        if space == "param":  # of a call
            assert isinstance(to, Address)
            self._passed[to.base] = self._read(source, kind).copy()
            return
        parts = source if isinstance(source, tuple) else (source,)
        size = SIZES[kind]
        at = self._address(to)[mask]
        self._aligned(at, size * len(parts), item)
        for n, part in enumerate(parts):
            values = self._stored(part, size)[mask]
            self._store(space, at + size * n, size, values, mask, item.text)

    def _stored(self, part: Operand, size: int) -> Array:
        if isinstance(part, str) and part in self._registers:  # a byte of a register with 16 bits
            return _as(self._registers[part], None).astype(f"u{size}")
        return self._read(part, f"u{8 * size}")

    def _space(self, item: Instruction) -> str:
        found = next((word for word in item.opcode if word in _SPACES), None)
        if found is None:
            raise Unsupported(f"generic addresses: {item.text}")
        return found

    def _aligned(self, at: Array, size: int, item: Instruction) -> None:
        if (at % size).any():
            found = int(at[at % size != 0][0])
            raise Fault(f"expected multiples of {size} bytes, found address {found:#x}: {item.text}")

    def _load(self, space: str, at: Array, size: int, mask: Array, text: str) -> Array:
        if space == "local":
            return self._own(at, size, mask, text).view(f"u{size}")[:, 0]
        memory, place, who, when = self._where(space, at, mask, text)
        return memory.load(place, size, who, when, text)

    def _store(self, space: str, at: Array, size: int, values: Array, mask: Array, text: str) -> None:
        if space == "local":
            lanes = np.flatnonzero(mask)[:, None]
            self._own(at, size, mask, text)
            columns = at[:, None] + np.arange(size)
            found = np.ascontiguousarray(values.astype(f"u{size}"))
            self._local[lanes, columns] = found.view(np.uint8).reshape(-1, size)
            return
        memory, place, who, when = self._where(space, at, mask, text)
        memory.store(place, size, values, who, when, text)

    def _own(self, at: Array, size: int, mask: Array, text: str) -> Array:
        if len(at) and (at.min() < 0 or at.max() + size > self._local_size):
            raise Fault(f"local memory has {self._local_size} bytes: {text}")
        return np.ascontiguousarray(self._local[np.flatnonzero(mask)[:, None], at[:, None] + np.arange(size)])

    def _where(self, space: str, at: Array, mask: Array, text: str) -> tuple[Tracked, Array, Array, Array]:
        """The memory, places in it, who touches it, and in which stretch between two barriers."""
        block = self._block[mask]
        if space == "global":
            return (
                self._global.tracked,
                at - self._global.base,
                block,
                np.full(len(at), self._global.launches, np.int32),
            )
        if len(at) and (at.min() < 0 or at.max() >= self._shared_size):
            raise Fault(f"shared memory has {self._shared_size} bytes: {text}")
        return self.shared, at + block * self._shared_size, self._warp[mask], self._epoch[block]

    # ---- between lanes -------------------------------------------------------------------------------------

    def _do_bar(self, item: Instruction, mask: Array) -> None:
        if item.opcode[1:2] not in (("sync",), ("warp",)) or (len(item.operands) > 1 and item.opcode[1] == "sync"):
            raise Unsupported(item.text)
        if item.opcode[1] == "warp":
            return
        whole = mask.reshape(self._launch.blocks, -1)
        if (whole.any(1) & ~whole.all(1)).any():
            raise Fault(f"a part of a block reached a barrier: {item.text}")
        self._epoch[whole.all(1)] += 1

    _do_barrier = _do_bar

    def _do_shfl(self, item: Instruction, mask: Array) -> None:
        *to, source, lane, clamp, _ = item.operands
        values = self._read(source, "b32")
        mode = next(word for word in item.opcode if word in ("up", "down", "bfly", "idx"))
        taken, is_inside = warps.shuffled(values, mode, self._read(lane, "u32"), self._read(clamp, "u32"), mask)
        self._write(to[0], taken, mask)
        if len(to) > 1:
            self._write(to[1], is_inside, mask)

    def _do_vote(self, item: Instruction, mask: Array) -> None:
        to, source, *_ = item.operands
        self._write(to, warps.voted(self._read(source, "pred"), item.opcode[2], mask), mask)

    def _do_redux(self, item: Instruction, mask: Array) -> None:
        to, source, _ = item.operands
        self._write(to, warps.reduced(self._read(source, item.opcode[-1]), item.opcode[2], mask), mask)

    def _do_ldmatrix(self, item: Instruction, mask: Array) -> None:
        to, source = item.operands
        if not {"m8n8", "b16"} <= set(item.opcode):
            raise Unsupported(item.text)
        assert isinstance(to, tuple)
        at = self._address(source)
        count = 8 * len(to)
        pointing = mask & (np.arange(self.lanes) % WARP < count)
        self._aligned(at[pointing], 16, item)
        found = np.zeros((self.lanes, 8), np.uint16)
        for k in range(8):
            found[pointing, k] = self._load("shared", at[pointing] + 2 * k, 2, pointing, item.text)
        for n, part in enumerate(to):
            self._write(part, joined(*warps.matrix_part(found, n, "trans" in item.opcode)), mask)

    def _do_stmatrix(self, item: Instruction, mask: Array) -> None:
        to, source = item.operands
        if not {"m8n8", "b16"} <= set(item.opcode):
            raise Unsupported(item.text)
        parts = source if isinstance(source, tuple) else (source,)
        at = self._address(to)
        pointing = mask & (np.arange(self.lanes) % WARP < 8 * len(parts))
        self._aligned(at[pointing], 16, item)
        rows = np.zeros((self.lanes, 8), np.uint16)
        for n, part in enumerate(parts):
            warps.set_matrix(rows, n, halves(self._read(part, "b32")), "trans" in item.opcode)
        for k in range(8):
            self._store("shared", at[pointing] + 2 * k, 2, rows[pointing, k], pointing, item.text)

    def _do_mma(self, item: Instruction, mask: Array) -> None:
        whole = mask.reshape(-1, WARP)
        if (whole.any(1) & ~whole.all(1)).any():
            raise Fault(f"a part of a warp multiplies matrices: {item.text}")
        to, a, b, c = item.operands
        shape, of_d, of_a, of_b, of_c = item.opcode[3], *item.opcode[-4:]
        parts = [[self._read(part, "b32") for part in operand] for operand in (a, b, c)]  # type: ignore[union-attr]
        if "row" not in item.opcode or "col" not in item.opcode or (of_d, of_c) != ("f32", "f32") or of_a != of_b:
            raise Unsupported(item.text)
        for part, values in zip(to, warps.multiplied(shape, of_a, *parts), strict=True):
            self._write(part, values, mask)

    def _do_cp(self, item: Instruction, mask: Array) -> None:
        if item.opcode[1] != "async":
            raise Unsupported(item.text)
        if item.opcode[2] == "commit_group":
            self._copies.append(None)
        elif item.opcode[2] in ("wait_group", "wait_all"):
            left = item.operands[0] if item.operands else Immediate(0, 0)
            assert isinstance(left, Immediate)
            self._finish_copies(left.value if item.opcode[2] == "wait_group" else -1)
        else:
            to, source, size, *rest = item.operands
            assert isinstance(size, Immediate)
            if len(rest) > 1 or any(self._width(operand) not in (0, 4) for operand in rest):
                raise Unsupported(item.text)  # a predicate that leaves the source out, or a policy of the caches
            given = self._read(rest[0], "u32") if rest else np.full(self.lanes, size.value)
            places = self._address(to).copy(), self._address(source).copy()
            begun = self._epoch.copy()
            self._copies.append(Copy(item.text, *places, np.array(given), mask.copy(), size.value, begun))

    def _finish_copies(self, left: int) -> None:
        """Copy what was asked for, but for the last ``left`` groups; -1: all, committed or not."""
        ends = [n for n, copy in enumerate(self._copies) if copy is None]
        until = len(self._copies) if left < 0 else (ends[-left - 1] + 1 if len(ends) > left else 0)
        for copy in self._copies[:until]:
            if copy is not None:
                self._copy(copy)
        del self._copies[:until]

    def _copy(self, copy: Copy) -> None:
        """The bytes given of each lane; the rest of its size is zeros."""
        mask = copy.mask
        if (copy.to[mask] % copy.size).any() or (copy.source[mask & (copy.given > 0)] % copy.size).any():
            raise Fault(f"expected multiples of {copy.size} bytes: {copy.text}")
        for k in range(0, copy.size, 4):
            values = np.zeros(self.lanes, np.uint32)
            reading = mask & (copy.given > k)
            values[reading] = self._load("global", copy.source[reading] + k, 4, reading, copy.text)
            bits = 8 * np.clip(copy.given.astype(np.int64) - k, 0, 4).astype(np.uint64)
            values = (values & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.uint32)
            self._store("shared", copy.to[mask] + k, 4, values[mask], mask, copy.text)

    # ---- the rest ------------------------------------------------------------------------------------------

    def _do_call(self, item: Instruction, mask: Array) -> None:
        if item.operands[0] == "__assertfail":
            raise AssertionError("the kernel's own assertion failed")
        (result,), name, given = item.operands
        if name not in FUNCTIONS or len(given) != 2:  # with a constant built in it has one argument
            raise Unsupported(f"a call of {name}")
        values = [self._passed[str(place)].view(np.float64) for place in given]
        self._passed[str(result)] = FUNCTIONS[str(name)](*values)

    def _do_trap(self, item: Instruction, mask: Array) -> None:
        raise Fault("trap")

    def _do_createpolicy(self, item: Instruction, mask: Array) -> None:
        """Of the caches: nothing to do."""

    _do_prefetch = _do_fence = _do_membar = _do_createpolicy


def _immediate(operand: Immediate, dtype: np.dtype[Any]) -> Any:
    if operand.bits:
        pattern = np.array(operand.value, f"u{operand.bits // 8}")
        return (pattern.view(f"f{operand.bits // 8}") if dtype.kind == "f" else pattern).astype(dtype)
    if dtype == np.bool_:
        return np.bool_(operand.value)
    if dtype.kind == "f":
        return np.array(operand.value % (1 << (8 * dtype.itemsize)), f"u{dtype.itemsize}").view(dtype)
    bits = 8 * dtype.itemsize
    return np.array(operand.value % (1 << bits), f"u{dtype.itemsize}").view(dtype)


def _as(register: Array, dtype: np.dtype[Any] | None) -> Array:
    """A register's bits as numbers; of a smaller type, its lower bits."""
    if dtype is None or register.dtype == dtype:
        return register
    if register.dtype.itemsize == dtype.itemsize:
        return register.view(dtype)
    if register.dtype.itemsize > dtype.itemsize:
        return register.astype(f"u{dtype.itemsize}").view(dtype)
    return register.astype(dtype)


def run(program: Program, launch: Launch, memory: Global, conflicts: Conflicts, named: dict[str, int]) -> None:
    """Run a launch. Raises Fault, Unsupported, and AssertionError where the kernel's own assertion fails."""
    memory.launches += 1
    Machine(program, launch, memory, conflicts, named).run()


def places_of(program: Program) -> Sequence[tuple[str, bytes, int]]:
    """The module's own global memory: names, contents, and bytes."""
    found = [(name, m) for name, m in program.memory.items() if m.space in ("global", "const")]
    return [(name, m.data.ljust(m.size, b"\0"), m.size) for name, m in found]
