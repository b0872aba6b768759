"""What holds for all schedules and all inputs of one launch: that its threads' accesses are ordered, or of one value.

In: a program, its launch, global memory. Out: `Findings`. The launch is executed once, and beside each value goes the
term that made it (`ptx.terms`). Guarantee: where no race is found, no schedule and no input of this launch has a race
or a deadlock, but for writes of one value. It rests on control and addresses that no input changes: then every schedule
has these accesses, and they are compared pair by pair. Anything else raises Unsupported. Threads of a block are ordered
by its barriers, those of a warp by ``bar.warp`` too, blocks by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ptx import warps
from ptx.accesses import ANY_TIME, READ, Findings, compare, written_places
from ptx.machine import WARP, Copy, Launch, Machine
from ptx.memory import Conflicts, Global
from ptx.terms import ROUNDINGS, Numbers, Terms
from ptx.text import SIZES, Address, Immediate, Instruction, Operand, Program, Unsupported

Array = Any
_ALL_LANES = 0xFFFFFFFF
_EVERYBODY = Immediate(-1, 0)
_SILENT = ("bra", "ret", "exit", "bar", "barrier", "prefetch", "fence", "membar", "trap")
_FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f64"))
_EXACT = ("setp", "testp", "selp", "mov", "neg", "abs", "cvt")  # the only bits that a float's instruction may give
_Step = Callable[[Array], None]  # what an instruction does to the lanes of a mask


class AllSchedules(Machine):
    """A launch whose values are followed as terms."""

    def __init__(self, program: Program, launch: Launch, memory: Global, named: dict[str, int]) -> None:
        if launch.threads % WARP:
            raise Unsupported(f"{launch.threads} threads, which are no whole warps")
        self._place = {id(item): n for n, item in enumerate(program.code)}
        super().__init__(program, launch, memory, Conflicts(), named)
        self._terms = Terms()
        self._numbers = {name: self._terms.given(self.lanes) for name in self._registers}
        self._of_warp = np.zeros(self.lanes // WARP, np.int32)  # barriers that each warp has passed by itself
        self._memory = {"shared": self._terms.given(len(self.shared.data)),
                        "global": self._terms.given(len(memory.tracked.data))}  # fmt: skip
        self._loaded: list[Numbers] = []  # by the instruction at hand, of its lanes
        self._storing: Iterator[tuple[Numbers, int]] = iter(())  # what it stores, of all lanes; bytes of the register
        self._copying: Copy | None = None
        self._log: dict[str, list[Array]] = {"shared": [], "global": []}
        self._unchanging: list[Array] = []  # places of global memory that are read as what nobody writes

    def findings(self) -> Findings:
        """Run the launch. Raises Fault and Unsupported."""
        self.run()
        self._finish_copies(-1)  # those that nobody has waited for
        found = Findings()
        logs = {space: np.concatenate(parts, axis=1) for space, parts in self._log.items() if parts}
        for space, log in logs.items():
            compare(space, log, self._launch.threads, found)
        if self._unchanging and "global" in logs:
            written = written_places(logs["global"])
            if np.isin(np.concatenate(self._unchanging), written).any():
                raise Unsupported("what is read as unchanging memory is written")
        return found

    # ---- control -------------------------------------------------------------------------------------------

    def _guarded(self, item: Instruction, active: Array) -> Array:
        if item.guard:
            self._must_be_known(self._numbers[item.guard], active, item)
        return super()._guarded(item, active)

    def _must_be_known(self, numbers: Numbers, mask: Array, item: Instruction) -> None:
        if (numbers[mask] >= 0).any():
            raise Unsupported(f"control or an address depends on data: {item.text}")

    def _step(self, item: Instruction) -> _Step:
        concrete = super()._step(item)
        name = item.opcode[0]
        if name in _SILENT:
            return concrete
        follow = getattr(self, f"_follow_{name}", self._follow)
        return lambda mask: follow(item, mask, concrete)

    # ---- values --------------------------------------------------------------------------------------------

    def _number(self, operand: Operand, kind: str) -> Numbers:
        if isinstance(operand, str) and operand in self._numbers:
            return self._numbers[operand]
        bits = np.ascontiguousarray(self._read(operand, kind))
        return self._terms.known(bits if bits.dtype == np.bool_ else bits.view(f"u{bits.dtype.itemsize}"))

    def _set(self, register: Operand, numbers: Numbers, mask: Array) -> None:
        """Name what was written to a register; the bits of what no input changes are there."""
        if register == "_":
            return
        own = self._numbers[str(register)]
        if (numbers < 0).any():
            numbers = np.where(numbers < 0, self._terms.known(self._registers[str(register)]), numbers)
        np.copyto(own, numbers, where=mask)

    def _made(self, words: Sequence[str], given: Sequence[Numbers]) -> Numbers:
        """Of what an instruction makes; negative where all operands are known and the result has no other bits than
        those that were computed here: special functions differ, and so do the bits of a NaN."""
        is_rounded = words[0] == "cvt" and all(word in _FLOATS for word in words[-3:-1])
        if is_rounded or (words[0] not in _EXACT and not _FLOATS.isdisjoint(words[1:])):
            return self._terms.made(words, *given)
        is_known = np.logical_and.reduce([numbers < 0 for numbers in given])
        return np.where(is_known, -1, self._terms.made(words, *given))

    def _follow(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        """Instructions of which each lane's result depends on its operands alone."""
        if "cc" in item.opcode or item.opcode[0] in ("addc", "madc"):
            raise Unsupported(f"a carry: {item.text}")
        name, kind = item.opcode[0], item.opcode[-1]
        count = len(item.operands) - (3 if item.opcode[2:3] in (("and",), ("or",), ("xor",)) else 2)
        to = item.operands[:count] if name == "setp" else item.operands[:1]
        sources = item.operands[len(to) :]
        if name in ("setp", "selp", "cvt", "cvta", "testp"):
            kinds = [*[kind] * (len(sources) - 1), "pred"] if name == "selp" or len(sources) == 3 else [kind] * 2
        else:
            kinds = self._operand_types(item)
        given = [self._number(source, own) for source, own in zip(sources, kinds, strict=False)]
        concrete(mask)
        made = [self._made((*item.opcode, str(n)), given) for n in range(len(to))]
        if name in ("add", "sub") and kind in _FLOATS and not ROUNDINGS & set(item.opcode):
            is_product = np.logical_or.reduce([self._terms.are_products(numbers) for numbers in given])
            words = ("contracted", *item.opcode, str(self._place[id(item)]))
            made = [np.where(is_product, self._terms.made(words, *given), numbers) for numbers in made]
        for register, numbers in zip(to, made, strict=True):
            self._set(register, numbers, mask)

    def _follow_createpolicy(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        self._set(item.operands[0], self._terms.given(self.lanes), mask)

    def _follow_selp(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, a, b, chosen = item.operands
        kind = item.opcode[-1]
        first, second, by = self._number(a, kind), self._number(b, kind), self._number(chosen, "pred")
        picked = np.where(self._read(chosen, "pred"), first, second)
        numbers = np.where((by < 0) | (first == second), picked, self._terms.made(item.opcode, first, second, by))
        concrete(mask)
        self._set(to, numbers, mask)

    def _follow_mov(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, source = item.operands
        kind = item.opcode[-1]
        if isinstance(source, tuple):
            size = 8 * SIZES[kind] // len(source)
            parts = [self._number(part, f"u{size}") for part in source]
            concrete(mask)
            self._set(to, self._made(("join", f"{len(source)}x{size}"), parts), mask)
        elif isinstance(to, tuple):
            whole, shape = self._number(source, kind), f"{len(to)}x{8 * SIZES[kind] // len(to)}"
            concrete(mask)
            for n, part in enumerate(to):
                self._set(part, self._made(("part", str(n), shape), [whole]), mask)
        else:
            numbers = self._number(source, kind)
            concrete(mask)
            self._set(to, numbers, mask)

    def _follow_call(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        raise Unsupported(item.text)

    # ---- memory --------------------------------------------------------------------------------------------

    def _follow_ld(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, source, *_ = item.operands
        if self._space(item) == "param":
            concrete(mask)
            self._set(to, np.full(self.lanes, -1), mask)
            return
        self._must_have_known_address(source, mask, item)
        self._loaded = []
        kind = item.opcode[-1]
        if ".nc." in item.text:
            at = self._address(source)[mask] - self._global.base
            count = SIZES[kind] * (len(to) if isinstance(to, tuple) else 1)
            self._unchanging.append((at[:, None] + np.arange(count)).reshape(-1))
        concrete(mask)
        for part, loaded in zip(to if isinstance(to, tuple) else (to,), self._loaded, strict=True):
            numbers = np.full(self.lanes, -1)
            numbers[mask] = loaded
            if kind[0] == "s":  # the sign is repeated where the register is larger
                numbers = self._made(("ld", kind), [numbers])
            self._set(part, numbers, mask)

    def _follow_st(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, source, *_ = item.operands
        if self._space(item) == "param":
            raise Unsupported(item.text)
        self._must_have_known_address(to, mask, item)
        kind = item.opcode[-1]
        parts = source if isinstance(source, tuple) else (source,)
        size = SIZES[kind]
        self._storing = iter([(self._number(part, f"u{8 * size}"), self._width(part) or size) for part in parts])
        concrete(mask)

    def _must_have_known_address(self, operand: Operand, mask: Array, item: Instruction) -> None:
        assert isinstance(operand, Address)
        if operand.base in self._numbers:
            self._must_be_known(self._numbers[operand.base], mask, item)

    def _load(self, space: str, at: Array, size: int, mask: Array, text: str) -> Array:
        values = super()._load(space, at, size, mask, text)
        place = self._note(space, at, size, mask, [READ] * size, text)
        parts = [self._memory[space][place + k] for k in range(size)]
        numbers = self._made(("bytes", str(size)), parts)
        self._loaded.append(np.where(numbers < 0, self._terms.known(values), numbers))
        return values

    def _store(self, space: str, at: Array, size: int, values: Array, mask: Array, text: str) -> None:
        super()._store(space, at, size, values, mask, text)
        if self._copying is not None:
            numbers, width = self._copied(mask), size
        else:
            numbers, width = next(self._storing)
        numbers = numbers[mask]
        shifted = [(values.astype(np.uint64) >> np.uint64(8 * k)) & np.uint64(0xFF) for k in range(size)]
        parts = [
            np.where(numbers < 0, self._terms.known(bits), self._terms.made(("byte", str(k), str(width)), numbers))
            for k, bits in enumerate(shifted)
        ]
        place = self._note(space, at, size, mask, parts, text)
        for k, part in enumerate(parts):
            self._memory[space][place + k] = part

    def _note(self, space: str, at: Array, size: int, mask: Array, values: Sequence[Any], text: str) -> Array:
        """Keep an access for `findings`. Out: its places, of the lanes of the mask."""
        if space == "local":
            raise Unsupported(f"local memory: {text}")
        if self._copying is None:
            self._must_not_touch_its_copies(space, at, size, mask, text)
        place = self._where(space, at, mask, text)[1]
        thread = np.flatnonzero(mask)
        now = self._epoch[self._block[mask]]
        warp = self._of_warp[self._warp[mask]]
        begun = now if self._copying is None else self._copying.begun[self._block[mask]]
        for back in range(int((now - begun).max(initial=0)) + 1):  # a copy may write at any time until it is waited for
            taking = now - back >= begun
            for k, value in enumerate(values):
                of_warp = warp if self._copying is None else np.full(len(place), ANY_TIME)
                columns = (place + k, thread, now - back, of_warp, np.broadcast_to(value, place.shape))
                self._log[space].append(np.stack(columns)[:, taking].astype(np.int64))
        return place

    def _must_not_touch_its_copies(self, space: str, at: Array, size: int, mask: Array, text: str) -> None:
        """A thread is not ordered with a copy that it has begun and not waited for."""
        for copy in filter(None, self._copies):
            begin = (copy.to if space == "shared" else copy.source)[mask]
            if (copy.mask[mask] & (at < begin + copy.size) & (begin < at + size)).any():
                raise Unsupported(f"a thread touches what its own copy may not have copied: {text}")

    def _follow_cp(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        if item.opcode[2] in ("commit_group", "wait_group", "wait_all") and not mask.all():
            raise Unsupported(f"a part of the threads: {item.text}")
        if item.operands and isinstance(item.operands[0], Address):
            size = item.operands[2]
            assert isinstance(size, Immediate)
            at = self._address(item.operands[0])[mask]
            self._must_not_touch_its_copies("shared", at, size.value, mask, item.text)
        for operand in item.operands:
            if isinstance(operand, Address):
                self._must_have_known_address(operand, mask, item)
            elif isinstance(operand, str):
                self._must_be_known(self._numbers[operand], mask, item)
        concrete(mask)

    def _copy(self, copy: Copy) -> None:
        self._copying = copy
        self._loaded = []
        super()._copy(copy)
        self._copying = None

    def _copied(self, mask: Array) -> Numbers:
        """What a copy has just loaded; zeros where nothing was given."""
        assert self._copying is not None
        k = 4 * (len(self._loaded) - 1)
        reading = mask & (self._copying.given > k)
        if (self._copying.given[reading] < k + 4).any():
            raise Unsupported(f"a part of a word: {self._copying.text}")
        numbers = self._terms.known(np.zeros(self.lanes, np.uint32))
        numbers[reading] = self._loaded[-1]
        return numbers

    # ---- between lanes -------------------------------------------------------------------------------------

    def _do_bar(self, item: Instruction, mask: Array) -> None:
        if item.opcode[1] == "warp":
            self._must_be_whole_warps(item, mask, item.operands[0])
            self._of_warp[mask.reshape(-1, WARP).all(1)] += 1
        elif item.operands != (Immediate(0, 0),):
            raise Unsupported(f"another barrier than the first: {item.text}")
        super()._do_bar(item, mask)

    _do_barrier = _do_bar

    def _must_be_whole_warps(self, item: Instruction, mask: Array, members: Operand = _EVERYBODY) -> None:
        """What only a part of a warp does together is not defined, or is ordered in that part alone."""
        named = self._number(members, "u32")
        self._must_be_known(named, mask, item)
        warps_of = mask.reshape(-1, WARP)
        if (warps_of.any(1) & ~warps_of.all(1)).any() or (self._read(members, "u32")[mask] != _ALL_LANES).any():
            raise Unsupported(f"a part of a warp: {item.text}")

    def _follow_shfl(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        *to, source, lane, clamp, members = item.operands
        self._must_be_whole_warps(item, mask, members)
        for operand in (lane, clamp):
            self._must_be_known(self._number(operand, "u32"), mask, item)
        mode = next(word for word in item.opcode if word in ("up", "down", "bfly", "idx"))
        by = self._read(lane, "u32"), self._read(clamp, "u32")
        taken, _ = warps.shuffled(self._number(source, "b32"), mode, *by, mask)
        concrete(mask)
        self._set(to[0], taken, mask)
        for register in to[1:]:
            self._set(register, np.full(self.lanes, -1), mask)

    def _follow_vote(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        """Also ``redux``: of the lanes that take part, in any order."""
        to, source, members = item.operands
        self._must_be_whole_warps(item, mask, members)
        kind = item.opcode[-1] if item.opcode[0] == "redux" else "pred"
        given = self._number(source, kind)
        is_placed = "ballot" in item.opcode
        numbers = np.full(self.lanes, -1)
        for warp, taking in enumerate(mask.reshape(-1, WARP)):
            own = given[warp * WARP : (warp + 1) * WARP]
            chosen = own[taking].tolist()
            if any(number >= 0 for number in chosen):
                places = np.flatnonzero(taking).tolist() if is_placed else []
                values = (*places, *(chosen if is_placed else sorted(chosen)))
                numbers[warp * WARP : (warp + 1) * WARP] = self._terms.together(item.opcode, values)
        concrete(mask)
        self._set(to, numbers, mask)

    _follow_redux = _follow_vote

    def _follow_ldmatrix(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, source = item.operands
        self._must_be_whole_warps(item, mask)
        assert isinstance(to, tuple)
        pointing = mask & (np.arange(self.lanes) % WARP < 8 * len(to))
        self._must_have_known_address(source, pointing, item)
        self._loaded = []
        concrete(mask)
        rows = np.full((self.lanes, 8), -1)
        rows[pointing] = np.stack(self._loaded, axis=1)
        for n, part in enumerate(to):
            pair = warps.matrix_part(rows, n, "trans" in item.opcode)
            self._set(part, self._made(("join", "2x16"), pair), mask)

    def _follow_stmatrix(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, source = item.operands
        self._must_be_whole_warps(item, mask)
        parts = source if isinstance(source, tuple) else (source,)
        self._must_have_known_address(to, mask & (np.arange(self.lanes) % WARP < 8 * len(parts)), item)
        rows = np.zeros((self.lanes, 8), np.int64)
        for n, part in enumerate(parts):
            whole = self._number(part, "b32")
            bits = self._read(part, "b32")
            halves = [self._half(whole, bits, k) for k in range(2)]
            warps.set_matrix(rows, n, (halves[0], halves[1]), "trans" in item.opcode)
        self._storing = iter([(rows[:, k], 2) for k in range(8)])
        concrete(mask)

    def _half(self, whole: Numbers, bits: Array, k: int) -> Numbers:
        known = self._terms.known((bits >> np.uint32(16 * k)) & np.uint32(0xFFFF))
        return np.where(whole < 0, known, self._terms.made(("part", str(k), "2x16"), whole))

    def _follow_mma(self, item: Instruction, mask: Array, concrete: _Step) -> None:
        to, *operands = item.operands
        assert isinstance(to, tuple)
        registers = [part for operand in operands for part in (operand if isinstance(operand, tuple) else (operand,))]
        given = np.stack([self._number(part, "b32") for part in registers], axis=1).reshape(-1, WARP * len(registers))
        whole = np.repeat([self._terms.together(item.opcode, row) for row in given.tolist()], WARP)
        concrete(mask)
        lane = self._terms.known(np.arange(self.lanes) % WARP)
        for n, part in enumerate(to):
            self._set(part, self._terms.made(("element", str(n)), whole, lane), mask)
