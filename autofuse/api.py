"""The Python API: `optimize`, `session`, `observe`, `explain`.

In: a model or function of the user's. Out: the same, routed; or its observations; or the reasons of a decision. The
planner's classes (`FusionEngine`, `FusionPattern`, `FusionConfig`) and `register_pattern` are in `autofuse.fusion`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from autofuse.db.store import Store
from autofuse.gpu.devices import event_timer
from autofuse.integrations.watched import Watched, watched
from autofuse.ir.records import DimHistogram, OpProfile
from autofuse.observer.config import ObserverConfig
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import RootTracker, root_key
from autofuse.preserve_rng import untouched
from autofuse.sessions import current_session
from autofuse.settings.layers import load

Target = TypeVar("Target", bound=Callable[..., Any])


def optimize(target: Target) -> Target:
    """Capture ``target`` at its next call and route its kernels from then on.

    ``target``: an ``nn.Module``, which is changed in place and returned, or a function of tensors, of which
    the routed twin is returned. Settings come from the environment and the configuration files, as for
    ``autofuse run`` (``AUTOFUSE_TUNE=wait``, ``AUTOFUSE_STORE=...``); with ``AUTOFUSE_DISABLE=1`` the target
    is returned as it is. A target that cannot be captured runs eager. Raises TypeError for anything else.
    """
    if not callable(target):
        raise TypeError(f"expected an nn.Module or a function, found {type(target).__name__}; call optimize(model)")
    session = current_session()
    if session is None:
        return target
    if not type(target).__weakrefoffset__:  # what is kept of a function must not keep it
        target = cast(Target, functools.partial(target))
    roots = session.roots
    root = roots.root_of(target) if isinstance(target, torch.nn.Module) else roots.root_of_function(target)
    if root.state == "observing":
        root.ask_for(target)
    call: Any = roots.tracker.wrap(target, root.call)
    if isinstance(target, torch.nn.Module):
        target._compiled_call_impl = call
        return target
    functools.update_wrapper(call, target)
    twin: Target = call
    return twin


def session(store: str | Path | None = None, tune: str | None = None, **assignments: Any) -> Watched:
    """A block of a program under autofuse, as ``autofuse run`` has a whole script under it.

        with autofuse.session(store="tuned.sqlite3", tune="wait") as part:
            train()
        print(part.report())

    ``store``: the file that keeps results, by default the user's. ``tune``: "off", "background", "wait" or "after".
    Further settings by name, with two underscores for the dot: ``tuner__trials=40``. Modules are found and captured as
    they are called; behind the block they run in eager again. Where the process has a session already, it is used and
    goes on.
    Errors: SettingsError for a setting that does not exist or a value out of its range.
    """
    return watched(store, tune, **assignments)


@dataclass
class Observation:
    """What `observe` saw; complete when its block has ended."""

    operations: list[OpProfile] = field(default_factory=list)  # one row per overload and shapes
    histograms: list[DimHistogram] = field(default_factory=list)  # sizes of each dim of each root's arguments
    dynamic_dims: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # root -> (argument, dim)
    overhead_seconds: float = 0.0  # what watching cost


@contextlib.contextmanager
def observe() -> Iterator[Observation]:
    """Watch every aten call in the block: operators, shapes, times, owning modules. Changes no result."""
    result = Observation()
    observer = Observer(ObserverConfig(sample_every=1, skip_steps=0, max_overhead_percent=100.0), event_timer())
    roots: set[str] = set()

    def handle(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = root_key(module)
        roots.add(key)
        observer.on_root_call(key, args, kwargs)
        observer.before_root_call(key)
        began = time.perf_counter()
        try:
            return tracker.call_original(module, args, kwargs)
        finally:
            observer.after_root_call(key, time.perf_counter() - began)

    tracker = RootTracker(handle)
    tracker.install()
    try:
        yield result
    finally:
        tracker.uninstall()
        observer.stop()
        result.operations = observer.profiles()
        result.histograms = observer.histograms()
        result.dynamic_dims = {key: observer.dynamic_dims(key) for key in roots}
        result.overhead_seconds = observer.cost_seconds


def explain(node: str | None = None, store: str | Path | None = None) -> str:
    """Why a decision fell: text about one node (its label or fusion_id, or the beginning of either), or a list of all.

    ``store``: path of the store, the configured one by default. Raises UsageError for a node nobody knows
    and StoreError for a store that cannot be read.
    """
    with untouched():  # rich draws when it is imported, and for links
        from autofuse.report.console import PlainConsole
        from autofuse.report.explain import render_explain

        path = Path(store) if store is not None else load().run.store
        console = PlainConsole(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with Store.open(path, readonly=True) as opened:
            render_explain(opened, console, node)
        return console.export_text()
