"""One plan's launches of a node, computed once for all calls.

In: a loaded artifact and the values of the node's symbols. Out: `LaunchRecord`, an array of int64 that the C launcher
reads as it is, and the scratch memory that a call needs.
Layout: the head, then for each launch its own head and a (kind, value) pair for each argument, see the constants.
A record has two functions for each launch: for pointers that are all multiples of 16 bytes, and for any.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.codegen.philox import RandomState
from autofuse.codegen.triton.source import Argument, Assumptions, TritonSource, resolve
from autofuse.errors import ShapeError
from autofuse.gpu.modules import Function, LoadedArtifact

HEAD = (
    "launch",  # address of the driver's launch function
    "bind",  # address of the function that makes a context current, or 0
    "context",
    "no_context",  # error code of a launch on a thread without a context
    "name_by_pointer",  # address of name(code, const char**), or 0
    "name_returned",  # address of const char* name(code), or 0
    "pointers",
    "launches",
)
LAUNCH = (
    "grid", "arguments",
    "function", "threads", "shared",  # for aligned pointers, function 0 where there is none
    "any_function", "any_threads", "any_shared",
)  # fmt: skip
POINTER, LITERAL = 0, 1  # kinds of an argument: index of a pointer, the number itself
MOST_POINTERS, MOST_ARGUMENTS = 256, 512  # of a launch; the C launcher's arrays


@dataclass(frozen=True)
class Step:
    """One launch: both of its functions and its arguments."""

    grid: int
    aligned: Function | None
    unaligned: Function | None
    arguments: tuple[tuple[int, int], ...]  # (POINTER, index) or (LITERAL, number)


@dataclass(frozen=True, eq=False)
class LaunchRecord:
    """All launches of one call of a node."""

    loaded: LoadedArtifact
    steps: tuple[Step, ...]
    pointers: int  # inputs, outputs and scratch
    scratch: tuple[tuple[str, int], ...]  # (dtype, elements)
    words: array[int]
    draws: tuple[
        tuple[int, int], ...
    ] = ()  # (word, field of RANDOM): what each call of a node with random numbers sets

    @property
    def address(self) -> int:
        """Of the words; valid as long as the record is alive."""
        return self.words.buffer_info()[0]


def make_record(loaded: LoadedArtifact, values: Mapping[str, int], tensors: int) -> LaunchRecord:
    """The launches for these sizes, for a node with this many inputs and outputs.

    Raises ShapeError where the kernels are not made for these sizes.
    """
    artifact = loaded.artifact
    source = artifact.source
    call = resolve(source, values, _ANY_STATE)
    aligned, unaligned = artifact.best(True, values), artifact.best(False, values)
    if aligned is None:
        raise ShapeError(f"expected an image of {source.name} for the sizes {dict(values)}, found none")
    pointers = tensors + len(call.scratch)
    steps = []
    for launch in call.launches:
        arguments = _arguments(source.passes[launch.number].arguments, launch.scalars, tensors)
        functions = [_function(loaded, launch.number, assumed) for assumed in (aligned, unaligned)]
        steps.append(Step(launch.grid, functions[0], functions[1], arguments))
    if pointers > MOST_POINTERS or any(len(step.arguments) + 2 > MOST_ARGUMENTS for step in steps):
        raise ShapeError(f"expected at most {MOST_POINTERS} tensors for {source.name}, found {pointers}")
    words, draws = _words(loaded, steps, pointers), _draws(source)
    return LaunchRecord(loaded, tuple(steps), pointers, call.scratch, words, draws)


_ANY_STATE = RandomState(0, 0, 1, 1, 1)  # holds the places of what `philox.drawing_launch` writes


def _draws(source: TritonSource) -> tuple[tuple[int, int], ...]:
    """Where in the words the state of the generator belongs."""
    found, at = [], len(HEAD)
    for item in source.passes:
        at += len(LAUNCH)
        for argument in item.arguments:
            if argument.kind == "random":
                found.append((at + 1, argument.index))
            at += 2
    return tuple(found)


def _function(loaded: LoadedArtifact, number: int, assumed: Assumptions | None) -> Function | None:
    return None if assumed is None else loaded.functions.get((number, assumed))


def _arguments(items: tuple[Argument, ...], scalars: tuple[int, ...], tensors: int) -> tuple[tuple[int, int], ...]:
    left = iter(scalars)
    first = {"param": 0, "scratch": tensors}  # index of the first such pointer
    found = []
    for item in items:
        if item.kind in first:
            found.append((POINTER, first[item.kind] + item.index))
            continue
        number = next(left)
        if item.type == "i32" and not -(2**31) <= number < 2**31:
            raise ShapeError(f"expected {item.name} to fit 32 bits, found {number}")
        found.append((LITERAL, number))
    return tuple(found)


def _words(loaded: LoadedArtifact, steps: list[Step], pointers: int) -> array[int]:
    driver, vendor = loaded.driver, loaded.driver.vendor
    name = driver.address(vendor.error_name)
    words = [
        driver.address(vendor.launch),
        driver.address(vendor.bind_context),
        loaded.context,
        vendor.no_context,
        0 if vendor.is_name_returned else name,
        name if vendor.is_name_returned else 0,
        pointers,
        len(steps),
    ]
    for step in steps:
        words += [step.grid, len(step.arguments)]
        for function in (step.aligned, step.unaligned):
            words += [function.handle, function.threads, function.shared_bytes] if function else [0, 0, 0]
        words += [word for argument in step.arguments for word in argument]
    # addresses above 2^63 as the negative numbers of the same bits
    return array("q", [w - 2**64 if w >= 2**63 else w for w in words])
