"""Decisions and loaded kernels in memory: the script's side of the store, for the devices in use.

In: decisions and kernels, which the background thread reads. Out: the choice for a node in one shape, at one place.
Guarantee: a look-up never blocks and never touches a file. Among several decisions for a device model, the narrowest
bucket wins, then the latest. Kernels are loaded once per device, and never during CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autofuse.codegen.c.build import Toolchain
from autofuse.debug import Level, tell
from autofuse.errors import CompilerError, StoreError
from autofuse.gpu import capturing, launcher
from autofuse.ir.records import EAGER, IN_ONE, Decision, DeviceInfo, KernelRecord
from autofuse.locks import make_lock
from autofuse.private_files import PrivateFolder
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.runtime.kernels.device_backends import Backends, Place
from autofuse.runtime.kernels.snapshot import Snapshot
from autofuse.settings.groups import RunSettings
from autofuse.wrapper.node_call import Entry

if TYPE_CHECKING:
    from autofuse.db.store import Store


class DecisionTable:
    """Decisions by node, bucket and place."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[tuple[str, str, int], Decision]] = {}

    def __len__(self) -> int:
        return sum(len(decisions) for decisions in self._by_node.values())

    def update(self, decisions: Iterable[Decision]) -> int:
        """Add decisions; later ones replace earlier ones of the same bucket. Returns how many."""
        count = 0
        for decision in decisions:
            key = decision.key
            buckets = dict(self._by_node.get(key.fusion_id, {}))
            buckets[decision.bucket.label, key.device, key.threads] = decision
            # Exact buckets first: they know the shape at hand.
            ordered = sorted(buckets.items(), key=lambda item: not item[1].bucket.is_exact)
            self._by_node[key.fusion_id] = dict(ordered)
            count += 1
        return count

    def find(self, fusion_id: str, values: Sequence[int], place: Place) -> Decision | None:
        for (_, device, threads), decision in self._by_node.get(fusion_id, {}).items():
            if (device, threads) == (place.key, place.threads) and decision.bucket.contains(values):
                return decision
        return None

    def kernels(self) -> list[str]:
        """Compile keys of all winners."""
        keys = (d.compile_key for buckets in self._by_node.values() for d in buckets.values())
        return list(dict.fromkeys(key for key in keys if key))


class KernelShelf:
    """Kernels by compile key, loaded for each device that requests them."""

    def __init__(self, load: Callable[[KernelRecord, torch.device], Entry]) -> None:
        self._load = load
        self._entries: dict[tuple[str, torch.device], Entry | None] = {}  # None: it could not be loaded
        self._records: dict[str, KernelRecord | None] = {}  # None: the store has nothing
        self._lock = make_lock()

    def add(self, digest: str, record: KernelRecord | None) -> None:
        """Keep the store's kernel for ``digest``; None where it had none."""
        self._records[digest] = record

    def was_read(self, digest: str) -> bool:
        return digest in self._records

    def has(self, digest: str) -> bool:
        return self._records.get(digest) is not None

    def entry(self, digest: str, device: torch.device) -> Entry | None:
        """The kernel, ready to launch; None where it has not been read (yet). Loading takes 0.2 ms, once."""
        key = (digest, device)
        if key in self._entries:
            return self._entries[key]
        record = self._records.get(digest)
        if record is None or (device.type != "cpu" and capturing.is_capturing()):
            return None
        with self._lock:
            if key not in self._entries:
                tell(Level.SOURCE, lambda: f"kernel {record.name} ({digest[:12]}):\n{record.source}")
                try:
                    self._entries[key] = self._load(record, device)
                except Exception:
                    self._entries[key] = None
                    raise
            return self._entries[key]


def choose(table: DecisionTable, shelf: KernelShelf, fusion_id: str, values: Sequence[int], place: Place) -> Choice:
    """The table's decision, if its kernel has been read."""
    decision = table.find(fusion_id, values, place)
    if decision is None:
        return UNKNOWN
    if decision.candidate.variant == EAGER or decision.compile_key is None:
        return Choice(known=True, in_one=decision.candidate.config == IN_ONE)
    entry = shelf.entry(decision.compile_key, place.device)
    if entry is None:
        # Eager until the kernel has been read. A kernel that is not in the store (any more) counts as not tuned.
        return Choice(known=shelf.has(decision.compile_key))
    return Choice(known=True, entry=entry, tag=decision.compile_key)


