"""Explains a decision to people: a node's operations, the measurements and the decision in each bucket.

In: a store and the name of a node or a module, or none for a list of both; or the report of a script that was run to
show its graphs. Out: text on a rich console. Errors: UsageError for a name nobody knows, with the nearest ones. Reads
only; imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autofuse.codegen.triton.machine_code import MachineCode
from autofuse.codegen.triton.resources import Resources, occupancy
from autofuse.db.rows import StoredMeasurement
from autofuse.db.store import Store
from autofuse.ir.buckets import exact_bucket
from autofuse.ir.reasons import decision_words, in_words
from autofuse.ir.records import EAGER, IN_ONE, Candidate, Config, Decision, DecisionKey
from autofuse.report import wording
from autofuse.report.find import BucketStory, NodeStory, RootStory, cut, find, name_of
from autofuse.report.metrics import fusion_text, graph_table
from autofuse.report.report import Report
from autofuse.report.table import plain_table, say

MAX_CANDIDATES = 15
MAX_OPERATIONS = 40
MAX_REASONS = 5


def render_explain(store: Store, console: Console, name: str | None = None) -> None:
    """Print what is known of the node or module called ``name``; without a name, the list of all."""
    if name is None:
        _render_list(store, console)
        return
    story = find(store, name)
    if isinstance(story, NodeStory):
        _render_node(story, console)
    else:
        _render_root(story, console)


# ---- the list -----------------------------------------------------------------------------------------


def _render_list(store: Store, console: Console) -> None:
    nodes, roots = store.nodes.known(), list(store.roots.known().values())
    if not nodes and not roots:
        say(console, f"The store {store.path} knows no nodes yet.")
        say(console, "Fill it: autofuse run SCRIPT.py")
        return
    if nodes:
        decisions: dict[str, list[Decision]] = {}
        for _, decision in store.results.decisions():
            decisions.setdefault(decision.key.fusion_id, []).append(decision)
        table = plain_table("Nodes", "tuned, fused: for how many ranges of sizes")
        table.add_column("node", ratio=3, overflow="fold")
        table.add_column("operations", ratio=3, overflow="fold")
        table.add_column("tuned", justify="right", no_wrap=True)
        table.add_column("fused", justify="right", no_wrap=True)
        table.add_column("best", justify="right", no_wrap=True)
        for node in nodes:
            made = decisions.get(node.fusion_id, [])
            fused = [decision for decision in made if decision.candidate.variant != EAGER]
            best = max((decision.speedup for decision in fused), default=None)
            operations = wording.shorten(node.operations, 80)
            table.add_row(cut(name_of(node)), operations, str(len(made)), str(len(fused)), wording.times(best))
        console.print(table)
        console.print()
    if roots:
        table = plain_table("Modules")
        table.add_column("module", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("why", ratio=1, overflow="fold")
        for root in roots:
            table.add_row(root.name, root.state, in_words(root.reason, wording.ROOT_REASONS))
        console.print(table)
    console.print()
    say(console, "Next: autofuse explain NODE")


# ---- a node -------------------------------------------------------------------------------------------


def _render_node(story: NodeStory, console: Console) -> None:
    node = story.node
    console.print(Text(name_of(node), "bold cyan"))
    source = next((use.source for use in story.uses if use.source), node.source)
    console.print(Text(f"{source or 'source line not known'}\nfusion_id {node.fusion_id}", "dim"))
    console.print()
    for line in operation_lines(node.form):
        console.print(Text(line), highlight=False, soft_wrap=True)
    console.print()
    if story.uses:
        calls, fused = sum(use.calls for use in story.uses), sum(use.fused_calls for use in story.uses)
        share = max(use.time_share for use in story.uses)
        console.print(
            f"{wording.plural(calls, 'call')} in all runs, {fused:,} of them fused; "
            + (f"at most {wording.percent(share)} of the step time of a run" if share else "in no timed step"),
            highlight=False,
        )
        console.print()
    if not story.buckets:
        say(console, "Not tuned yet: no run has asked for it. It runs on eager's kernels.")
        return
    decided = {bucket.key for bucket in story.buckets if bucket.decisions}
    for bucket in story.buckets:
        _render_bucket(bucket, decided, console)


def operation_lines(form: Mapping[str, Any]) -> Iterator[str]:
    """The inputs, operations and outputs of a form's JSON, one a line: ``v0 = add(i0, 0.5)  float32 [s0, 256]``."""
    for name, spec in form.get("inputs", []):
        yield f"{name}: {_spec(spec)}"
    operations = form.get("operations", [])
    several = {op.get("name") for op in operations if len(op.get("outputs", [])) > 1}  # results that are tuples
    for op in operations[:MAX_OPERATIONS]:
        target = str(op.get("target", "?"))
        short = target.split(".")[1] if target.count(".") else target
        arguments = [_argument(item, several) for item in op.get("args", [])]
        arguments += [f"{name}={_argument(item, several)}" for name, item in op.get("kwargs", {}).items()]
        outputs = ", ".join(_spec(spec) for spec in op.get("outputs", []))
        yield f"{op.get('name', '?')} = {short}({', '.join(arguments)})  {outputs}".rstrip()
    if len(operations) > MAX_OPERATIONS:
        yield f"and {len(operations) - MAX_OPERATIONS} more operations"
    returned = [_part(name, index, several) for name, index in form.get("outputs", [])]
    if returned:
        yield f"return {', '.join(returned)}"


