"""Names and messages of any origin reach a terminal as text."""

import io

import pytest
from rich.text import Text

from autofuse.report.console import PlainConsole
from autofuse.report.table import plain_table
from autofuse.stderr import plain

ESCAPES = ["\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "\x08\x08", "\r", "\u202e", "\x7f"]


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_control_character_of_a_name_reaches_the_terminal(escape):
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system="truecolor", width=60)
    table = plain_table("a table")
    table.add_column("name")
    table.add_row(f"a{escape}b", style="bold red")
    console.print(table)
    console.print(Text(f"c{escape}d", "green"), f"e{escape}f")
    text = file.getvalue()
    assert escape not in text and "\x1b[" in text, "rich's own colours stay"
    assert all(letter in text for letter in "abcdef")
    assert plain(f"x{escape}\n\ty").endswith("\n\ty") and escape not in plain(escape)


def test_one_line_on_stderr_is_plain_too(capfd):
    from autofuse.stderr import say

    say("class \x1b]0;title\x07Net")
    assert "\x1b" not in capfd.readouterr().err
