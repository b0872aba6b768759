"""Makes sessions: the only module that connects a session with the stages.

In: settings. Out: a `Session` whose roots are captured through `pipeline`. Planner and tracer are imported with the
first trace: a run on traces of an earlier run makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from autofuse.preserve_rng import untouched
from autofuse.runtime import session
from autofuse.runtime.roots.services import USUAL_TOOLS, RootTools
from autofuse.runtime.session import Session
from autofuse.settings.layers import Settings

if TYPE_CHECKING:
    from autofuse.db.client import StoreClient


def _root_backend(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    with untouched():
        from autofuse.pipeline import traced_root_backend
    return traced_root_backend(module, example_inputs)


def make_session(
    settings: Settings,
    command: str,
    store: StoreClient | None = None,
    launched: float | None = None,
    tools: RootTools = USUAL_TOOLS,
) -> Session:
    """One that watches nothing yet; the arguments are those of `Session`."""
    return Session(settings, command, _root_backend, store, launched, tools)


def start_session(
    settings: Settings,
    command: str,
    store: StoreClient | None = None,
    launched: float | None = None,
    tools: RootTools = USUAL_TOOLS,
) -> Session:
    """Begin to watch this process, unless it is watched already."""
    return session.start_session(partial(make_session, settings, command, store, launched, tools))


def current_session() -> Session | None:
    """The session of this process; made from the environment where `autofuse run` did not, None if disabled."""
    return session.current_session(_root_backend)
