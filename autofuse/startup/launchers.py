"""Programs that start the ranks of a job: autofuse goes into the ranks, and the launcher runs as it is.

In: a target that is such a launcher, and autofuse's own options. Out: the same launcher, whose ranks are `autofuse run`
with these options and the script. Guarantee: the launcher's own parser finds the script among its words; where it
cannot, or starts no Python, the target is returned unchanged, with a reason.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from autofuse.startup.script import Target


@dataclass(frozen=True)
class Launcher:
    """A launcher, by the module that ``python -m`` runs."""

    module: str
    parser: str  # the function of that module that makes its parser
    elsewhere: tuple[
        str, ...
    ] = ()  # options, by their names in the parser, with which no Python process runs the script


LAUNCHERS = {
    row.module: row
    for row in (
        Launcher("torch.distributed.run", "get_args_parser", ("no_python", "run_path")),
        Launcher("accelerate.commands.launch", "launch_command_parser", ("no_python",)),
    )
}
COMMANDS = {  # installed programs, with the words that choose the launcher
    ("torchrun",): "torch.distributed.run",
    ("accelerate", "launch"): "accelerate.commands.launch",
}


def as_module(target: Target) -> Target:
    """An installed launcher as the module that it runs: ``torchrun``, also by its path; else the target itself."""
    if target.is_module:
        return target
    words = (Path(target.name).name, *target.arguments)
    for command, module in COMMANDS.items():
        if words[: len(command)] == command:
            return Target(module, words[len(command) :], is_module=True)
    return target


def is_launcher(target: Target) -> bool:
    return target.is_module and target.name in LAUNCHERS


def with_ranks(target: Target, options: Sequence[str]) -> tuple[Target, str]:
    """The launcher with ranks under ``autofuse run``; unchanged where that cannot be, and why, else "".

    ``options``: of ``autofuse run``. Imports the launcher, which this process runs next.
    """
    launcher = LAUNCHERS[target.name]
    try:
        make_parser: Callable[[], argparse.ArgumentParser] = getattr(
            importlib.import_module(launcher.module), launcher.parser
        )
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            found = make_parser().parse_args(list(target.arguments))
    except SystemExit:  # it says what is wrong, or its help, when it runs
        return target, ""
    except Exception as error:
        return target, f"{type(error).__name__}: {error}"
    finally:
        sys.modules.pop(launcher.module, None)  # python -m warns of a module that is there before it runs
    chosen = next((name for name in launcher.elsewhere if getattr(found, name, False)), None)
    if chosen is not None:
        return target, f"with --{chosen.replace('_', '-')} it starts no python that autofuse could run in"
    place = len(target.arguments) - len(found.training_script_args) - 1
    if place < 0 or target.arguments[place] != found.training_script:
        return target, "its script was not found among its arguments"
    own, script = target.arguments[:place], target.arguments[place:]
    module = ("-m",) if found.module else ()
    own = (*own, *(() if found.module else ("--module",)))
    return replace(target, arguments=(*own, "autofuse", "run", *options, *module, *script)), ""
