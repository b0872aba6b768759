"""``autofuse run``: reads its own options and hands the rest over; ``launch`` runs the script."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.job import RunJob
from autofuse.cli.options import effort_options, load_settings, script_arguments, store_option
from autofuse.cli.output import say
from autofuse.job_ranks import told_ranks
from autofuse.settings.layers import disabled_by_environment
from autofuse.startup import launchers
from autofuse.startup.script import Target, check_target

EPILOG = """\
\b
Examples:
  autofuse run train.py --epochs 3
  autofuse run --tune wait --store ./tuned.sqlite3 train.py
  autofuse run -m package.train --epochs 3
  autofuse run --strict train.py
  autofuse run torchrun --nproc-per-node 2 train.py
\b
Each option also has an environment variable, for example AUTOFUSE_TUNE=wait.
AUTOFUSE_DISABLE=1 switches autofuse off.
"""


@click.command(
    "run",
    epilog=EPILOG,
    # Everything after the script belongs to the script, whatever it looks like.
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--tune",
    type=click.Choice(["background", "wait", "after", "off"]),
    metavar="MODE",
    help="When to tune: background (beside the script; the default), wait (pausing it), after (when it has ended) or "
    "off (never: use what is stored).",
)
@store_option
@effort_options
@click.option("--frozen", is_flag=True, default=None, help="Use what is stored; queue nothing new.")
@click.option(
    "--strict",
    is_flag=True,
    default=None,
    help="Only kernels whose results equal eager's bit by bit in every check; the report says what that costs.",
)
@click.option("--quiet", "-q", is_flag=True, default=None, help="Print nothing of autofuse's own.")
@script_arguments(is_required=True)
def command(
    tune: str | None,
    store: Path | None,
    profile: str | None,
    assignments: tuple[str, ...],
    frozen: bool | None,
    strict: bool | None,
    quiet: bool | None,
    target: Target,
) -> RunJob:
    """Run a Python script and make it faster.

    SCRIPT is a Python file, or a folder with a __main__.py. It runs exactly as under python: same arguments, same
    output, same exit code. All ARGS after SCRIPT belong to the script.
    """
    target = launchers.as_module(target)
    check_target(target)
    if disabled_by_environment():
        return RunJob(target, None)
    if launchers.is_launcher(target):
        return _launcher_of_ranks(target)
    ranks = told_ranks()
    if quiet is None and ranks is not None and ranks.rank > 0:
        quiet = True  # one rank of a job speaks for all
    given = {"tune": tune, "store": store, "profile": profile, "frozen": frozen, "strict": strict, "quiet": quiet}
    settings = load_settings(assignments, **given)
    if settings.fusion.patterns is not None and not settings.run.disable:
        from autofuse.fusion.pattern_file import read_patterns  # imports sympy, 0.3 s, which is needed only for a file

        read_patterns(settings.fusion.patterns)  # so that its errors are reported before the script runs
    return RunJob(target, None if settings.run.disable else settings)


def _launcher_of_ranks(target: Target) -> RunJob:
    """The launcher without autofuse, which its ranks run under with the options of this command."""
    options = click.get_current_context().params
    words: list[str] = []
    for name in ("tune", "store", "profile"):
        words += [f"--{name}", str(options[name])] if options[name] is not None else []
    for assignment in options["assignments"]:
        words += ["--set", assignment]
    words += [f"--{name}" for name in ("frozen", "strict", "quiet") if options[name]]
    ranks, why_not = launchers.with_ranks(target, words)
    if why_not:
        say(f"the ranks of {target.name} run without autofuse: {why_not}")
    return RunJob(ranks, None)