def _spec(spec: Any) -> str:
    shape, dtype = spec[0], spec[1]
    return f"{dtype} [{', '.join(str(size) for size in shape)}]"


def _part(name: str, index: int, several: Collection[str]) -> str:
    return f"{name}[{index}]" if index or name in several else name


def _argument(item: Any, several: Collection[str]) -> str:
    if isinstance(item, list):
        return f"({', '.join(_argument(part, several) for part in item)})"
    if not isinstance(item, dict):
        return str(item)
    if "ref" in item:
        return _part(str(item["ref"]), item.get("index") or 0, several)
    if "dim" in item:
        return str(item["dim"])
    text = str(item.get("float", "?"))
    return f"{float.fromhex(text):g}" if "0x" in text else text


# ---- a bucket -----------------------------------------------------------------------------------------


def _render_bucket(bucket: BucketStory, decided: Collection[DecisionKey], console: Console) -> None:
    key = bucket.key
    text = Text("Bucket ", "bold")
    text.append(key.bucket, "bold cyan")
    text.append(f"\non {key.device}, {wording.plural(key.threads, 'thread')}, {key.versions}", "dim")
    console.print(text, highlight=False)
    for line in (*decision_lines(bucket), *lost_sizes(bucket, decided)):
        say(console, line)
    if bucket.measurements:
        console.print(_candidates(bucket), highlight=False)
    console.print()


def decision_lines(bucket: BucketStory) -> Iterator[str]:
    """The standing decision of a bucket in sentences, or the state of its request."""
    request = bucket.request
    if request is not None and request.status in ("queued", "running"):
        state = "Waits in the queue" if request.status == "queued" else "Is being tuned now"
        again = " again" if bucket.decisions else ""
        saving = wording.microseconds(request.expected_saving_us)
        yield f"{state}{again}: {wording.plural(request.calls, 'call')} seen, expected gain {saving}."
    if not bucket.decisions:
        if request is None:
            yield "Not decided: it was measured, but no decision was stored."
        elif request.status == "failed":
            yield f"Tuning failed: {request.message or 'no reason was stored'}. It runs on eager's kernels."
        if bucket.miss:
            yield f"The nearest decision of this node is for {bucket.miss}."
        return
    row = bucket.decisions[-1]
    decision = row.decision
    reason = decision_words(decision.reason)
    span = wording.interval(decision.speedup_low, decision.speedup_high)
    unfused, fused = wording.microseconds(decision.unfused_us), wording.microseconds(decision.fused_us)
    if decision.candidate.variant == EAGER:
        yield f"Decision: stays eager. {wording.sentence(reason)} Eager takes {unfused} a call."
        if decision.fused_us != decision.unfused_us:
            yield f"The best candidate took {fused}: {wording.times(decision.speedup)} ({span})."
        if decision.candidate.config == IN_ONE:
            yield "The group runs eager's operations in their order, none of them in a kernel."
    else:
        chosen = ", ".join(filter(None, candidate_text(decision.candidate)))
        yield f"Decision: fused ({chosen}). {wording.sentence(reason)}"
        yield f"{wording.times(decision.speedup)} (95 % interval {span}): {unfused} in eager, {fused} fused."
        if bucket.kernel is not None and bucket.kernel.resources:
            yield resource_line(bucket.kernel.resources)
            if "code" in bucket.kernel.resources:
                yield code_line(MachineCode.from_json(bucket.kernel.resources["code"]))
        steps = (
            strategy_steps(bucket.kernel.source)
            if is_strategy(decision.candidate) and bucket.kernel is not None
            else []
        )
        if steps:
            yield f"It runs {'; then '.join(steps)}."
    if decision.detail:
        yield decision.detail
    effort = f"{wording.plural(decision.trials, 'trial')} in {wording.seconds(decision.tuning_seconds)}"
    earlier = len(bucket.decisions) - 1
    yield f"Decided {wording.moment(row.at)} after {effort}" + (
        f"; {wording.plural(earlier, 'earlier decision')} replaced." if earlier else "."
    )


