"""The command ``autofuse``, also as ``python -m autofuse``.

Parsing ends before a script starts: click's frames are gone by then, so the script has its whole recursion limit.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the command line; returns the exit code, or ends the process as the user's script ended."""
    # Imported here: under ``python -m`` the path is only right once this file runs, see below.
    from autofuse.startup import gc_pause

    with gc_pause.paused():
        from autofuse.cli.app import parse
        from autofuse.cli.launch import launch

    outcome = parse(sys.argv[1:])
    if not isinstance(outcome, int):
        return launch(outcome)
    gc_pause.freeze()
    return outcome


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # python -m put the working directory first: a click.py or rich.py of the user's would be taken for ours.
        # The script gets its own entry in this place later.
        sys.path[0] = str(Path(__file__).parent.parent)
    sys.exit(main())
