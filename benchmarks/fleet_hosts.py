"""Hosts of a fleet that only pretend to tune: what they ask for, how long a job takes, what they tell the server.

In: a number of hosts and keys. Out: `Host.life`, which says how long a host goes on without the server.
Guarantee: what is said to the server, and when, is the daemon's own code (`daemon.fleet`, `db.fleet_exchange`,
`db.fleet_queue`). Only a host's store is played, in memory, and a job is a wait.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from autofuse.daemon.fleet import LONGEST_PAUSE_SECONDS, Fleet
from autofuse.db.fleet_exchange import NEXT, FleetExchange
from autofuse.db.fleet_queue import LEASE_SECONDS
from autofuse.db.fleet_server import FleetServer
from autofuse.db.proposals import Proposal
from autofuse.db.rows import StoredMeasurement
from autofuse.db.store import Store
from autofuse.errors import FleetError
from autofuse.ir.records import (
    Bucket,
    Candidate,
    Decision,
    DecisionKey,
    DeviceInfo,
    Measurement,
    ObservedShape,
    TuneRequest,
    make_config,
)  # fmt: skip
from autofuse.settings.groups import FleetSettings
from tests.tuner.nodes import chain_form

POLL_SECONDS = FleetSettings().poll_seconds
# As decision 110 has them: 19 decisions took 73.5 s, 13.8 s of them imports; a proposal half of what its search took.
SEARCH_SECONDS, CHECK_SECONDS, SPREAD = 3.0, 0.5, 0.5  # medians of a lognormal, and its sigma
MEASURED = 4  # candidates of a search
SKEW = 1.3  # of Zipf's law: the saving of the key at rank r falls as r ** -SKEW
SHARED = 0.7  # and the share of hosts that ask for it as r ** -SHARED; at least one does
UNFUSED_US, SPEEDUP = 100.0, 2.0
SMALLEST_CALLS = 10.0
VERSIONS = ("torch 2.13 codegen 1", "torch 2.13 codegen 1 strict")
DEVICES = tuple(DeviceInfo("cpu", name, 8, "avx512-1f9a0c") for name in ("EPYC", "Xeon"))
KINDS = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1)  # of ten hosts in a row
SPARE = (0, 6)  # of those ten, the ones that ask for nothing and help: one of each kind
FORM = chain_form(8).to_json()
BUCKETS = ((1, 64), (65, 128), (129, 256), (257, 512))  # of a node, each a key


def kind_of(host: int) -> int:
    return KINDS[host % len(KINDS)]


# ---- what is asked for --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """What hosts ask for."""

    of_host: list[list[TuneRequest]]  # largest saving first
    savings: dict[str, float]  # us, of all hosts together, by the key's digest


def make_demand(hosts: int, keys: int, draw: random.Random) -> Demand:
    """Each key is of one kind of processor and asked for by at least one host of that kind."""
    of_host: list[list[TuneRequest]] = [[] for _ in range(hosts)]
    savings: dict[str, float] = {}
    for kind, device in enumerate(DEVICES):
        askers = [h for h in range(hosts) if kind_of(h) == kind and h % len(KINDS) not in SPARE]
        count = keys * KINDS.count(kind) // len(KINDS)
        for rank in range(1, count + 1):
            key, bucket = _key(kind, device, rank)
            calls = SMALLEST_CALLS * (count / rank) ** SKEW
            chosen = draw.sample(askers, max(1, round(len(askers) * rank**-SHARED)))
            weights = [draw.lognormvariate(0.0, 1.0) for _ in chosen]
            for host, weight in zip(chosen, weights, strict=True):
                own = max(1, round(calls * weight / sum(weights)))
                shapes = (ObservedShape((bucket.ranges[0][1],), own),)
                request = TuneRequest(key, FORM, bucket, shapes, own, UNFUSED_US, SPEEDUP)
                of_host[host].append(request)
                savings[key.digest] = savings.get(key.digest, 0.0) + request.expected_saving_us
    for requests in of_host:
        requests.sort(key=lambda request: -request.expected_saving_us)
    return Demand(of_host, savings)


def _key(kind: int, device: DeviceInfo, rank: int) -> tuple[DecisionKey, Bucket]:
    node, number = divmod(rank, len(BUCKETS))
    bucket = Bucket((BUCKETS[number],))
    fusion_id = hashlib.sha256(f"{kind} {node}".encode()).hexdigest()
    return DecisionKey(fusion_id, bucket.label, device.key, device.cores, VERSIONS[0]), bucket


# ---- a host's store, in memory ------------------------------------------------------------------------------------


class Requests:
    """As `TuneQueue` of a store, for the exchange."""

    def __init__(self, requests: Sequence[TuneRequest], device: str) -> None:
        self.own = deque(requests)  # that wait, largest saving first
        self._unsent = deque((request.key.digest, request) for request in requests)
        self._device = device

    def open_requests(self, known: Mapping[str, float], most: int) -> list[tuple[float, TuneRequest]]:
        while self._unsent and self._unsent[0][0] in known:
            self._unsent.popleft()
        return [(0.0, self._unsent[number][1]) for number in range(min(most, len(self._unsent)))]

    def largest(self, most: int) -> list[str]:
        return [request.key.digest for request in islice(self.own, most)]

    def devices(self) -> list[str]:
        return [self._device]


class Marks:
    """As `FleetMarks`."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(16)
        self._values: dict[str, int] = {}

    def own_name(self) -> str:
        return self._name

    def get(self, server: str, name: str) -> int:
        return self._values.get(name, 0)

    def put(self, server: str, name: str, value: int) -> None:
        self._values[name] = value