def lost_sizes(bucket: BucketStory, decided: Collection[DecisionKey]) -> Iterator[str]:
    """A sentence for each shape with a kernel of its own that lost to the bucket's: it has no decision.

    ``decided``: the keys of the node that have one.
    """
    if not bucket.decisions or not bucket.decisions[-1].decision.candidate.variant.endswith("_generic"):
        return
    tried = {
        row.measurement.symbol_values: row.measurement.candidate
        for row in bucket.measurements
        if row.measurement.status in ("ok", "pruned") and row.measurement.candidate.variant.endswith("_specialised")
    }
    for values, candidate in tried.items():
        if replace(bucket.key, bucket=exact_bucket(values).label) not in decided:
            variant, sizes = candidate_text(candidate)[0], "×".join(map(str, values))
            yield f"A kernel for {sizes} alone ({variant}) lost: it did not clearly beat eager and this one."


def resource_line(resources: Mapping[str, Any]) -> str:
    """What a kernel takes of a GPU, the most of a call's launches, and how much of the GPU it can occupy."""
    registers, threads = resources.get("registers", 0), resources.get("threads", 0)
    shared, spilled = resources.get("shared_bytes", 0), resources.get("spill_bytes", 0)
    taken = Resources(registers, spilled, shared, threads)
    held = occupancy(taken, resources.get("target", "")) if threads else None
    why = f": {held.limiter} allow no more" if held is not None and held.warps < held.most else ""
    return (
        f"The kernel takes {wording.plural(registers, 'register')} a thread, {wording.plural(threads, 'thread')} and "
        f"{wording.plural(shared, 'byte')} of shared memory a program; "
        f"{wording.plural(spilled, 'byte') + ' a thread are' if spilled else 'nothing is'} spilled."
        + ("" if held is None else f" A multiprocessor holds {held.warps} of {held.most} warps" + why + ".")
    )


def code_line(code: MachineCode) -> str:
    """What the instructions of a GPU's kernel do, all launches of a call together."""
    accesses = [
        f"{wording.plural(count, kind)} of {wording.plural(width, 'byte')}"
        for kind, widths in (("load", code.loads), ("store", code.stores))
        for width, count in sorted(widths.items(), reverse=True)
    ]
    if code.local:
        accesses.append(f"{code.local} to or from memory of a thread's own")
    others = {
        "barrier": code.barriers, "shuffle": code.shuffles, "special function": code.special,
        "matrix product": code.matrix,
    }  # fmt: skip
    rest = [wording.plural(count, kind) for kind, count in others.items() if count]
    return (
        f"Its code has {wording.plural(code.instructions, 'instruction')}, a loop's counted once: "
        f"{', '.join([*accesses, *rest]) or 'no access to memory'}."
    )


