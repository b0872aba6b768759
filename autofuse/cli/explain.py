"""``autofuse explain``: the story of a node, a module or a script's graphs, told by ``autofuse.report.explain``."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.complete import nodes
from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console
from autofuse.errors import UsageError
from autofuse.settings.layers import Settings, disabled_by_environment
from autofuse.startup.script import Target, check_target

EPILOG = """\
\b
Examples:
  autofuse explain                     all nodes and modules that the store knows
  autofuse explain af_row_softmax      one node; the beginning of its name will do
  autofuse explain train.py --steps 3  runs the script: its graphs before and after fusion
"""


def _is_script(name: str) -> bool:
    return name.endswith(".py")


class _Explain(click.Command):
    """Takes options after a node's name as its own; those after a script's name belong to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = not any(map(_is_script, args))
        return super().parse_args(ctx, args)


@click.command("explain", cls=_Explain, epilog=EPILOG)
@click.argument("node", required=False, metavar="[NODE|SCRIPT.py]", shell_complete=nodes)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@store_option
def command(node: str | None, arguments: tuple[str, ...], store: Path | None) -> int:
    """Tell why something was fused or left alone.

    NODE is a name from 'autofuse report', or its beginning: a group of operators that can run as one kernel, or a
    module. Shows its operators, all candidates that were measured, and the decision for each range of shapes.

    SCRIPT.py is run once, with its ARGS, to capture its graphs: shows how many nodes, edges and kernels they have, how
    deep they are and how many bytes they move, before fusion and after. Nothing is tuned or stored.
    """
    settings = load_settings(store=store)
    if node is not None and _is_script(node):
        return _explain_script(Target(node, arguments), settings)
    if arguments:
        raise click.UsageError(f"expected one name, found {len(arguments) + 1}: {' '.join((node or '', *arguments))}")
    from autofuse.report.explain import render_explain  # imports rich and SQLAlchemy, which the help does not need

    with open_store(settings) as opened:
        render_explain(opened, out_console(), node)
    return 0


def _explain_script(target: Target, settings: Settings) -> int:
    check_target(target)
    if settings.run.disable or disabled_by_environment():
        type_next = f"AUTOFUSE_DISABLE=0 autofuse explain {target.command}"
        raise UsageError(f"expected autofuse to be on, found it switched off. Type: {type_next}")
    from autofuse.cli.explain_script import explain_script
    from autofuse.report.explain import render_graphs

    report, exit_code = explain_script(target, settings)
    render_graphs(report, out_console(), target.command, exit_code)
    return exit_code