@dataclass(frozen=True)
class Absorbed:
    """The new decisions and kernels of one read."""

    has_decisions: bool
    fusion_ids: frozenset[str] | None  # of the nodes concerned, None: any


class Catalogue:
    """The devices in use, decisions for their models, kernels."""

    def __init__(
        self,
        settings: RunSettings,
        cpu: DeviceInfo,
        versions: str,
        report: Callable[[str, str, BaseException], None],
        folder: PrivateFolder | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """``versions``: of valid decisions; ``report(kind, what, error)`` takes failures; ``folder``: for notes with
        which later runs start sooner; ``snapshot``: the only decisions that count."""
        self.backends = Backends(settings.cc or None, cpu, folder)
        self.table = DecisionTable()
        self.shelf = KernelShelf(self.backends.load)
        self._versions = versions
        self._report = report
        self._snapshot = snapshot
        self._absorbed: dict[str, int] = {}  # newest decision read, by model of device
        self._launcher_ready = False
        self._fuel = settings.fuel
        self._fuelled: dict[str, bool] = {}

    @property
    def toolchain(self) -> Toolchain | None:
        """The C compiler, None where there is none."""
        return self.backends.cpu.toolchain

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        """The choice for a node, if its kernel has been read and ``run.fuel`` is not used up."""
        place = self.backends.place(device)
        if place is None:
            return UNKNOWN
        try:
            choice = choose(self.table, self.shelf, fusion_id, values, place)
        except Exception as error:
            self._report("kernel_unusable", "a stored kernel could not be loaded; its node runs eager", error)
            return UNKNOWN
        if choice.entry is not None and self._fuel is not None:
            allowed = self._fuelled.setdefault(fusion_id, sum(self._fuelled.values()) < self._fuel)
            return choice if allowed else Choice(known=True)
        return choice

    # ---- on the background thread --------------------------------------------------------------------

    def absorb(self, store: Store) -> Absorbed | None:
        """Read new decisions and the kernels they name; None where there were none."""
        self._prepare_launcher(store)
        rows = []
        for key in self.backends.models():
            since = self._absorbed.get(key, 0)
            if self._snapshot is not None:
                found = self._snapshot.decisions(key, since)
            else:
                found = store.results.decisions(key, self._versions, since)
            if found:
                self._absorbed[key] = max(number for number, _ in found)
                rows += found
        self.table.update(d for _, d in rows)
        # A missing kernel is looked up again when a new decision names it.
        new = {d.compile_key for _, d in rows}
        wanted = [
            key
            for key in self.table.kernels()
            if not self.shelf.was_read(key) or (key in new and not self.shelf.has(key))
        ]
        refused = store.kernels.refused()
        for digest in wanted:
            self.shelf.add(digest, store.kernels.get(digest))
        if store.kernels.refused() > refused:
            count = store.kernels.refused() - refused
            problem = StoreError(f"{count} of {len(wanted)} are damaged, another user's, or of a copied store")
            self._report("kernels_refused", "stored kernels were left out and are tuned again", problem)
        if not rows and not wanted:
            return None
        late = set(wanted) - new  # kernels of decisions that were known before
        return Absorbed(bool(rows), None if late else frozenset(d.key.fusion_id for _, d in rows))

    def _prepare_launcher(self, store: Store) -> None:
        """The launcher of GPU kernels in C, from the store or compiled; without one they go through ctypes."""
        if self._launcher_ready or not self.backends.in_use("cuda") or self.toolchain is None:
            return
        self._launcher_ready = True
        try:
            record = store.kernels.get(launcher.launcher_key(self.toolchain).digest)
            if record is None:
                record = launcher.compile_launcher(self.toolchain)
                store.kernels.put(record)
            launcher.install(record.binary)
        except (CompilerError, StoreError, OSError) as error:
            self._report("slow_launcher", "GPU kernels are launched through ctypes, some us slower", error)
