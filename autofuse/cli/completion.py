"""``autofuse completion``: the script with which a shell completes autofuse's commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from autofuse.cli.app import app

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
\b
Examples:
  autofuse completion bash >> ~/.bashrc
  autofuse completion zsh >> ~/.zshrc
  autofuse completion fish > ~/.config/fish/completions/autofuse.fish
"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print what lets a shell complete commands, options and names.

    For the present session alone: eval "$(autofuse completion bash)".
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(app, {}, "autofuse", "_AUTOFUSE_COMPLETE").source())
