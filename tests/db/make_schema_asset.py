"""Writes the dump of a small store with today's schema to ``assets/``; run once for each new revision."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from pathlib import Path

from store_records import TRITON_FILES, decision, gpu_kernel, kernel, measurement, request, start, steps, use

from autofuse.db.connection import APPLICATION_ID, HEAD
from autofuse.db.store import Store
from autofuse.ir.records import Event, RunTotals


def main() -> None:
    target = Path(__file__).with_name("assets") / f"schema_{HEAD}.sql"
    if target.exists():
        sys.exit(f"expected no {target}: the dump of a schema that has shipped is never made anew")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(path) as store:
            run_id = store.runs.start(start())
            store.nodes.put_uses(run_id, [use()])
            store.queue.add([request(run_id=run_id)])
            store.results.put_measurements(decision().key, [measurement(unroll=4)])
            store.kernels.put(kernel())
            store.kernels.put(gpu_kernel())
            store.kernels.put_triton_files("KEY", TRITON_FILES)
            store.results.put_decision(decision())
            store.steps.add(run_id, steps(3) + steps(1, first=3, held_out=True))
            store.notes.add_event(run_id, Event("fallback", "an event"))
            store.runs.finish(run_id, RunTotals(steps=4))
        connection = sqlite3.connect(path)
        dump = "\n".join([f"PRAGMA application_id = {APPLICATION_ID};", *connection.iterdump()])
        connection.close()
    target.parent.mkdir(exist_ok=True)
    target.write_text(dump + "\n")


if __name__ == "__main__":
    main()
