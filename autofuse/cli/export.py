"""``autofuse export``: writes decisions to a file; ``autofuse.db.decision_file`` has its format."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.errors import StoreError

EPILOG = """\
\b
Examples:
  autofuse export tuned.jsonl
  autofuse export - | ssh other autofuse import -
"""


@click.command("export", epilog=EPILOG)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True))
@store_option
def command(file: Path, store: Path | None) -> None:
    """Write decisions to a file that other machines can import.

    FILE gets a line of JSON for each: the node, its sizes, device and versions, the winner, what was measured. It has
    no code, no path and no script's name. "-" is the standard output.
    """
    from autofuse.db.decision_file import lines_of

    with open_store(load_settings(store=store)) as opened:
        lines = list(lines_of(decision for _, decision in opened.results.decisions()))
    text = "".join(f"{line}\n" for line in lines)
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        file.write_text(text)
    except OSError as error:
        raise StoreError(f"expected a file that can be written, found {file}: {error.strerror}") from None
    count = len(lines) - 1
    click.echo(f"{file} has {count} decision{'s' if count != 1 else ''}. Elsewhere type: autofuse import {file.name}")
