"""``autofuse config``: every setting, its value, where the value comes from, and what it means."""

from __future__ import annotations

import json

import click

from autofuse.cli.options import effort_options, load_settings, store_option
from autofuse.cli.output import out_console
from autofuse.errors import SettingsError
from autofuse.settings.layers import GROUPS, SPECS, Settings, group_help, nearest_names

VALUE_WIDTH = 16  # "2147483648 bytes"

EPILOG = """\
\b
Examples:
  autofuse config                      all settings
  autofuse config tuner                one group
  autofuse config --profile thorough   what a profile changes
\b
To change one: autofuse run --set tuner.trials=40 train.py
           or: AUTOFUSE_TUNER_TRIALS=40 in the environment
           or: [tuner] trials = 40 in a file autofuse.toml beside the script
"""


@click.command("config", epilog=EPILOG)
@click.argument("group", required=False)
@store_option
@effort_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(
    group: str | None, store: str | None, profile: str | None, assignments: tuple[str, ...], as_json: bool
) -> None:
    """List all settings with their values and where those come from.

    GROUP narrows the list to one group, such as tuner. The first of these that names a setting decides: command line,
    environment, autofuse.toml or [tool.autofuse] in pyproject.toml of the project, the user's autofuse.toml, the
    effort profile, the default.
    """
    if group is not None and group not in GROUPS:
        raise SettingsError(f"There is no group {group!r}.{nearest_names(group, GROUPS)} Groups: {', '.join(GROUPS)}.")
    settings = load_settings(assignments, store=store, profile=profile)
    if as_json:
        names = [name for name in SPECS if group is None or name.startswith(f"{group}.")]
        click.echo(json.dumps({name: _row(settings, name) for name in names}, indent=2))
    elif group is None:
        _print_overview(settings)
    else:
        _print_group(settings, group)


def _row(settings: Settings, name: str) -> dict[str, object]:
    spec = SPECS[name]
    section, _, key = name.partition(".")
    return {
        "value": settings.as_dict()[section][key],
        "unit": spec.unit,
        "origin": settings.origin(name),
        "default": spec.default if isinstance(spec.default, bool | int | float | None) else str(spec.default),
        "expected": spec.kind,
        "variable": spec.variables[0],
        "help": spec.help,
    }


def _print_overview(settings: Settings) -> None:
    """Print a table for each group, with name, value and meaning of each setting."""
    from rich.table import Table
    from rich.text import Text

    console = out_console()
    for group in GROUPS:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, width=26)
        table.add_column(no_wrap=True, width=VALUE_WIDTH)
        table.add_column(ratio=1, overflow="fold")
        for name in (n for n in SPECS if n.startswith(f"{group}.")):
            spec, value = SPECS[name], _value(settings, name)
            style = "" if settings.origin(name) == "default" else "green"
            meaning = Text(spec.help)
            if settings.origin(name) != "default":
                meaning = Text.assemble((f"from {settings.origin(name)}", style), "\n", meaning)
            if len(value) > VALUE_WIDTH:  # a path, which needs a line of its own
                meaning, value = Text.assemble((value, style), "\n", meaning), ""
            table.add_row(Text("  " + name.partition(".")[2], "cyan"), Text(value, style), meaning)
        console.print(Text.assemble((group, "bold"), f"  {group_help(group)}"))
        console.print(table)
        console.print()
    console.print("More on a group: autofuse config GROUP", style="dim")


def _print_group(settings: Settings, group: str) -> None:
    """Print one group in detail, with each setting's allowed values and environment variable."""
    from rich.padding import Padding
    from rich.text import Text

    console = out_console()
    console.print(Text.assemble((group, "bold"), f"  {group_help(group)}"))
    for name in (n for n in SPECS if n.startswith(f"{group}.")):
        spec, origin = SPECS[name], settings.origin(name)
        style = "bold" if origin == "default" else "bold green"
        line = Text.assemble("  ", (name, "bold cyan"), " = ", (_value(settings, name), style), f"   from {origin}")
        console.print(line, soft_wrap=True)
        allowed = f"Expected: {spec.kind}. Variable: {spec.variables[0]}"
        console.print(Padding(Text.assemble(spec.help, "\n", (allowed, "dim")), (0, 0, 0, 6), expand=False))


def _value(settings: Settings, name: str) -> str:
    text = settings.shown(name) or '""'
    return text if text == "none" else f"{text} {SPECS[name].unit}".rstrip()
