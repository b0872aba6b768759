"""Kernels in the store: a damaged, evicted or unsafe one is a miss, never a wrong binary."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import TRITON_FILES, gpu_kernel, kernel

from autofuse.db.store import Store


def kernel_bytes(store: Store) -> int:
    """Of the binaries and of Triton's files that are held."""
    with sqlite3.connect(store.path) as connection:
        tables = ("kernels", "triton_files")
        return sum(connection.execute(f"SELECT coalesce(sum(size_bytes), 0) FROM {t}").fetchone()[0] for t in tables)


def change(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement, values)
    connection.close()


@given(st.binary(min_size=1, max_size=4000))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kernel_comes_back_equal(store: Store, binary: bytes) -> None:
    record = kernel(f"source of {binary.hex()}", binary)
    store.kernels.put(record)
    assert store.kernels.get(record.key.digest) == record


def test_unknown_kernel_is_a_miss(store: Store) -> None:
    assert store.kernels.get("0" * 32) is None
    assert store.notes.events() == []


@pytest.mark.parametrize(
    "damage",
    ["UPDATE kernels SET binary = x'00' || substr(binary, 2)", "UPDATE kernels SET flags = '-O0'"],
    ids=["bit rot", "key does not fit"],
)
def test_damaged_kernel_is_a_miss_and_an_event_and_can_be_stored_again(store: Store, path: Path, damage: str) -> None:
    record = kernel()
    store.kernels.put(record)
    change(path, damage)
    assert store.kernels.get(record.key.digest) is None
    assert [row.event.kind for row in store.notes.events()] == ["damaged_kernel"]
    assert store.kernels.get(record.key.digest) is None
    assert len(store.notes.events()) == 1
    if "flags" not in damage:
        store.kernels.put(record)
        assert store.kernels.get(record.key.digest) == record


def test_damaged_kernel_in_a_readonly_store_is_a_miss(store: Store, path: Path) -> None:
    store.kernels.put(kernel())
    change(path, "UPDATE kernels SET binary = x'00'")
    with Store.open(path, readonly=True) as reader:
        assert reader.kernels.get(kernel().key.digest) is None


def test_the_least_recently_used_binaries_go_and_their_sources_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    store.kernels.limit_bytes = 250
    kernels = [kernel(f"source {i}", bytes([i]) * 100) for i in range(4)]
    for record in kernels[:2]:
        store.kernels.put(record)
        clock[0] += 1
    clock[0] += 3600
    assert store.kernels.get(kernels[0].key.digest) is not None  # used last now
    clock[0] += 1
    store.kernels.put(kernels[2])
    held = [store.kernels.get(record.key.digest) is not None for record in kernels]
    assert held == [True, False, True, False]
    assert kernel_bytes(store) == 200
    source = store.kernels.source(kernels[1].key.digest[:10])
    assert source is not None and source.source == "source 1" and source.size_bytes == 0
    store.kernels.put(kernels[1])
    assert store.kernels.get(kernels[1].key.digest) == kernels[1]


def test_a_kernel_beyond_the_bound_is_kept_alone(store: Store) -> None:
    store.kernels.limit_bytes = 10
    store.kernels.put(kernel("a"))
    store.kernels.put(kernel("b"))
    assert store.kernels.get(kernel("a").key.digest) is None
    assert store.kernels.get(kernel("b").key.digest) == kernel("b")


# ---- kernels for GPUs, and the files of Triton's cache ----------------------------------------------


def test_what_a_kernel_takes_of_a_gpu_is_kept(store: Store) -> None:
    store.kernels.put(gpu_kernel())
    store.kernels.put(kernel())
    assert store.kernels.get(gpu_kernel().key.digest) == gpu_kernel()
    source = store.kernels.source(gpu_kernel().key.digest)
    assert source is not None and source.resources == gpu_kernel().resources
    of_c = store.kernels.get(kernel().key.digest)
    assert of_c is not None and of_c.resources == {}


def test_triton_files_come_back_and_join_those_that_are_there(store: Store) -> None:
    assert store.kernels.get_triton_files("KEY") is None
    for name, data in TRITON_FILES.items():
        store.kernels.put_triton_files("KEY", {name: data})
    assert store.kernels.get_triton_files("KEY") == TRITON_FILES
    assert store.kernels.get_triton_files("OTHER") is None
    assert kernel_bytes(store) == sum(map(len, TRITON_FILES.values()))


def test_a_damaged_triton_file_is_left_out_and_an_event(store: Store, path: Path) -> None:
    store.kernels.put_triton_files("KEY", TRITON_FILES)
    change(path, "UPDATE triton_files SET data = x'00' WHERE name LIKE '%.cubin'")
    sound = {name: data for name, data in TRITON_FILES.items() if not name.endswith(".cubin")}
    assert store.kernels.get_triton_files("KEY") == sound
    assert [row.event.kind for row in store.notes.events()] == ["damaged_kernel"]
    assert store.kernels.get_triton_files("KEY") == sound
    assert len(store.notes.events()) == 1
    store.kernels.put_triton_files("KEY", TRITON_FILES)
    assert store.kernels.get_triton_files("KEY") == TRITON_FILES


def test_triton_files_and_kernels_share_the_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    store.kernels.limit_bytes = 250
    store.kernels.put_triton_files("A", {"a.cubin": bytes(60), "a.json": bytes(40)})
    clock[0] += 1
    store.kernels.put(kernel("k", bytes(100)))
    clock[0] += 3600
    assert store.kernels.get_triton_files("A") is not None  # used last now
    clock[0] += 1
    store.kernels.put_triton_files("B", {"b.cubin": bytes(100)})
    assert store.kernels.get(kernel("k", bytes(100)).key.digest) is None
    clock[0] += 1
    store.kernels.put(kernel("l", bytes(100)))
    assert store.kernels.get_triton_files("A") is None  # all of its files
    assert store.kernels.get_triton_files("B") is not None
    assert kernel_bytes(store) == 200
