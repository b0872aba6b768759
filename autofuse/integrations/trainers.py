"""Callbacks for trainers: Hugging Face's ``Trainer`` and Lightning's.

In: a trainer. Out: its run under autofuse; at its end one line with the gain, and the totals in the trainer's own log.
Guarantee: a failure of autofuse never reaches the trainer. Each library is imported only when its callback is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofuse.integrations.watched import Watched, watched
from autofuse.preserve_rng import untouched
from autofuse.stderr import say

Log = Callable[[Mapping[str, float]], None]


class _Part:
    """The watched part of a trainer's run; begun and ended by its callbacks."""

    def __init__(self, store: str | Path | None, tune: str | None) -> None:
        self._watched = watched(store, tune)
        self._is_open = False

    def begin(self) -> None:
        if not self._is_open:
            self._watched.__enter__()
            self._is_open = True

    def end(self, log: Log | None = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._watched.__exit__(None, None, None)
            _tell(self._watched, log)
        except Exception as error:
            say(f"the run's report could not be made ({type(error).__name__}: {error}); type: autofuse report")


def _tell(part: Watched, log: Log | None) -> None:
    lines = part.report().splitlines()
    if lines:
        say(lines[min(1, len(lines) - 1)])
    if log is not None and (numbers := part.metrics()):
        log(numbers)


def transformers_callback(store: str | Path | None = None, tune: str | None = None) -> Any:
    """A ``transformers.TrainerCallback``: ``Trainer(..., callbacks=[transformers_callback()])``.

    Errors: ImportError without transformers.
    """
    with untouched():
        from transformers import TrainerCallback

    part = _Part(store, tune)

    class AutofuseCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            part.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            part.end(lambda numbers: state.log_history.append({**numbers, "step": state.global_step}))

    return AutofuseCallback()


def lightning_callback(store: str | Path | None = None, tune: str | None = None) -> Any:
    """A Lightning callback: ``Trainer(callbacks=[lightning_callback()])``. Errors: ImportError without Lightning."""
    with untouched():
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback

    part = _Part(store, tune)

    class AutofuseCallback(Callback):  # type: ignore[misc, unused-ignore]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            part.begin()

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            logger = getattr(trainer, "logger", None)
            part.end(None if logger is None else lambda numbers: logger.log_metrics(numbers, trainer.global_step))

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            part.end()

    return AutofuseCallback()