class Results:
    """As `TuneResults`: rows by growing id, which begins at 1."""

    def __init__(self) -> None:
        self._measurements: list[StoredMeasurement] = []
        self._decisions: list[Decision] = []
        self.decided: set[str] = set()

    def put(self, decision: Decision, measurements: Iterable[Measurement]) -> None:
        self._measurements += [StoredMeasurement(decision.key, item, 0.0) for item in measurements]
        self._decisions.append(decision)
        self.decided.add(decision.key.digest)

    def measurements_since(self, since_id: int, most: int) -> list[tuple[int, StoredMeasurement]]:
        return list(enumerate(self._measurements[since_id : since_id + most], since_id + 1))

    def decisions(self, since_id: int, most: int) -> list[tuple[int, Decision]]:
        return list(enumerate(self._decisions[since_id : since_id + most], since_id + 1))


class OpenProposals:
    """As `Proposals`."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.status: dict[str, str] = {}

    def put(self, proposals: Mapping[DecisionKey, Proposal]) -> int:
        new = {key.digest for key in proposals} - self._results.decided - self.status.keys()
        self.status |= dict.fromkeys(new, "open")
        return len(new)

    def verdicts(self, keys: Iterable[DecisionKey]) -> dict[str, str]:
        return {key.digest: self.status[key.digest] for key in keys if key.digest in self.status}


class MemoryStore:
    """The parts of a store that an exchange speaks to."""

    def __init__(self, requests: Sequence[TuneRequest], device: str) -> None:
        self.queue, self.marks, self.results = Requests(requests, device), Marks(), Results()
        self.proposals = OpenProposals(self.results)


# ---- hosts --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What all hosts did."""

    demand: Demand
    decided_us: float = 0.0  # of the demanded savings, those of keys with a decision on the server
    in_use_us: float = 0.0  # those of hosts that have the decision themselves
    begun: Counter[str] = field(default_factory=Counter)  # searches by key
    decided: set[str] = field(default_factory=set)
    late_searches: int = 0  # of keys that were decided when they began
    checks: int = 0
    helped: int = 0
    rounds: int = 0
    lost_jobs: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    round_seconds: list[float] = field(default_factory=list)  # of real time

    @property
    def duplicates(self) -> int:
        return sum(self.begun.values()) - len(self.begun)


@dataclass(frozen=True)
class Scene:
    """What all hosts of a run share. Seconds are those that the hosts live in, whatever they take here."""

    tally: Tally
    clock: Callable[[], float]
    real_clock: Callable[[], float]
    lease_seconds: float = LEASE_SECONDS  # of the server's clock


