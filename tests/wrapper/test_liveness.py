"""Where values die."""

from __future__ import annotations

from autofuse.wrapper.liveness import deaths, deleted


def test_values_die_behind_their_last_reader_once_and_in_its_order() -> None:
    reads = [["a", "b"], ["c", "a", "c", "b"], ["d"]]
    assert deaths(reads, lambda name: name != "b") == [[], ["c", "a"], ["d"]]


def test_what_nobody_reads_dies_where_it_is_made() -> None:
    assert deaths([["a"], ["b"]], lambda name: name != "d", [["b", "c"], ["d"]]) == [["a", "c"], ["b"]]


def test_nothing_is_deleted_by_no_line() -> None:
    assert deleted([], "  ") == [] and deleted(["a", "b"], "  ") == ["  del a, b"]
