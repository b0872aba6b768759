"""Fills the page of a report: everything a template shows, as text and drawings, in the order of the page.

In: a store and the id of a run. Out: the whole page as one text. Guarantee: reads only; all text from the store is
escaped by the template; the page refers to nothing outside of itself. Errors: StoreError for an id the store lacks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from autofuse.db.rows import KernelSource, StoredMeasurement
from autofuse.db.store import Store
from autofuse.ir.reasons import decision_words, in_words
from autofuse.ir.records import EAGER
from autofuse.report import wording
from autofuse.report.explain import candidate_text, decision_lines, operation_lines
from autofuse.report.find import BucketStory, NodeStory, cut, node_story
from autofuse.report.html.charts import balance_chart, node_chart, pairs_chart, shapes_chart
from autofuse.report.html.shapes import shape_columns
from autofuse.report.html.source import coloured, colours
from autofuse.report.report import NodeLine, Report, load_report
from autofuse.report.runs import run_lines
from autofuse.report.verdict import facts, verdict, whole_share

LEAST_SHARE = 0.001  # of the time, of what is told among the nodes that are not faster
MOST_STORIES = 40  # nodes that are told in full: candidates, measurements, source
MOST_CANDIDATES = 12
MOST_RUNS = 20
MOST_ROWS = 200  # rows of a table that are in the page's text; its script knows the others
MOST_NOT_FASTER = 12


@dataclass(frozen=True)
class Row:
    """A node in a bucket, as the table of nodes shows it; also the script's data."""

    anchor: str
    operations: str
    name: str
    bucket: str
    share: float
    calls: int
    eager_us: float | None
    fused_us: float | None
    speedup: float | None
    interval: str
    decision: str  # "fused", "eager", "queued", ...
    why: str
    source: str


@dataclass(frozen=True)
class NotFaster:
    """Something that runs in eager, or could not be fused, and why."""

    what: str
    where: str
    why: str
    share: float | None  # of the step time
    tried: str  # the best that was measured


@dataclass(frozen=True)
class BucketPart:
    """What was measured of a node in one bucket."""

    bucket: str
    where: str
    sentences: tuple[str, ...]
    candidates: tuple[tuple[str, ...], ...]
    kernel: KernelSource | None
    source: Markup | None  # coloured; None where there is no kernel, or an earlier part of the page has the same
    same_as: tuple[str, str] | None  # the anchor and the name of that part


@dataclass(frozen=True)
class NodePart:
    """A node told in full."""

    anchor: str
    name: str
    operations: str
    source: str
    lines: tuple[str, ...]
    buckets: tuple[BucketPart, ...]


