"""``autofuse import``: takes decisions of other machines from files; ``autofuse.db.decision_file`` reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from autofuse.cli.options import load_settings, store_option

EPILOG = """\
\b
Examples:
  autofuse import tuned.jsonl
  autofuse import /opt/tuned          all files *.jsonl of a folder, as in a container image
"""


@click.command("import", epilog=EPILOG)
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True), metavar="FILE...")
@store_option
def command(sources: Sequence[Path], store: Path | None) -> None:
    """Take decisions of other machines, to be checked here before use.

    FILE is what 'autofuse export' has written, or a folder with such files. When a script here runs such a node, the
    daemon builds that winner alone, checks it and races it against eager, without a search. What is for another device
    or other versions is kept and waits for them.
    """
    from autofuse.codegen.version import versions
    from autofuse.db.decision_file import fits_of, read_decisions
    from autofuse.db.proposals import Proposal
    from autofuse.db.store import Store
    from autofuse.ir.device import cpu_device
    from autofuse.ir.strict import strictly

    decisions = read_decisions(sources, sys.stdin)
    with Store.open(load_settings(store=store).run.store) as opened:
        kept = opened.proposals.put({d.key: Proposal(d.candidate, d.reason, d.speedup) for d in decisions})
    known = len(decisions) - kept
    decided = f"; {known} known or decided here already" if known else ""
    click.echo(f"{len(decisions)} decisions read, {kept} to be tried{decided}")
    for fit in fits_of(decisions, cpu_device().key, (versions(), strictly(versions()))):
        where = "this machine" if fit.fits else f"device {fit.device}, versions {fit.versions}"
        click.echo(f"  {fit.count} for {where}")
