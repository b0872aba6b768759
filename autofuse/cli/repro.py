"""``autofuse repro``: one runnable file of a node and its kernel; ``autofuse.wrapper.repro`` writes it."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.complete import nodes
from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import write_file
from autofuse.cli.show import bucket_option, find_node
from autofuse.errors import UsageError

EPILOG = """\
\b
Examples:
  autofuse repro af_row_softmax                 prints the file
  autofuse repro af_row_softmax --out repro.py  writes it
  python repro.py                               compiles, checks and races the kernel
"""


@click.command("repro", epilog=EPILOG)
@click.argument("node", shell_complete=nodes)
@bucket_option
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write it to FILE.")
@store_option
def command(node: str, bucket: str | None, out: Path | None, store: Path | None) -> None:
    """Write one file that runs a node's kernel beside eager.

    The file makes inputs, compiles the kernel, checks it against eager and float64, and races the two. It needs torch
    and a C compiler, and nothing of autofuse: send it with a report of a fault.
    """
    from autofuse.ir.operation import NodeForm
    from autofuse.optim.form import OPTIMIZER
    from autofuse.report.find import name_of
    from autofuse.report.show import kernel_of
    from autofuse.wrapper.repro import repro, sizes_for

    with open_store(load_settings(store=store)) as opened:
        story = find_node(opened, node)
        shown = kernel_of(story, bucket)
    instead = f"; its source: autofuse show {name_of(story.node)}"
    if OPTIMIZER in story.node.form:
        raise UsageError(f"expected a node of a graph, found an optimizer's step{instead}")
    form = NodeForm.from_json(dict(story.node.form))
    digest = shown.kernel.key.digest
    measured = [row.measurement for row in shown.bucket.measurements if row.measurement.compile_key == digest]
    ranges = shown.bucket.decisions[-1].decision.bucket.ranges
    values = sizes_for(form, ranges, measured[-1].symbol_values if measured else ())
    try:
        text = repro(form, shown.kernel, values, shown.bucket.key.threads, str(out or "repro.py"))
    except UsageError as error:
        raise UsageError(f"{error}{instead}") from None
    if out is None:
        click.echo(text, nl=False)
    else:
        write_file(out, text, "--out FILE")
        click.echo(f"written to {out}; type: python {out}")