def html_report(store: Store, run_id: int | None = None) -> str:
    """The page of a run; by default of the newest one with steps."""
    report = load_report(store, run_id)
    stories = list(_stories(store, report))
    rows = [_row(line) for line in report.nodes]
    environment = Environment(
        loader=PackageLoader("autofuse.report.html", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "us": wording.microseconds,
        "seconds": wording.seconds,
        "times": wording.times,
        "percent": wording.percent,
        "nbytes": wording.nbytes,
        "amount": wording.amount,
    }
    sources = _Sources()
    style, script = (resources.files(__package__).joinpath(name).read_text() for name in ("style.css", "script.js"))
    return environment.get_template("template.html").render(
        report=report,
        style=Markup(style + colours()),
        script=Markup(script),
        head=_head(report),
        facts=list(facts(report)) if report.run is not None else [],
        columns=shape_columns(report.steps),
        charts=_charts(report, stories),
        rows=rows[:MOST_ROWS],
        whole_share=whole_share(report),
        hidden=max(0, len(rows) - MOST_ROWS),
        data=_as_data(rows),
        not_faster=list(_not_faster(report)),
        refusals=[(line, in_words(line.code, wording.REFUSALS)) for line in report.refusals if not line.accepted],
        parts=[_node_part(story, sources) for story in stories],
        runs=run_lines(store, MOST_RUNS),
        roots=[(root, in_words(root.reason, wording.ROOT_REASONS)) for root in report.roots],
        events=_events(report),
        settings=sorted(report.run.settings.items()) if report.run is not None else [],
    )


# ---- the first screen ----------------------------------------------------------------------------------------


def _head(report: Report) -> dict[str, Any]:
    """The verdict: a large number where there is one, and the sentence."""
    if report.run is None:
        return {"number": "", "kind": "none", "sentence": f"The store {report.store} holds no runs yet."}
    gain, median = verdict(report), report.totals.speedup.median
    number = wording.times(median) if report.totals.fused_calls and median is not None else ""
    return {"number": number, "kind": gain.kind, "sentence": gain.sentence.removeprefix(f"{number} ")}


def _charts(report: Report, stories: Sequence[NodeStory]) -> dict[str, Markup | None]:
    charts: dict[str, Markup | None] = dict.fromkeys(("pairs", "shapes", "balance", "node"))
    ratios = [ratio for row in report.steps if row.hot for ratio in row.ratios]
    if ratios:
        charts["pairs"] = pairs_chart(ratios, report.totals.speedup)
    if columns := shape_columns(report.steps):
        charts["shapes"] = shapes_chart(columns)
    if report.balance:
        charts["balance"] = balance_chart(report.balance, report.totals.break_even_step)
    line = next((line for line in report.nodes if line.decision == "fused"), None)
    story = next((s for s in stories if line is not None and s.node.fusion_id == line.fusion_id), None)
    if line is not None and story is not None:
        is_strategy = (line.variant or "").partition(":")[0] == "way"
        place = "a strategy" if is_strategy else "one kernel"
        charts["node"] = node_chart(story.node.form, line.unfused_us, line.fused_us, place)
    return charts


def _not_faster(report: Report) -> Iterator[NotFaster]:
    """What stays in eager, by share of the time; the modules that were not captured first."""
    for root in report.roots:
        if root.state == "eager":
            why = in_words(root.reason, wording.ROOT_REASONS)
            yield NotFaster(root.name, root.detail, why, None, "")
    left = [line for line in report.nodes if line.decision != "fused"]
    shown = [line for line in left[:MOST_NOT_FASTER] if line.time_share >= LEAST_SHARE] or left[:1]
    for line in shown:
        tried = f"best {wording.times(line.speedup)}" if line.speedup is not None and line.speedup != 1.0 else ""
        why = line.detail or decision_words(line.reason)
        yield NotFaster(wording.shorten(line.operations, 80), line.bucket, why, line.time_share, tried)
    if len(left) > len(shown):
        yield NotFaster(f"{len(left) - len(shown):,} more", "", "in the list of all nodes below", None, "")


# ---- tables ------------------------------------------------------------------------------------------------------


def _row(line: NodeLine) -> Row:
    return Row(
        anchor=_anchor(line.fusion_id),
        operations=wording.shorten(line.operations.replace("native_", ""), 120) or "?",
        name=cut(line.node),
        bucket=line.bucket,
        share=line.time_share,
        calls=line.calls,
        eager_us=line.unfused_us,
        fused_us=line.fused_us,
        speedup=line.speedup if line.variant is not None else None,
        interval=wording.interval(line.speedup_low, line.speedup_high) if line.variant not in (None, EAGER) else "",
        decision=line.decision if line.decision != "none" else "open",
        why=in_words(line.variant or "", wording.VARIANTS) if line.decision == "fused" else decision_words(line.reason),
        source=line.source,
    )


def _as_data(rows: Sequence[Row]) -> Markup:
    """The rows for the page's script, as JSON that no markup in a name can end."""
    told = [
        [row.anchor, row.operations, row.name, row.bucket, round(row.share, 5), row.calls, row.eager_us, row.fused_us,
         row.speedup, row.interval, row.decision, row.why, row.source]
        for row in rows
    ]  # fmt: skip
    finite = [[None if isinstance(x, float) and not math.isfinite(x) else x for x in row] for row in told]
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _anchor(fusion_id: str) -> str:
    return f"node-{fusion_id[:12]}"


def _events(report: Report) -> list[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = {}
    for row in report.events:
        key = (in_words(row.event.kind, wording.NOTICES), row.event.message)
        counts[key] = counts.get(key, 0) + 1
    return [(kind, message, count) for (kind, message), count in counts.items()]


# ---- nodes in full -----------------------------------------------------------------------------------------------


def _stories(store: Store, report: Report) -> Iterator[NodeStory]:
    """Of the nodes with the largest share of the time, each once."""
    wanted = list(dict.fromkeys(line.fusion_id for line in report.nodes))[:MOST_STORIES]
    known = {node.fusion_id: node for node in store.nodes.known()}
    return (node_story(store, known[fusion_id]) for fusion_id in wanted if fusion_id in known)


class _Sources:
    """The sources of kernels that stand on the page, each once."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}  # of each text, the anchor and the name of its first place

    def place(self, bucket: BucketStory, anchor: str) -> tuple[Markup | None, tuple[str, str] | None]:
        """The coloured source of a bucket's kernel, or where it stands already."""
        if bucket.kernel is None:
            return None, None
        earlier = self._first.setdefault(bucket.kernel.source, (anchor, f"{bucket.kernel.name}, {bucket.key.bucket}"))
        is_first = earlier == (anchor, f"{bucket.kernel.name}, {bucket.key.bucket}")
        return (coloured(bucket.kernel.source), None) if is_first else (None, earlier)


def _node_part(story: NodeStory, sources: _Sources) -> NodePart:
    node = story.node
    anchor = _anchor(node.fusion_id)
    placed = [sources.place(bucket, anchor) for bucket in story.buckets]
    return NodePart(
        anchor=anchor,
        name=node.label or node.fusion_id[:12],
        operations=node.operations,
        source=next((use.source for use in story.uses if use.source), node.source),
        lines=tuple(operation_lines(node.form)),
        buckets=tuple(
            BucketPart(
                bucket=bucket.key.bucket,
                where=f"{bucket.key.device}, {wording.plural(bucket.key.threads, 'thread')}, {bucket.key.versions}",
                sentences=tuple(decision_lines(bucket)),
                candidates=tuple(_candidates(bucket.measurements)),
                kernel=bucket.kernel,
                source=source,
                same_as=same_as,
            )
            for bucket, (source, same_as) in zip(story.buckets, placed, strict=True)
        ),
    )


def _candidates(rows: Sequence[StoredMeasurement]) -> Iterator[tuple[str, ...]]:
    """The fastest first, then what failed."""
    ranked = sorted(rows, key=lambda row: (row.measurement.status != "ok", row.measurement.median_us or 0.0))
    for row in ranked[:MOST_CANDIDATES]:
        found = row.measurement
        name, config = candidate_text(found.candidate)
        status = in_words(found.status, wording.STATUSES)
        error = "–" if found.error_ratio is None else f"{found.error_ratio:.2f}"
        yield (
            name, config, status if not found.message else f"{status}: {wording.shorten(found.message, 160)}",
            wording.microseconds(found.median_us), wording.microseconds(found.eager_us), wording.times(found.speedup),
            wording.interval(found.speedup_low, found.speedup_high), error,
        )  # fmt: skip
