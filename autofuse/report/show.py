"""The source of a node's kernel, below the lines of the script that its operations come from.

In: what the store holds of a node. Out: text, coloured on a terminal. Errors: UsageError for a node that runs on
eager's kernels, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from autofuse.db.rows import KernelSource
from autofuse.errors import UsageError
from autofuse.report.explain import candidate_text, decision_lines
from autofuse.report.find import BucketStory, NodeStory, name_of


@dataclass(frozen=True)
class Shown:
    """A kernel and the bucket whose decision it is."""

    bucket: BucketStory
    kernel: KernelSource


def kernel_of(story: NodeStory, label: str | None = None) -> Shown:
    """The kernel of the bucket ``label``; by default of the one with the most calls among those that have a kernel."""
    found = [Shown(bucket, bucket.kernel) for bucket in story.buckets if bucket.kernel is not None]
    if label is not None:
        found = [item for item in found if item.bucket.key.bucket == label]
    if not found:
        raise UsageError(_no_kernel(story, label))
    calls: dict[str, int] = {}
    for use in story.uses:
        calls[use.bucket.label] = calls.get(use.bucket.label, 0) + use.calls
    return max(found, key=lambda item: calls.get(item.bucket.key.bucket, 0))


def _no_kernel(story: NodeStory, label: str | None) -> str:
    name = name_of(story.node)
    if label is not None:
        known = ", ".join(repr(bucket.key.bucket) for bucket in story.buckets) or "none"
        return f"expected a bucket of {name} with a kernel, found {label!r}; its buckets: {known}"
    for bucket in story.buckets:
        for sentence in decision_lines(bucket):
            return f"expected a node with a kernel, found {name}, which has none. {sentence}"
    return f"expected a node with a kernel, found {name}, which was not tuned; type: autofuse explain {name}"


def render_kernel(story: NodeStory, shown: Shown, console: Console) -> None:
    """Print it; nothing but the text where the output is no terminal."""
    head = list(head_lines(story, shown))
    if not console.is_terminal:
        mark = "#" if is_triton(shown.kernel) else "//"
        console.file.write("\n".join((*(f"{mark} {line}" for line in head), shown.kernel.source, "")))
        return
    for line in head:
        console.print(Text(line, "dim"), highlight=False, soft_wrap=True)
    language = "python" if is_triton(shown.kernel) else "c"
    console.print(Syntax(shown.kernel.source, language, theme="ansi_dark", background_color="default"))


def head_lines(story: NodeStory, shown: Shown) -> Iterator[str]:
    """What the kernel is, what was built in, and where its operations stand in the script."""
    key = shown.kernel.key
    decisions = shown.bucket.decisions
    yield f"{name_of(story.node)}, bucket {shown.bucket.key.bucket}"
    if decisions:
        name, config = candidate_text(decisions[-1].decision.candidate)
        speedup = decisions[-1].decision.speedup
        yield f"{name}{f', {config}' if config else ''}: {speedup:.2f}x of eager's speed when tuned"
    made = (key.compiler, key.target, key.flags)
    yield "; ".join(part for part in (made if not shown.kernel.is_strategy else (key.target,)) if part)
    for op in story.node.form.get("operations", []):
        if op.get("source"):
            yield f"{op.get('name')} = {op.get('target')}  # {op['source']}"


def is_triton(kernel: KernelSource) -> bool:
    return "import triton" in kernel.source[:4000]
