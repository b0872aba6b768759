"""Compilers that compile each text once in a session of tests: what its processes find by the names cc, gcc and clang.

In: an empty folder. Out: the folder to put first in PATH. The programs there hand everything to the compiler that PATH
had, and keep what it made under a digest of its text and all other arguments; the next process that asks for the same
gets a copy, whose bytes are those that the compiler would make again. What does not compile is never kept. Half of all
kernels of a session are the same as another test's: a model that one test tunes is tuned by five others too.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COMPILED = "TEST_COMPILED"  # a folder that the processes of a session share
_NAMES = ("cc", "gcc", "clang")
_PROGRAM = """#!/bin/sh
text= out= before=
for word; do
  [ "$before" = -o ] && out=$word
  case $word in *.c) text=$word ;; esac
  before=$word
done
[ -f "$text" ] && [ -n "$out" ] || exec {compiler} "$@"
key=$({{
  for word; do case $word in "$text" | "$out") ;; *) printf '%s\\n' "$word" ;; esac; done
  cat "$text"
}} | sha256sum)
kept={folder}/${{key%% *}}
[ -f "$kept" ] && exec cp "$kept" "$out"
{compiler} "$@" || exit
[ -f "$out" ] || exit 0
cp "$out" "$kept.$$" && mv "$kept.$$" "$kept"
exit 0
"""


def install(folder: Path) -> None:
    """Once a session: its other processes have PATH of the first."""
    if COMPILED in os.environ:
        return
    os.environ[COMPILED] = str(folder)
    for name in _NAMES:
        compiler = shutil.which(name)
        if compiler is not None:
            kept = folder / f"by-{name}"
            kept.mkdir()
            program = folder / name
            program.write_text(_PROGRAM.format(compiler=compiler, folder=kept))
            program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
