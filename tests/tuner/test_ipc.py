"""Messages over pipes: whole, in order, and nobody waits beyond a deadline for the other side."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from autofuse.tuner.ipc import Interrupted, Pipe, PipeClosed

LARGE = {"binary": "x" * 1_000_000}  # far more than a pipe holds


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    (first_reads, second_writes), (second_reads, first_writes) = os.pipe(), os.pipe()
    pair = Pipe(first_reads, first_writes), Pipe(second_reads, second_writes)
    yield pair
    for end in pair:
        end.close()


def test_large_messages_arrive_whole_and_in_order(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    sender = threading.Thread(target=lambda: [ours.send(message, 60.0) for message in (LARGE, {"next": [1, 2]})])
    sender.start()
    assert theirs.receive(60.0) == LARGE and theirs.receive(60.0) == {"next": [1, 2]}
    sender.join()


def test_a_side_that_does_not_read_is_waited_for_until_the_deadline(ends: tuple[Pipe, Pipe]) -> None:
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send(LARGE, 0.1)


def test_time_for_which_the_other_side_is_halted_does_not_count(ends: tuple[Pipe, Pipe]) -> None:
    ours, _ = ends
    halts: list[float] = []

    def tend() -> float:
        halts.append(1.0)
        return 1.0 if len(halts) < 3 else -10.0

    with pytest.raises(TimeoutError):
        ours.send(LARGE, 0.1, tend=tend)
    assert len(halts) == 3


def test_a_wait_to_send_can_be_asked_to_end(ends: tuple[Pipe, Pipe]) -> None:
    with pytest.raises(Interrupted):
        ends[0].send(LARGE, None, lambda: True)


def test_a_side_that_is_gone_is_told() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    spare, other = os.pipe()
    with pytest.raises(PipeClosed):
        Pipe(spare, writes).send({"do": "open"})
    for descriptor in (writes, spare, other):
        os.close(descriptor)
