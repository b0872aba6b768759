"""Random graphs, one after the other: the first that fails is made as small as possible.

In: a seed, a number of graphs, a folder. Out: counts; the failure as text, and as a file of the folder. Guarantee:
equal seeds try equal graphs.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz.check import check
from fuzz.graphs import Program, programs

FRESH = (Phase.generate, Phase.shrink)
MOST_SMALLER = 60  # programs that are tried to make a failure smaller


class Different(AssertionError):
    """A program whose results are not eager's."""


def search(
    number: int, graphs: int, corpus: Path | None, note: Path | None, tell: Callable[[str], None]
) -> dict[str, int]:
    """Try so many graphs. ``note``: a file that has the last one, in case the process dies of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}
    smaller = itertools.count()

    def look(program: Program) -> None:
        text = str(program)
        if text not in failed and not (failed and next(smaller) > MOST_SMALLER):
            try_once(program, text)
        if text in failed:
            raise Different(failed[text])

    def try_once(program: Program, text: str) -> None:
        if note is not None:
            note.write_text(text)
        outcome = check(program)
        counts["graphs"] += 1
        counts["nodes"] += outcome.nodes
        counts["candidates"] += outcome.candidates
        if outcome.skipped:
            counts[outcome.skipped] += 1
        if outcome.wrong:
            failed[text] = "\n".join([text, *outcome.wrong])

    began = time.process_time()
    # What failed before is tried by the first process alone: the others look further.
    phases = (Phase.reuse, *FRESH) if number == 0 else FRESH
    database = None if corpus is None else DirectoryBasedExampleDatabase(corpus / "examples")
    chosen = settings(
        max_examples=graphs,
        deadline=None,
        database=database,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(number)(chosen(given(programs())(look)))()
    except Different as error:
        tell(str(error))
        if corpus is not None:
            name = hashlib.sha256(str(error).encode()).hexdigest()[:10]
            (corpus / f"{name}.txt").write_text(f"{error}\n")
    compilers = os.times()
    counts["cpu_seconds"] += round(time.process_time() - began + compilers.children_user + compilers.children_system)
    return dict(counts)
