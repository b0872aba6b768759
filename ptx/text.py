"""PTX as a program: parameters, registers, named memory, and instructions with their labels resolved.

In: the text of one kernel, as LLVM prints it. Out: a `Program`. Guarantee: what is not understood raises Unsupported
with the line; nothing is skipped but debug information and hints of caching. Source: NVIDIA, "Parallel Thread Execution
ISA".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1}  # fmt: skip


class Unsupported(Exception):
    """A part of PTX that is not executed here."""


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; the base is a register, or the name of a parameter or of memory."""

    base: str
    offset: int


@dataclass(frozen=True)
class Immediate:
    """A number as its bits (``0f3F800000``), or as an integer."""

    value: int
    bits: int  # of a float's pattern; 0 for an integer


Operand = str | Address | Immediate | tuple["Operand", ...]  # a register's or a label's name, ..., a vector


@dataclass(frozen=True)
class Instruction:
    opcode: tuple[str, ...]  # ("ld", "global", "b32")
    operands: tuple[Operand, ...]
    guard: str = ""  # register of the predicate
    is_negated: bool = False
    target: int = -1  # of a branch: an index into the instructions
    text: str = ""


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int  # bytes


@dataclass(frozen=True)
class Memory:
    """Named memory: of the module, of a block, or of a thread."""

    space: str  # "global", "shared", "local"
    size: int  # bytes; 0 for what the launch decides
    align: int
    data: bytes = b""


@dataclass(frozen=True)
class Program:
    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]  # name -> type
    memory: dict[str, Memory]
    code: tuple[Instruction, ...]


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_MEMORY = re.compile(
    r"\.(global|shared|local|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{([^}]*)\})?\s*;"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,]*?)?\s+(\w+)\s*$")
_BLOCK = re.compile(
    r"(?<=[;{}:])\s*\{((?:[^{}]|\{[^{};]*\})*)\}"
)  # the innermost; braces of a vector hold no statement
_LABEL = re.compile(r"\s*([$\w]+)\s*:")
_IGNORED = (".loc", ".file", ".pragma", ".reg", ".param", ".section", ".callprototype")
_HINTS = re.compile(r"^(L1::|L2::|level::|nc$|weak$|volatile$|relaxed$|gpu$|cta$|sys$|uni$)")


def parse(text: str) -> Program:
    text = re.sub(r"//[^\n]*", "", text)
    entry = _ENTRY.search(text)
    if entry is None:
        raise Unsupported("expected a kernel, found no .entry")
    parameters = []
    for line in filter(None, map(str.strip, entry[2].split(","))):
        found = _PARAMETER.match(" ".join(line.split()))
        if found is None:
            raise Unsupported(f"a parameter: {line}")
        parameters.append(Parameter(found[2], SIZES[found[1]]))
    body = _without_blocks(_body(text[entry.end() :]))
    registers: dict[str, str] = {}
    for kind, names in _REGISTERS.findall(body):
        for name in map(str.strip, names.split(",")):
            ranged = re.fullmatch(r"(%\w+?)<(\d+)>", name)
            numbered = [f"{ranged[1]}{n}" for n in range(int(ranged[2]))] if ranged else [name]
            if not registers.keys().isdisjoint(numbered):
                raise Unsupported(f"register {name} is declared twice")
            registers |= dict.fromkeys(numbered, kind)
    memory = {}
    for space, align, kind, name, count, data in _MEMORY.findall(text):
        size = SIZES[kind] * int(count or (0 if "[" in text.split(name, 1)[1][:1] else 1))
        memory[name] = Memory(space, size, int(align or 1), _bytes_of(data, SIZES[kind]))
    return Program(entry[1], tuple(parameters), registers, memory, _code(body))


def _body(text: str) -> str:
    """What the first pair of braces holds: other functions may follow."""
    depth = 0
    for found in re.finditer(r"[{}]", text):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return text[text.index("{") + 1 : found.start()]
    raise Unsupported("expected a kernel that ends, found none")


def _without_blocks(body: str) -> str:
    """The same without inner blocks, whose registers get names of their own."""
    count = 0

    def opened(block: re.Match[str]) -> str:
        nonlocal count
        count += 1
        inside = block[1]
        for names in (found[1] for found in _REGISTERS.findall(inside)):
            for name in filter(re.compile(r"[%\w]+").fullmatch, map(str.strip, names.split(","))):
                inside = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w$])", f"{name}_{count}_of_block", inside)
        return f" {inside} "

    found, changed = body, 1
    while changed:
        found, changed = _BLOCK.subn(opened, found)
    return found


def _bytes_of(data: str, size: int) -> bytes:
    numbers = [int(word, 0) for word in data.replace("\n", " ").split(",") if word.strip()]
    return b"".join((number % (1 << (8 * size))).to_bytes(size, "little") for number in numbers)


def _code(body: str) -> tuple[Instruction, ...]:
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for label, statement in _statements(_MEMORY.sub("", body)):
        if label:
            labels[label] = len(found)
        else:
            found.append(_instruction(statement))
    return tuple(_resolved(item, labels) for item in found)


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """(label, "") or ("", an instruction without its semicolon), in order."""
    at = 0
    while at < len(body):
        if body[at] in "{}" or body[at].isspace():  # of a block; a vector's braces follow a word
            at += 1
            continue
        label = _LABEL.match(body, at)
        if label is not None and "::" not in body[label.start() : label.end() + 1]:
            yield label[1], ""
            at = label.end()
            continue
        end = body.find(";", at)
        if end < 0:
            return
        statement = " ".join(body[at:end].split())
        at = end + 1
        if not statement.startswith(_IGNORED):
            yield "", statement


def _instruction(text: str) -> Instruction:
    guard, is_negated, rest = "", False, text
    found = re.match(r"@(!?)(%\w+)\s+", text)
    if found:
        is_negated, guard, rest = bool(found[1]), found[2], text[found.end() :]
    name, _, operands = rest.partition(" ")
    first, *modifiers = name.split(".")
    opcode = (first, *(word for word in modifiers if not _HINTS.match(word)))
    return Instruction(opcode, tuple(map(_operand, _split(operands))), guard, is_negated, text=text)


def _split(text: str) -> list[str]:
    """At commas and bars outside of braces, brackets and parentheses."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if not depth and char in ",|":
            parts.append(text[begin:at])
            begin = at + 1
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]


def _operand(text: str) -> Operand:
    if text[0] == "{":
        return tuple(map(_operand, _split(text[1:-1])))
    if text[0] == "(":
        return tuple(text[1:-1].replace(",", " ").split())
    if text[0] == "[":
        base, sign, offset = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", text).groups()  # type: ignore[union-attr]
        return Address(base, int(offset or 0) * (-1 if sign == "-" else 1))
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0), 0)
    return text


def _resolved(item: Instruction, labels: dict[str, int]) -> Instruction:
    if item.opcode[0] != "bra":
        return item
    (label,) = item.operands
    return Instruction(item.opcode, (), item.guard, item.is_negated, labels[str(label)], item.text)
