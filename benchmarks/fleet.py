"""A fleet at scale: the daemon's own queue and exchange on a real PostgreSQL, with hosts that only pretend to tune.

    python benchmarks/fleet.py                           # 10, 100 and 1,000 hosts, 100,000 keys
    python benchmarks/fleet.py --hosts 100 --keys 20000
    python benchmarks/fleet.py --only crowds             # rows of the other part are kept
    python benchmarks/fleet.py --quick                   # a few hosts, seconds

First in the hosts' own time: one process plays all hosts, one after the other, and jumps from one event to the next;
the server's clock is theirs. So the seconds until 95 % of the demanded savings are decided do not depend on this
machine, and no statement waits for another one. A tenth of the hosts vanishes on the way. What a statement costs the
server is real. Then in real time: each host has a connection and a thread of its own, all begin at once, at the pace of
real daemons; server and hosts share this machine. Needs PostgreSQL. Writes benchmarks/results/fleet.json.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from common import arguments, chosen, commit, parse, print_end, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the tests' server is

from fleet_hosts import Demand, Host, Scene, Tally, idle_rounds, make_demand

from autofuse.db.fleet_server import FleetServer
from tests.postgres import Postgres, programs, running_postgres

WANTED = 0.95  # of the demanded savings
LOST = 0.1  # of the hosts vanish on the way
IDLE_ROUNDS = 500
LIMIT_SECONDS = 50_000.0  # of the hosts' time
PARTS = ("fleets", "crowds")
CROWDS = (20, 90, 120, 200, 400, 800)  # multiples of ten, so that all kinds of hosts are there
CROWD_SECONDS = 30.0
CROWD_KEYS = 100  # for each host
DEFAULT_CONNECTIONS = 100
# PostgreSQL's own values but for the number of connections; what is committed is on disk.
SETTINGS = """
listen_addresses = '127.0.0.1'
max_connections = {connections}
shared_preload_libraries = 'pg_stat_statements'
pg_stat_statements.max = 1000
log_min_messages = fatal
"""
# The server's clock, as `fleet_server.CLOCK` asks for it, is the hosts': schemas before pg_catalog go first.
CLOCK = (
    "CREATE SCHEMA virtual",
    "GRANT USAGE ON SCHEMA virtual TO PUBLIC",
    "CREATE FUNCTION virtual.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS "
    "$$ SELECT to_timestamp(current_setting('fleet.now')::float8) $$",
    "ALTER DATABASE {database} SET search_path = virtual, pg_catalog, public",
)
SIZES = (
    "SELECT relname, n_live_tup, n_dead_tup, pg_relation_size(relid), pg_indexes_size(relid) FROM pg_stat_user_tables "
    "WHERE n_live_tup > 100 ORDER BY pg_total_relation_size(relid) DESC"
)
STATEMENTS = (
    "SELECT query, calls, mean_exec_time, total_exec_time, rows FROM pg_stat_statements JOIN pg_database d "
    "ON d.oid = dbid WHERE d.datname = current_database() AND query NOT LIKE '%set_config%' ORDER BY 4 DESC"
)


@dataclass(frozen=True)
class Load:
    """What a server has done so far."""

    cpu_seconds: float
    wal_bytes: int
    statements: int
    rounds: int
    keys: int

    def since(self, before: Load) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}


def load(postgres: Postgres, database: str, tally: Tally) -> Load:
    ((wal,),) = postgres.sql("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
    rows = postgres.sql(STATEMENTS, database=database)
    calls = sum(int(str(row[1])) for row in rows)
    return Load(cpu_seconds(postgres), int(str(wal)), calls, tally.rounds, len(tally.decided))


def cpu_seconds(postgres: Postgres) -> float:
    """Of all processes of the server, those that have ended included."""
    main = postgres.process
    times = main.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in main.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def top_statements(postgres: Postgres, database: str) -> list[dict[str, Any]]:
    rows = postgres.sql(STATEMENTS, database=database)
    total = sum(float(str(row[3])) for row in rows) or 1.0
    return [
        {"statement": " ".join(str(query).split())[:160], "calls": calls, "mean_ms": mean, "share": spent / total}
        for query, calls, mean, spent, *_ in rows[:12]
    ]


def sizes(postgres: Postgres, database: str) -> list[dict[str, Any]]:
    """Of the larger tables: rows, bytes of a row, bytes of its entries in indices."""
    postgres.sql("ANALYZE", database=database)
    return [
        {"table": name, "rows": rows, "dead": dead, "row_bytes": round(heap / rows), "index_bytes": round(index / rows)}
        for name, rows, dead, heap, index in postgres.sql(SIZES, database=database)
    ]


# ---- in the hosts' time -------------------------------------------------------------------------------------------


class VirtualClock:
    """The time of hosts and server, which stands still while something happens."""

    def __init__(self, postgres: Postgres, database: str, server: FleetServer) -> None:
        self.now = 0.0
        self._server = server
        postgres.sql(*(statement.format(database=database) for statement in CLOCK), database=database)

    def advance(self, now: float) -> None:
        self.now = now
        with self._server.share() as connection:  # the only connection, which keeps it
            connection.exec_driver_sql(f"SELECT set_config('fleet.now', '{now:.6f}', false)")


def simulate(postgres: Postgres, hosts: int, keys: int, seed: int) -> dict[str, Any]:
    """One size of fleet, until enough is decided."""
    draw, began = random.Random(seed), time.monotonic()
    demand = make_demand(hosts, keys, draw)
    database = postgres.new_database()
    postgres.sql("CREATE EXTENSION pg_stat_statements", "SELECT pg_stat_statements_reset()", database=database)
    tally = Tally(demand)
    with contextlib.closing(FleetServer(postgres.url(database))) as server:
        clock = VirtualClock(postgres, database, server)
        scene = Scene(tally, lambda: clock.now, time.perf_counter)
        everyone = [Host(number, server, scene, random.Random(f"{seed} {number}")) for number in range(hosts)]
        before = load(postgres, database, tally)
        events, marks = _begin(everyone, clock), dict[str, Any]()
        first = load(postgres, database, tally)
        _run(events, clock, tally, marks, _lost(everyone, demand, draw))
        after = load(postgres, database, tally)
        idle_rounds(server, IDLE_ROUNDS)
        idle_seconds = cpu_seconds(postgres) - after.cpu_seconds
    return {
        "hosts": hosts,
        "keys": len(demand.savings),
        "requests": sum(map(len, demand.of_host)),
        **marks,
        "searches": sum(tally.begun.values()),
        "searched_keys": len(tally.begun),
        "duplicate_searches": tally.duplicates,
        "of_decided_keys": tally.late_searches,
        "checks": tally.checks,
        "helped": tally.helped,
        "hosts_lost": round(hosts * LOST),
        "jobs_lost": tally.lost_jobs,
        "requests_failed": _failed(postgres, database),
        "errors": dict(tally.errors),
        "first_contact": first.since(before),
        "then": after.since(first),
        "idle_round_cpu_ms": 1000 * idle_seconds / IDLE_ROUNDS,
        "round_ms": _spread([1000 * seconds for seconds in tally.round_seconds[hosts:]]),
        "statements": top_statements(postgres, database),
        "sizes": sizes(postgres, database),
        "real_seconds": time.monotonic() - began,
    }


def _begin(everyone: Sequence[Host], clock: VirtualClock) -> list[tuple[float, int, Iterator[float]]]:
    """All hosts' first exchange, in which they send all that they ask for."""
    starts = [(next(life), number, life) for number, life in enumerate(host.life() for host in everyone)]
    events = []
    for start, number, life in sorted(starts):
        clock.advance(start)
        events.append((start + next(life), number, life))
    heapq.heapify(events)
    return events


