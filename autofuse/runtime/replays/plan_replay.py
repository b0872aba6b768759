"""A plan's call as a CUDA graph: recorded once the plan has been called often enough, kept if it is faster.

In: the arguments of calls. Out: results, or None where the caller is to launch one by one. The plan's callables never
change under one of these: each change makes another.
Guarantee: results are those of launches one by one, to the bit. Two calls are run both ways and compared before any
result of a replay is handed out. Then calls alternate, are timed by the device, and the faster way stays. A call that
differs from the recorded one (`Inputs`), comes on another stream or inside of a recording, or finds the memory in use
by another thread or by a call around it, is launched one by one. So is everything after a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.runtime.graphs.plans import Plan, Timer
from autofuse.runtime.replays.inputs import Inputs, SeenInputs, Unfit
from autofuse.runtime.replays.replays import Pool, Recording, Replays
from autofuse.runtime.replays.results import Results, below
from autofuse.tuner.comparison import compare, confirms, is_clear, verdict
from autofuse.wrapper.graph_call import Program

NOTED = 3  # calls before a recording whose inputs are compared with each other
COMPARED = 2  # calls that run both ways, whose results are compared
ROUNDS = 15  # timed pairs before a first verdict
MOST_ROUNDS = 45  # pairs; what is open then is lost
MOST_RECORDINGS = 3  # of one plan, after which its inputs move too often
MISSES = 3  # calls in a row that do not fit, after which a recording is made anew
UNDECIDED = 8  # times as many calls before a recording where kernels may still come


class PlanReplay:
    """Of one plan, with the callables that it has now."""

    def __init__(
        self, replays: Replays, make_timer: Callable[[torch.device], Timer], program: Program, phase: str, plan: Plan
    ) -> None:
        self.what = f"{phase} graph of {len(program.slots)} nodes"
        self._replays = replays
        self._calls = replays.calls
        self._program = program
        self._plan = plan
        self._phase = phase
        self._make_timer = make_timer
        self._only = _Only(plan.calls)
        self._step: Callable[[list[Any]], Any] = self._wait
        self._after = replays.settings.after
        self._left = self._after * (1 if plan.is_decided else UNDECIDED)
        self._seen = SeenInputs()
        self._recording: Recording | None = None
        self._recordings = self._misses = self._compared = 0
        self._race: _Race | None = None
        self._is_closed = False

    def __call__(self, args: list[Any]) -> Any:
        return self._step(args)

    def close(self) -> None:
        """The plan has other callables, or is gone. On any thread."""
        self._step, self._is_closed = _one_by_one, True
        if self._plan.native is self:
            self._plan.native = None
        self._release()

    @property
    def is_chosen(self) -> bool:
        """Whether the CUDA graph has won."""
        return self._step == self._replayed

    def evict(self) -> None:
        """Make room for others; under the pool's lock."""
        self._after *= 2
        self._begin_anew()

    # ---- before ------------------------------------------------------------------------------------------

    def _wait(self, args: list[Any]) -> Any:
        self._left -= 1
        self._replays.called(self._phase)
        if self._left >= NOTED:
            return None
        if self._left > 0:
            with contextlib.suppress(Exception):  # the last of these calls says so
                self._seen.note(args)
            return None
        if self._replays.is_off:
            self.close()
            return None
        try:
            self._seen.note(args)
            may_record = not self._replays.why_not_now()
        except Exception as error:
            self._fail(error)
            return None
        if may_record:
            return self._try(args)
        self._left = self._after
        return None

    def _try(self, args: list[Any]) -> Any:
        """Run this call one by one, record it, and replay it to compare."""
        result = self._run(args)
        try:
            index = _index_of(args, self._calls.index_of)
            if index != self._calls.device():
                raise Unfit("runs on a device that is not the current one")
            pool = self._replays.pool(index)
            if not pool.lock.acquire(blocking=False):
                self._left = self._after
                return result
            try:
                self._replays.tidy(pool)
                if self._record(args, pool):
                    self._compare(args, result)
            finally:
                pool.lock.release()
        except Exception as error:
            self._fail(error)
        args.clear()
        return result

    def _record(self, args: Sequence[Any], pool: Pool) -> bool:
        calls = self._calls
        self._replays.disturb()
        self._recordings += 1
        before = calls.reserved(pool.index)
        with torch.inference_mode(False):  # memory of ours is written to in calls of any mode
            inputs = Inputs(args, self._seen.moving, calls.empty, calls.index_of)
        recording = Recording(self, pool, inputs, calls.numerics())
        given = list(inputs.given)
        found: list[Any] = []
        try:
            handle = self._replays.handle(pool)
            recording.graph, _ = calls.record(pool.index, handle, lambda: found.append(self._run(given)))
        except BaseException:
            pool.handle = None  # torch may count it as in use for ever
            raise
        recording.results = Results(found[0], inputs.given, calls.empty)
        inputs.forget()
        recording.bytes = max(0, calls.reserved(pool.index) - before) + inputs.bytes
        self._recording = recording
        if self._is_closed:  # by another thread meanwhile
            self._release()
            return False
        if not self._replays.admit(recording):
            self._leave(f"takes {recording.bytes} bytes, which leaves no room for others")
            return False
        return True

    def _run(self, args: Sequence[Any]) -> Any:
        """Launch one by one."""
        return self._program.call(self._only, self._only.get, list(args))

    # ---- whether it is right, and faster -------------------------------------------------------------------

    def _compare(self, args: Sequence[Any], result: Any) -> None:
        """Compare a replay with the result of launches one by one, under the pool's lock."""
        recording = self._recording
        assert recording is not None
        if not are_equal(self._replay(recording, args), result):
            self._leave("gives other results than launches one by one")
            return
        self._compared += 1
        self._step = self._both if self._compared < COMPARED else self._timed

    def _both(self, args: list[Any]) -> Any:
        recording = self._enter(args)
        if recording is None:
            return None
        try:
            result = self._run(args)
            try:
                self._compare(args, result)
            except Exception as error:
                self._fail(error)
        finally:
            recording.pool.lock.release()
        args.clear()
        return result

    def _timed(self, args: list[Any]) -> Any:
        recording = self._enter(args)
        if recording is None:
            return None
        race = self._race
        if race is None:
            device = torch.device("cuda", recording.pool.index)
            race = self._race = _Race(self._make_timer(device), self._make_timer(device))
        try:
            if race.is_replays_turn():
                race.timers[1].start()
                try:
                    result = self._replay(recording, args)
                except Exception as error:
                    self._fail(error)
                    return None
                race.timers[1].stop()
            else:
                race.timers[0].start()
                result = self._run(args)
                race.timers[0].stop()
            self._judge(race)
        finally:
            recording.pool.lock.release()
        args.clear()
        return result

    def _judge(self, race: _Race) -> None:
        found = race.verdict(self._replays.margin)
        if found == "open":
            return
        times = race.in_words()
        if found == "won":
            self._replays.tell(True, self.what, times)
            self._step = self._replayed
        else:
            self._leave(f"is no faster: {times}")
        self._race = None
        self._replays.disturb()

    # ---- after -----------------------------------------------------------------------------------------------

    def _replayed(self, args: list[Any]) -> Any:
        recording = self._enter(args)
        if recording is None:
            return None
        try:
            result = self._replay(recording, args)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            recording.pool.lock.release()
        args.clear()
        return result

    def _replay(self, recording: Recording, args: Sequence[Any]) -> Any:
        with below():
            recording.inputs.copy_in(args)
        self._replays.used(recording)
        return recording.replay(args)

    def _enter(self, args: Sequence[Any]) -> Recording | None:
        """The recording for this call, with its pool's lock held; None where the call is launched one by one."""
        recording, calls = self._recording, self._calls
        if recording is None or calls.is_capturing() or not calls.is_left_alone():
            return None
        pool = recording.pool
        if not pool.lock.acquire(blocking=False):
            return None
        try:
            moved = self._moved(recording, args)
            if moved is None:
                self._misses = 0
                return recording
            self._miss(recording, moved)
        except Exception as error:
            self._fail(error)
        pool.lock.release()
        return None

    def _moved(self, recording: Recording, args: Sequence[Any]) -> set[int] | None:
        """As `Inputs.moved`, of all that a recording depends on."""
        calls, pool = self._calls, recording.pool
        if calls.device() != pool.index or calls.stream(pool.index) != pool.stream:
            return set()
        self._replays.tidy(pool)
        if recording is not self._recording or calls.numerics() != recording.numerics:
            return set()
        return recording.inputs.moved(args)

    def _miss(self, recording: Recording, moved: set[int]) -> None:
        self._seen.moving |= moved
        self._misses += 1
        if self._misses < MISSES or recording is not self._recording:
            return
        if self._recordings < MOST_RECORDINGS:
            self._begin_anew()
        else:
            self._leave("is called with other arguments, or on another stream, too often")

    def _begin_anew(self) -> None:
        moving = self._seen.moving
        self._seen = SeenInputs()
        self._seen.moving = moving
        self._misses = self._compared = 0
        self._race = None
        self._left = self._after
        self._step = self._wait
        self._release()

    def _release(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            self._replays.retire(recording)

    def _leave(self, why: str) -> None:
        """Launch one by one from now on."""
        self.close()
        self._replays.tell(False, self.what, f"the graph {why}")

    def _fail(self, error: Exception) -> None:
        if isinstance(error, Unfit):
            self._leave(str(error))
            return
        self.close()
        self._replays.failed(self.what, error)


def _one_by_one(args: list[Any]) -> None:
    return None


class _Only:
    """In place of all plans of a graph: the callables of this one, with nothing counted."""

    native = None

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.count = 0
        self.skipped: list[int] = []

    def get(self, key: tuple[int, ...]) -> _Only:
        return self


class _Race:
    """Both ways in turns, each timed on the device."""

    def __init__(self, one_by_one: Timer, replay: Timer) -> None:
        self.timers = (one_by_one, replay)
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._turns = 0
        self._has_won = False  # a first time, by too little to be sure

    def is_replays_turn(self) -> bool:
        """One by one, replay, replay, one by one: neither always follows the other."""
        self._turns += 1
        return self._turns % 4 in (2, 3)

    def verdict(self, margin: float) -> str:
        """By the rule of all decisions: "won", "lost" or "open"."""
        for timer, seconds in zip(self.timers, self._seconds, strict=True):
            seconds += timer.poll()
        pairs = min(map(len, self._seconds))
        if pairs < ROUNDS:
            return "lost" if self._turns > 4 * MOST_ROUNDS else "open"
        comparison = compare(self._seconds[0][:pairs], self._seconds[1][:pairs])
        if self._has_won:
            return "won" if confirms(comparison, margin) else "lost"
        found = verdict(comparison, margin)
        if found == "open":
            return "lost" if pairs >= MOST_ROUNDS else "open"
        if found == "won" and not is_clear(comparison):
            self._has_won, self._seconds, self._turns = True, ([], []), 0
            return "open"
        return found

    def in_words(self) -> str:
        pairs = min(map(len, self._seconds))
        if not pairs:
            return "no call could be timed"
        found = compare(self._seconds[0][:pairs], self._seconds[1][:pairs])
        return f"{found.median_us:.1f} us as a CUDA graph, {found.eager_us:.1f} us launched one by one"


def _index_of(args: Sequence[Any], index_of: Callable[[torch.Tensor], int]) -> int:
    found = {index_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
    if len(found) != 1 or found == {-1}:
        raise Unfit("takes tensors that are not on one GPU")
    return found.pop()


def are_equal(found: Any, expected: Any) -> bool:
    """Whether results are the same, to the bit."""
    if type(found) is not type(expected) or len(found) != len(expected):
        return False
    return all(_is_equal(one, other) for one, other in zip(found, expected, strict=True))


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype is not other.dtype:
        return False
    return bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor if tensor.dtype is torch.bool else tensor.view(kinds[tensor.dtype.itemsize])
