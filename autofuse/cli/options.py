"""Options that several commands share, and the settings they make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from autofuse.cli.output import say
from autofuse.errors import StoreError
from autofuse.settings.layers import Settings, load, parse_assignment, profile_names
from autofuse.startup.script import Target

if TYPE_CHECKING:
    from autofuse.db.store import Store

Function = TypeVar("Function", bound=Callable[..., Any])


def store_option(function: Function) -> Function:
    return click.option(
        "--store",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="The file that keeps results. Default: one per user; 'autofuse config' shows where.",
    )(function)


def effort_options(function: Function) -> Function:
    """Add the options ``--profile`` and ``--set`` to a command."""
    function = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any setting, such as tuner.trials=40; may be repeated. 'autofuse config' lists all.",
    )(function)
    return click.option("--profile", metavar="NAME", help=f"How much effort to spend: {', '.join(profile_names())}.")(
        function
    )


def script_arguments(is_required: bool) -> Callable[[Function], Function]:
    """Add SCRIPT, ARGS and ``-m`` to a command, as its one parameter ``target``: None where no script is given."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_target(is_module: bool, script: str | None, arguments: tuple[str, ...], **options: Any) -> Any:
            return function(target=None if script is None else Target(script, arguments, is_module), **options)

        made = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")(with_target)
        made = click.argument("script", required=is_required, shell_complete=_files)(made)
        made = click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")(made)
        return cast(Function, made)

    return decorate


def _files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]  # the shell's own completion


def open_store(settings: Settings) -> Store:
    """Open the store for reading. Raises StoreError; where there is no store yet, it says how to get one."""
    from autofuse.db.store import Store  # imports SQLAlchemy, 0.2 s, which a command's help does not need

    if not settings.run.store.exists():
        raise StoreError(f"there are no results yet: {settings.run.store} does not exist. Type: autofuse run SCRIPT.py")
    return Store.open(settings.run.store, readonly=True)


def load_settings(assignments: Sequence[str] = (), **options: object) -> Settings:
    """The settings with this command line's; ``options``: settings of the group ``run``, None if not given."""
    cli: dict[str, Any] = dict(parse_assignment(text) for text in assignments)
    cli |= {f"run.{name}": value for name, value in options.items() if value is not None}
    settings = load(cli)
    if not settings.run.quiet:
        for line in settings.warnings:
            say(line)
    return settings
