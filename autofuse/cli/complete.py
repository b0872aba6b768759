"""The names of nodes that a shell offers.

In: the beginning of a name. Out: what it may become. Guarantee: never fails and prints nothing, whatever is the matter
with a store.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from autofuse.cli.options import load_settings, open_store

MOST = 200  # names


def nodes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of nodes in the store, with their operations."""
    with contextlib.suppress(Exception):
        store = context.params.get("store")
        settings = load_settings(store=Path(store) if store else None, quiet=True)
        with open_store(settings) as opened:
            known = {node.label: node.operations for node in opened.nodes.known() if node.label.startswith(incomplete)}
        return [CompletionItem(name, help=known[name]) for name in sorted(known)[:MOST]]
    return []