def _lost(everyone: Sequence[Host], demand: Demand, draw: random.Random) -> dict[int, tuple[float, Host]]:
    """The hosts that vanish, each at a random share of the savings."""
    numbers = draw.sample(range(len(everyone)), round(len(everyone) * LOST))
    total = sum(demand.savings.values())
    return {number: (draw.uniform(0.3, 0.9) * total, everyone[number]) for number in numbers}


def _run(
    events: list[tuple[float, int, Iterator[float]]],
    clock: VirtualClock,
    tally: Tally,
    marks: dict[str, Any],
    lost: dict[int, tuple[float, Host]],
) -> None:
    total = sum(tally.demand.savings.values())
    while events and tally.decided_us < WANTED * total and clock.now < LIMIT_SECONDS:
        now, number, life = heapq.heappop(events)
        if number in lost and tally.decided_us >= lost[number][0]:
            tally.lost_jobs += lost[number][1].is_in_job
            continue
        clock.advance(now)
        heapq.heappush(events, (now + next(life), number, life))
        for share in (0.5, 0.8, 0.9, WANTED):
            name = f"seconds_to_{share:.0%}"
            if tally.decided_us >= share * total and name not in marks:
                marks[name] = clock.now
    marks["keys_decided"] = len(tally.decided)
    marks["in_use_at_the_end"] = tally.in_use_us / total


def _failed(postgres: Postgres, database: str) -> int:
    ((count,),) = postgres.sql("SELECT count(*) FROM requests WHERE status = 'failed'", database=database)
    return int(str(count))


def _spread(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples) or [0.0]
    found = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    return {"mean": statistics.fmean(ordered), **found, "max": ordered[-1]}


# ---- in real time -------------------------------------------------------------------------------------------------