def _candidates(bucket: BucketStory) -> Table:
    rows = sorted(bucket.measurements, key=_rank)
    more = len(rows) - MAX_CANDIDATES
    caption = "error: largest error against float64, over eager's own"
    table = plain_table("", caption + (f"; and {more} more, slower or refused" if more > 0 else ""))
    table.add_column("variant", no_wrap=True)
    table.add_column("config", ratio=3, overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("status", ratio=2, overflow="fold")
    for row in rows[:MAX_CANDIDATES]:
        item = row.measurement
        speedup = Text(wording.times(item.speedup))
        span = wording.interval(item.speedup_low, item.speedup_high)
        if span:
            speedup.append("\n" + span.replace(" to ", "–"), "dim")
        status = Text(in_words(item.status, wording.STATUSES), "green" if item.status == "ok" else "yellow")
        if item.message:
            status.append(f"\n{wording.shorten(item.message, 160)}", "dim")
        table.add_row(
            *candidate_text(item.candidate),
            "×".join(str(value) for value in item.symbol_values) or "–", wording.microseconds(item.median_us), speedup,
            "–" if item.error_ratio is None else f"{item.error_ratio:.2f}", status,
        )  # fmt: skip
    return table


def _rank(row: StoredMeasurement) -> tuple[bool, float]:
    """The sorting key of a measurement: usable candidates first, fast ones before slow ones."""
    item = row.measurement
    return item.status != "ok", -(item.speedup or 0.0)


def is_strategy(candidate: Candidate) -> bool:
    """Whether a candidate is a strategy: its stored variant is ``way``, with the name as a knob, or ``way:name``."""
    return candidate.variant.partition(":")[0] == "way"


def candidate_text(candidate: Candidate) -> tuple[str, str]:
    """A variant and its configuration: ``("C, fixed size", "threads=2")``, ``("strategy", "sdpa: ...")``."""
    kind, _, name = candidate.variant.partition(":")
    if not is_strategy(candidate):
        return in_words(candidate.variant, wording.VARIANTS), config_text(candidate.config)
    config = dict(candidate.config)
    name = name or str(config.pop("way", ""))
    rest = config_text(tuple(config.items()))
    return in_words(kind, wording.VARIANTS), "; ".join(filter(None, (wording.strategy(name), rest)))


def strategy_steps(source: str) -> list[str]:
    """The steps of a strategy, in order: the indented lines of the comments at the head of its source."""
    head = itertools.takewhile(lambda line: line.startswith("//"), source.splitlines())
    return [line.removeprefix("//").strip() for line in head if line.startswith("//   ")]


def config_text(config: Config) -> str:
    """A configuration as text, such as ``threads=2 unroll=4``."""
    return " ".join(f"{name}={value}" for name, value in config)


# ---- a script ---------------------------------------------------------------------------------------


def render_graphs(report: Report, console: Console, command: str, exit_code: int) -> None:
    """Print the graphs of a script before and after fusion, or the reason why there are none."""
    if exit_code:
        say(console, f"{command} ended with exit code {exit_code}; what it did until then:", "yellow")
    if not report.graphs:
        say(console, f"Nothing was captured of {command}: {_why_nothing(report)}")
        return
    console.print(graph_table(report.graphs))
    if planned := fusion_text(report.graphs):
        say(console, planned)
    left = [root for root in report.roots if root.state != "captured"]
    for root in left:
        why = in_words(root.reason, wording.ROOT_REASONS)
        say(console, f"Not captured: {root.name}: {why}. {root.detail}".rstrip())
    refused = [line for line in report.refusals if not line.accepted][:MAX_REASONS]
    if refused:
        console.print()
        say(console, "Why there are not fewer:", "bold")
    for line in refused:
        operations = wording.shorten(line.example.operations, 60)
        say(console, f"{line.count:,} × {in_words(line.code, wording.REFUSALS)}, for example {operations}")
    console.print()
    say(console, f"Next: autofuse run --tune wait {command}")


def _why_nothing(report: Report) -> str:
    if report.run is None:
        return "no run was recorded. 'autofuse doctor' looks for the cause."
    for root in report.roots:
        return f"{root.name}: {in_words(root.reason, wording.ROOT_REASONS)}. {root.detail}".rstrip()
    for row in report.events:
        return row.event.message
    return "it called no nn.Module."


# ---- a module -----------------------------------------------------------------------------------------


def _render_root(story: RootStory, console: Console) -> None:
    root = story.root
    console.print(Text(root.name, "bold cyan"))
    console.print(Text(root.root, "dim"), soft_wrap=True)
    console.print()
    reason = in_words(root.reason, wording.ROOT_REASONS)
    say(console, f"State: {root.state}. {wording.sentence(reason)}")
    if root.detail:
        say(console, root.detail)
    seen = (
        f"{wording.plural(root.calls, 'call')} in the newest run, {wording.seconds(root.eager_seconds)} spent in eager"
    )
    say(console, f"{seen}, {wording.plural(root.operations, 'operation')} a forward.")
    if root.predicted_capture_seconds or root.capture_seconds:
        console.print(
            f"Capture: predicted {wording.seconds(root.predicted_capture_seconds)}, "
            f"took {wording.seconds(root.capture_seconds) if root.capture_seconds else 'none yet'}"
            f"{wording.causes(root.capture_causes)}.",
            highlight=False,
        )
    for argument, dim in root.dynamic_dims:
        say(console, f"Dynamic: dim {dim} of {argument}.")
    if story.histograms:
        table = plain_table("Sizes seen")
        table.add_column("argument", no_wrap=True)
        table.add_column("dim", justify="right", no_wrap=True)
        table.add_column("size (calls)", ratio=1, overflow="fold")
        for item in story.histograms:
            sizes = ", ".join(f"{size} ({calls:,})" for size, calls in item.counts[:8])
            rest = sum(calls for _, calls in item.counts[8:]) + item.tail_calls
            table.add_row(item.argument, str(item.dim), sizes + (f", others ({rest:,})" if rest else ""))
        console.print()
        console.print(table)
    if len(story.changes) > 1:
        console.print()
        console.print(Text("History", "bold"))
        for change in story.changes[-12:]:
            why = in_words(change.reason, wording.ROOT_REASONS)
            say(console, f"{wording.moment(change.at)}  run {change.run_id}: {change.state} ({why})")
