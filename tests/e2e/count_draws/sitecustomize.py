"""Found by an interpreter whose PYTHONPATH names this folder: notes who draws from the global random generators.

In: ``DRAWS``, the file to write to. Out: one line for each draw, ``pid thread generator: innermost frame < next <...``,
of Python's ``random`` and numpy's from any thread, of torch's from threads of autofuse, and for each generator that
was found moved at the end of a block that `autofuse.preserve_rng` guards. Numbers are those of an interpreter without.
"""

import os
import random
import sys
import threading
import traceback


def note(generator):
    stack = traceback.extract_stack(sys._getframe(2), 24)
    frames = " < ".join(f"{f.filename.split('site-packages/')[-1]}:{f.lineno}:{f.name}" for f in reversed(stack))
    with open(os.environ["DRAWS"], "a") as log:
        log.write(f"{os.getpid()} {threading.current_thread().name} {generator}: {frames}\n")


class Counted(random.Random):
    def random(self):
        note("random")
        return super().random()

    def getrandbits(self, k):
        note("random")
        return super().getrandbits(k)


def count_pythons():
    before, now = random._inst, Counted()
    for name in dir(random):
        if getattr(getattr(random, name), "__self__", None) is before:
            setattr(random, name, getattr(now, name))
    random._inst = now


def count_numpys():
    import numpy.random as module

    def counted(function):
        def draw(*args, **kwargs):
            note("numpy")
            return function(*args, **kwargs)

        return draw

    for name in dir(module):
        function = getattr(module, name)
        if getattr(function, "__self__", None) is module.mtrand._rand and not name.endswith(("state", "seed")):
            setattr(module, name, counted(function))


def count_torchs_in_threads_of_ours():
    run = threading.Thread.run

    def counted_run(self):
        if not self.name.startswith("autofuse"):
            return run(self)
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if torch.Tag.nondeterministic_seeded in function.tags:
                    note("torch")
                return function(*args, **(kwargs or {}))

        with Counting():
            return run(self)

    threading.Thread.run = counted_run


def count_what_was_undone():
    """To be called once autofuse can be imported."""
    from autofuse import preserve_rng

    keep = preserve_rng.keep_generators

    def keep_and_tell():
        kept = [(number, one, one.state()) for number, one in enumerate(preserve_rng.generators())]
        restore = keep()

        def restore_and_tell():
            for number, one, state in kept:
                if one.mark(one.state()) != one.mark(state):
                    note(f"undone-{number}")
            restore()

        return restore_and_tell

    preserve_rng.keep_generators = keep_and_tell


if os.environ.get("DRAWS"):
    count_pythons()
    count_numpys()
    count_torchs_in_threads_of_ours()