def crowd(postgres: Postgres, hosts: int, seconds: float, seed: int) -> dict[str, Any]:
    """So many hosts at once, each with a connection of its own, for some seconds."""
    draw = random.Random(seed)
    tally = Tally(make_demand(hosts, hosts * CROWD_KEYS, draw))
    database = postgres.new_database()
    postgres.sql("CREATE EXTENSION pg_stat_statements", "SELECT pg_stat_statements_reset()", database=database)
    scene = Scene(tally, time.monotonic, time.perf_counter)
    is_over, servers = threading.Event(), [FleetServer(postgres.url(database)) for _ in range(hosts)]
    everyone = [Host(number, servers[number], scene, random.Random(f"{seed} {number}")) for number in range(hosts)]

    def live(host: Host) -> None:
        for pause in host.life():
            if is_over.wait(pause):
                return

    threads = [threading.Thread(target=live, args=(host,)) for host in everyone]
    before, began, own = load(postgres, database, tally), time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    is_over.wait(seconds)
    elapsed, after, own = time.monotonic() - began, load(postgres, database, tally), time.process_time() - own
    memory = _memory(postgres)
    is_over.set()
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()
    spent = after.since(before)
    return {
        "hosts": hosts,
        "seconds": elapsed,
        "server_cores": spent["cpu_seconds"] / elapsed,
        "hosts_cores": own / elapsed,
        "rounds_a_second": spent["rounds"] / elapsed,
        "keys_a_second": spent["keys"] / elapsed,
        "statements_a_second": spent["statements"] / elapsed,
        "round_ms": _spread([1000 * s for s in tally.round_seconds]),
        "errors": dict(tally.errors),
        "server_memory_mib": memory,
        "statements": top_statements(postgres, database)[:5],
    }


def _memory(postgres: Postgres) -> float:
    """Of the server's processes, what each has for itself, and their shared part once."""
    total, shared = 0, 0
    for child in postgres.process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found = child.memory_info()
            total += found.rss - found.shared
            shared = max(shared, found.shared)
    return (total + shared) / 2**20


# ---- all of it ----------------------------------------------------------------------------------------------------


def server_of(postgres: Postgres) -> dict[str, str]:
    names = ("server_version", "shared_buffers", "synchronous_commit", "fsync", "jit")
    return {name: str(postgres.sql(f"SHOW {name}")[0][0]) for name in names}


def main() -> int:
    parser = arguments(__doc__, "fleet", quick="a few hosts and keys, seconds", only="parts")
    parser.add_argument("--hosts", default="", help="sizes of fleets, separated by commas")
    parser.add_argument("--keys", type=int, help="keys that they ask for together")
    parser.add_argument("--crowds", help="numbers of hosts in real time, separated by commas; empty: none")
    parser.add_argument("--seed", type=int, default=1)
    options = parse(parser)
    if programs() is None:
        sys.exit("expected PostgreSQL, found none; type: apt-get install postgresql")
    hosts = numbers(options.hosts) or ([10] if options.quick else [10, 100, 1000])
    keys = options.keys or (100 if options.quick else 100_000)
    crowds = numbers(options.crowds) if options.crowds is not None else ([10] if options.quick else list(CROWDS))
    seconds = 1.0 if options.quick else CROWD_SECONDS
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or the server would go on
    began, parts = time.monotonic(), chosen(options.only, PARTS)
    found = {part: [] if part in parts else earlier(options.out, part) for part in PARTS}
    hosts, crowds = (hosts if "fleets" in parts else []), (crowds if "crowds" in parts else [])

    def keep(postgres: Postgres) -> None:
        save(options.out, "fleet", commit=commit(), server=server_of(postgres), bars=bars_of(found), **found)

    groups = {DEFAULT_CONNECTIONS: [n for n in crowds if n <= 120], 1200: [n for n in crowds if n > 120]}
    for connections, sizes_of_crowds in groups.items():
        if connections != DEFAULT_CONNECTIONS and not sizes_of_crowds:
            continue
        with running_postgres(SETTINGS.format(connections=connections)) as postgres:
            for number in hosts if connections == DEFAULT_CONNECTIONS else []:
                found["fleets"].append({"commit": commit(), **simulate(postgres, number, keys, options.seed)})
                print(told(found["fleets"][-1]), flush=True)
                keep(postgres)
            for number in sizes_of_crowds:
                row = {
                    "commit": commit(),
                    "max_connections": connections,
                    **crowd(postgres, number, seconds, options.seed),
                }
                found["crowds"].append(row)
                print({name: value for name, value in row.items() if name != "statements"}, flush=True)
                keep(postgres)
    print_end(bars_of(found), [], options.out, began)
    return 0


def earlier(path: Path, part: str) -> list[Any]:
    """The rows of a part that is not run now."""
    if not path.exists():
        return []
    kept = json.loads(path.read_text())
    return [{"commit": kept["commit"], **row} for row in kept[part]]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def told(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("statements", "sizes"))


def bars_of(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds_until_95_percent_is_decided": {
            f"{row['hosts']} hosts": round(row.get("seconds_to_95%", float("inf")), 1) for row in found["fleets"]
        },
        "duplicate_searches": {
            f"{row['hosts']} hosts": row["duplicate_searches"] / max(1, row["searches"]) for row in found["fleets"]
        },
        "hosts_at_once_with_errors": [row["hosts"] for row in found["crowds"] if row["errors"]],
    }


if __name__ == "__main__":
    sys.exit(main())
