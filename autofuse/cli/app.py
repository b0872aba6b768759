"""The command ``autofuse``: finds the subcommand, loads its module on demand, turns errors into exit codes.

In: the arguments. Out: an exit code, or a ``RunJob`` for ``launch``. Errors of usage end with 2, others with 1, each as
one message on stderr that says what to type next.
Guarantee: ``--help`` and a mistyped command import no command's module, and nothing here imports torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from autofuse import __version__
from autofuse.cli.job import RunJob
from autofuse.cli.output import say
from autofuse.errors import AutofuseError
from autofuse.startup import gc_pause


class _Entry(NamedTuple):
    module: str
    summary: str  # the first line of the command's own help


# In the order in which a newcomer needs them.
COMMANDS = {
    "run": _Entry("autofuse.cli.run", "Run a Python script and make it faster."),
    "report": _Entry("autofuse.cli.report", "Show what was fused, how much faster it is, and what tuning cost."),
    "watch": _Entry("autofuse.cli.watch", "Watch the newest run while it goes on."),
    "runs": _Entry("autofuse.cli.runs", "List the runs of a store, compare two, or delete some."),
    "explain": _Entry("autofuse.cli.explain", "Tell why something was fused or left alone."),
    "trace": _Entry("autofuse.cli.trace", "Write a step of a run, node by node, as a Chrome trace."),
    "show": _Entry("autofuse.cli.show", "Print the source of a node's kernel, C or Triton."),
    "repro": _Entry("autofuse.cli.repro", "Write one file that runs a node's kernel beside eager."),
    "tune": _Entry("autofuse.cli.tune", "Work off the tuning queue now, in the foreground."),
    "daemon": _Entry("autofuse.cli.daemon", "Start, stop or look at the background tuner."),
    "store": _Entry("autofuse.cli.store", "Put the store aside, or shorten its history."),
    "export": _Entry("autofuse.cli.export", "Write decisions to a file that other machines can import."),
    "import": _Entry("autofuse.cli.import_file", "Take decisions of other machines, to be checked here before use."),
    "fleet": _Entry("autofuse.cli.fleet", "Prepare or look at the server by which hosts share what they have tuned."),
    "config": _Entry("autofuse.cli.config", "List all settings with their values and where those come from."),
    "completion": _Entry("autofuse.cli.completion", "Print what lets a shell complete commands, options and names."),
    "doctor": _Entry("autofuse.cli.doctor", "Check that this machine has what autofuse needs."),
}

EPILOG = """\
\b
Examples:
  autofuse run train.py --epochs 3        run a script; its own options follow it
  autofuse run --tune wait train.py       tune first, then go on at full speed
  autofuse report                         what it brought
"""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        with gc_pause.paused():
            command = importlib.import_module(entry.module).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(unknown_command(args[0]), ctx)
        return super().resolve_command(ctx, args)


def unknown_command(name: str) -> str:
    """The error text for ``autofuse NAME``; with a script's name, that ``run`` was left out."""
    if name.endswith(".py") or os.path.exists(name):
        return f"There is no command {name!r}. To run a script, type: autofuse run {name}"
    near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.7)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"There is no command {name!r}.{hint} Commands: {', '.join(COMMANDS)}."


@click.group(
    cls=_LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="autofuse %(version)s")
def app() -> None:
    """Make PyTorch programs faster by measuring.

    autofuse runs your script as it is, watches which operators run on which shapes, builds fused kernels for them,
    keeps those that are measured to be faster, and remembers them for the next run.
    """


def parse(arguments: Sequence[str]) -> int | RunJob:
    """Run the command and return its exit code, or for ``run`` the script to run. Never raises."""
    try:
        outcome = app.main(args=list(arguments), prog_name="autofuse", standalone_mode=False)
        return outcome if isinstance(outcome, int | RunJob) else 0
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AutofuseError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone, as in ``autofuse report | head``. Python's final flush must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
