"""What a report says of promotions, kernels that were given up, and decisions of other versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autofuse.ir.records import EAGER
from autofuse.report.report import load_report
from autofuse.report.verdict import facts
from tests.report.report_records import GELU, HOT, LOSS, NORM, decision, fill, key, open_store, use

OTHER = "torch 2.12, codegen 1"


def test_promotions_given_up_kernels_and_expired_decisions(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.sqlite3")
    run = fill(store)
    before = load_report(store)
    assert before.decided is not None and before.decided.promoted and not before.decided.given_up
    assert before.decided.expired == 0
    detail = "12 us against eager's 10 us in 14 pairs of calls of the script; 2.16x in its race"
    lost = replace(decision(GELU, HOT, 0.8, EAGER, "slower_live"), detail=detail)
    store.results.put_decision(lost, run)
    node = ("e" * 64, "af_pointwise_mul_0b0c0d", "mul", LOSS[3])
    old = decision(node, HOT, 1.5)
    store.results.put_decision(replace(old, key=replace(key(node, HOT), versions=OTHER)))
    store.nodes.put_uses(run, [use(node, HOT, 9, 0, 0.01), use(NORM, HOT, 9, 9, 0.1)])
    report = load_report(store)
    store.close()
    assert report.decided is not None
    assert report.decided.promoted == before.decided.promoted - 1, "the newest decision of a key counts"
    (kernel,) = report.decided.given_up
    assert (kernel.node, kernel.bucket, kernel.detail) == (GELU[1], HOT.label, detail)
    assert report.decided.expired == 1 and report.decided.expired_versions == (OTHER,)
    told = dict(facts(report))
    assert told["decisions"].endswith(f"1 given up; 1 node was decided for {OTHER} only")
    assert told["given up"] == f"{GELU[1]} ({HOT.label}): {detail}"
