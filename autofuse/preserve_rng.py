"""Preserves a script's random generators while our own work runs on its threads.

In: a block of our own work: late imports, compilation, planning, waiting, the beginning and the end of a session. Out:
Python's ``random``, numpy's global generator and torch's (the CPU's, and those of GPUs in use) as they were before. The
block does not count as a change of warning filters (`warning_filters`), and no signal handler of the script leaves it
half done (`script_signals`). All late imports of modules that run inside of a script stand in such a block. The user's
own computation never does: it must advance the generators as in eager. Guarantee: the generators are restored after a
block. They are not restored while another thread of the script runs, because that thread may have advanced them. So our
own code never uses them; the blocks are for the modules that we import. Nothing here is on the path of a captured call;
a block takes 50 us.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from autofuse.hidden_thread import hides
from autofuse.locks import make_rlock
from autofuse.script_signals import held_back
from autofuse.warning_filters import unchanged

# torch holds a generator's mutex while it makes the tensor for its state. If Python collects garbage at that moment,
# what runs then may hand the interpreter to a thread that wants the same mutex and keeps the interpreter: both wait
# for ever. So our threads ask one at a time. A collection may bring the holder here once more.
torchs_states = make_rlock()
# Names of threads that a script's progress bars have, and the queues to the workers of its data loaders.
_DRAW_NOTHING = ("tqdm_monitor", "QueueFeederThread")


class Generator(NamedTuple):
    """How the state of one generator is read, compared and set."""

    state: Callable[[], Any]
    mark: Callable[[Any], Any]  # equal for equal states
    put: Callable[[Any], object]


def keep_generators() -> Callable[[], None]:
    """What puts all generators back to where they are now; those that are there still are not written to."""
    kept = [(generator, generator.state()) for generator in generators()]

    def restore() -> None:
        for generator, state in kept:
            if generator.mark(generator.state()) != generator.mark(state):
                generator.put(state)

    return restore


@contextmanager
def untouched() -> Iterator[None]:
    """Around work of ours on a thread of the script."""
    restore = keep_generators()
    try:
        with held_back(), unchanged():
            yield
    finally:
        if is_only_thread():
            restore()


def is_only_thread() -> bool:
    """Whether no other thread of the script could have drawn meanwhile."""
    me = threading.get_ident()  # current_thread() would list one that is not
    others = (thread for thread in threading.enumerate() if thread.ident != me and not hides(thread.ident))
    return all(thread.name in _DRAW_NOTHING for thread in others)


def _one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with torchs_states:
            return call(*args)

    return called


def generators() -> Iterator[Generator]:
    """Those that there are: what is not imported yet has no state that a script could know."""
    yield Generator(random.getstate, _itself, random.setstate)
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):  # not while it is being imported
        yield Generator(lambda: numpy.get_state(legacy=False), pickle.dumps, numpy.set_state)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        is_readable = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        for one in (torch.default_generator, *(torch.cuda.default_generators if is_readable else ())):
            yield Generator(_one_at_a_time(one.get_state), bytes_of, _one_at_a_time(one.set_state))


def _itself(state: Any) -> Any:
    return state


def bytes_of(state: Any) -> bytes:
    """Of a tensor on the CPU, by its address: while torch traces, its operators are not to be called."""
    return ctypes.string_at(state.data_ptr(), state.numel())