class Host:
    """One host: the daemon's own exchange, a store in memory, jobs that only take time."""

    def __init__(self, number: int, server: FleetServer, scene: Scene, draw: random.Random) -> None:
        own = scene.tally.demand.of_host[number]
        device = DEVICES[kind_of(number)]
        self.is_in_job = False
        self._scene, self._tally, self._server, self._draw = scene, scene.tally, server, draw
        self._store = MemoryStore(own, device.key)
        self._device = device
        self._fleet = Fleet(FleetSettings(), Path(), device, VERSIONS, scene.lease_seconds)
        self._exchange: FleetExchange | None = None
        self._failures, self._silent_until = 0, 0.0
        self._unsaid: list[TuneRequest] = []  # decided here, and not yet on the server

    def life(self) -> Iterator[float]:
        """Yields the seconds until the host goes on; for ever."""
        yield self._draw.uniform(0.0, POLL_SECONDS)
        self._round()
        while True:
            request = self._next_own()
            is_own = request is not None
            if request is None:
                request = self._borrow()
            if request is None:
                yield POLL_SECONDS
                self._round()
                continue
            if is_own:
                self._fleet.begin_own(request.key)
                self._round()
            self.is_in_job = True
            yield from self._job(request)
            self.is_in_job = False
            if is_own:
                self._fleet.end_own()
            else:
                self._fleet.give_back(request.key, "done")
                self._tally.helped += 1
            if not self._store.queue.own:  # else the round that begins the next job sends these results too
                self._round()

    def _next_own(self) -> TuneRequest | None:
        """As the daemon's loop: what other hosts work on goes last."""
        own = self._store.queue.own
        while own and own[0].key.digest in self._store.results.decided:
            own.popleft()
        free = (request for request in islice(own, NEXT) if not self._fleet.is_elsewhere(request.key))
        best = next(free, own[0] if own else None)
        if best is not None:
            own.remove(best)
        return best

    def _borrow(self) -> TuneRequest | None:
        found = self._fleet.borrow()
        if found is None:
            self._round()
            found = self._fleet.borrow()
        return found

    def _job(self, request: TuneRequest) -> Iterator[float]:
        digest, tally = request.key.digest, self._tally
        is_check = self._store.proposals.status.get(digest) == "open"
        if is_check:
            tally.checks += 1
        else:
            tally.begun[digest] += 1
            tally.late_searches += digest in tally.decided
        left = self._draw.lognormvariate(0.0, SPREAD) * (CHECK_SECONDS if is_check else SEARCH_SECONDS)
        while left > POLL_SECONDS:
            yield POLL_SECONDS
            left -= POLL_SECONDS
            self._round()
        yield left
        if is_check:
            self._store.proposals.status[digest] = "adopted"
        self._store.results.put(_decision(request), _measurements(1 if is_check else MEASURED))
        tally.in_use_us += request.expected_saving_us if request.run_id is None else 0.0
        self._unsaid.append(request)

    def _round(self) -> None:
        """As the daemon's thread: one exchange; after a failure longer and longer pauses."""
        if self._scene.clock() < self._silent_until:
            return
        began = self._scene.real_clock()
        try:
            if self._exchange is None:
                store = cast(Store, self._store)
                self._exchange = FleetExchange(store, self._server, self._device, VERSIONS, self._scene.lease_seconds)
            self._fleet.exchange_once(self._exchange)
        except FleetError as error:
            self._exchange = None
            self._failures += 1
            self._tally.errors[_short(error)] += 1
            pause = min(POLL_SECONDS * 2.0**self._failures, LONGEST_PAUSE_SECONDS)
            self._silent_until = self._scene.clock() + pause
            return
        finally:
            self._tally.rounds += 1
            self._tally.round_seconds.append(self._scene.real_clock() - began)
        self._failures = 0
        for digest in {request.key.digest for request in self._unsaid} - self._tally.decided:
            self._tally.decided.add(digest)
            self._tally.decided_us += self._tally.demand.savings[digest]
        self._unsaid.clear()


def idle_rounds(server: FleetServer, count: int) -> None:
    """The exchanges of a worker for whose kind of processor nobody asks."""
    device = DeviceInfo("cpu", "None", 8, "avx512-1f9a0c")
    store = cast(Store, MemoryStore([], device.key))
    fleet, exchange = Fleet(FleetSettings(), Path(), device, VERSIONS), FleetExchange(store, server, device, VERSIONS)
    assert fleet.borrow() is None
    for _ in range(count):
        fleet.exchange_once(exchange)


def _short(error: FleetError) -> str:
    """What kind of failure it is."""
    text = str(error)
    kinds = {"too many clients": "no connection left", "remaining connection slots": "no connection left"}
    kinds |= {kind: kind for kind in ("statement timeout", "timeout", "starting up")}
    return next((name for kind, name in kinds.items() if kind in text), text[:200])


def _decision(request: TuneRequest) -> Decision:
    config = make_config({"unroll": 4, "vector_width": 16, "chunk": 4096})
    values: dict[str, Any] = {"compile_key": None, "unfused_us": UNFUSED_US, "fused_us": 50.0, "speedup": SPEEDUP}
    bounds = {"speedup_low": 1.9, "speedup_high": 2.1, "reason": "won", "trials": MEASURED, "tuning_seconds": 3.0}
    return Decision(request.key, request.bucket, Candidate("c_generic", config), **values, **bounds)


def _measurements(count: int) -> list[Measurement]:
    made = [Candidate("c_generic", make_config({"unroll": n, "vector_width": 16, "chunk": 4096})) for n in range(count)]
    return [Measurement(c, "ok", (512,), 50.0, 100.0, 2.0, 1.9, 2.1, 0.9, None, 0.2, 0.4) for c in made]
