"""Where Dynamo takes a forward for something else than Python does, our traces do what Python does."""

from __future__ import annotations

import collections
import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autofuse.capture import dynamo
from fuzz.fused import Kernels, fused

T = torch.Tensor
Forward = Callable[[T], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def cached_draw() -> Forward:
    @functools.cache
    def mask(n: int) -> T:
        return torch.rand(n)

    return lambda x: x * mask(x.shape[-1])


def cached_state() -> Forward:
    @functools.cache
    def state() -> dict[str, int]:
        return {"calls": 0}

    def forward(x: T) -> T:
        state()["calls"] += 1
        return x * state()["calls"]

    return forward


def generator() -> Forward:
    draws = random.Random(3)
    return lambda x: x * draws.random() + draws.randint(0, 9)


def turned_in_place(name: str, *args: int) -> Forward:
    def forward(x: T) -> tuple[T, list[int], int]:
        y = x * 2
        getattr(y, name)(*args)
        return y.sum() * y.shape[0] + y.stride(0), list(y.shape), y.dim()

    return forward


def class_counter() -> Forward:
    class Counter:
        calls = 0

    one = Counter()

    def forward(x: T) -> T:
        Counter.calls += 1
        return x * one.calls

    return forward


def bounded_past() -> Forward:
    past: collections.deque[float] = collections.deque([1.0], maxlen=2)

    def forward(x: T) -> T:
        past.appendleft(past[0] + 1.0)
        return x * sum(past) * len(past)

    return forward


def function_counter() -> Forward:
    def step(x: T) -> T:
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * step.calls  # type: ignore[attr-defined]

    return step


FORWARDS: dict[str, Callable[[], Forward]] = {
    "a cached draw": cached_draw,
    "a cached dict": cached_state,
    "a generator": generator,
    "t_": lambda: turned_in_place("t_"),
    "unsqueeze_": lambda: turned_in_place("unsqueeze_", 0),
    "transpose_": lambda: turned_in_place("transpose_", 0, 1),
    "squeeze_": lambda: turned_in_place("squeeze_"),
    "as_strided_": lambda: turned_in_place("as_strided_", (2,), (1,)),  # type: ignore[arg-type]
    "a class that counts": class_counter,
    "a deque": bounded_past,
    "a function that counts": function_counter,
}


def results(make: Callable[[], Forward], is_traced: bool) -> list[Any]:
    torch.manual_seed(1)
    forward = make()
    if not is_traced:
        return [forward(torch.ones(1, 3)) for _ in range(4)]
    call = torch.compile(forward, backend="eager")
    with dynamo.capture_settings(8):
        return [call(torch.ones(1, 3)) for _ in range(4)]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_trace_of_ours_does_what_python_does(name: str) -> None:
    expected = results(FORWARDS[name], is_traced=False)
    for found, one in zip(results(FORWARDS[name], is_traced=True), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=0)


def test_inference_mode_makes_inference_tensors() -> None:
    def forward(x: T) -> tuple[T, T]:
        with torch.inference_mode():
            y = x * 2
        with torch.inference_mode(False):
            z = x * 3
        return y, z

    call = torch.compile(forward, backend="aot_eager")
    with dynamo.capture_settings(8):
        for _ in range(2):
            assert [t.is_inference() for t in call(torch.ones(2))] == [True, False]


VARIABLE = "AUTOFUSE_TEST_OF_AN_ENVIRONMENT"
READS: dict[str, Forward] = {
    "getenv": lambda x: x * float(os.getenv(VARIABLE, "1")),
    "get": lambda x: x * float(os.environ.get(VARIABLE, "1")),
    "in": lambda x: x * float(VARIABLE in os.environ),
}


@pytest.mark.parametrize("name", READS)
def test_the_environment_is_read_at_each_call(name: str) -> None:
    forward = READS[name]
    call = torch.compile(forward, backend="aot_eager")
    try:
        with dynamo.capture_settings(8):
            for number in (None, None, "7", "8"):
                if number:
                    os.environ[VARIABLE] = number
                assert torch.equal(call(torch.ones(2)), forward(torch.ones(2)))
    finally:
        os.environ.pop(VARIABLE, None)


def test_a_seed_is_drawn_at_each_call() -> None:
    call = torch.compile(lambda x: x.double() * torch.seed(), backend="aot_eager")
    with dynamo.capture_settings(8):
        assert not torch.equal(call(torch.ones(2)), call(torch.ones(2)))


# What is asked, what sets it, and two values; the first is the one outside of the forward.
SETTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32, torch.float64),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False, True),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "medium"),
    "attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True, False),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, False, True),
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, 1, 2),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled, True, False),
}


@pytest.mark.parametrize("name", SETTERS)
def test_a_state_of_torch_is_set_at_each_call(name: str) -> None:
    ask, put, outside, inside = SETTERS[name]
    before = ask()

    def forward(x: T) -> tuple[T, T]:
        y = x * 2
        put(inside)
        return y, x + torch.full((2,), 1.5)

    def shown(call: Forward) -> list[Any]:
        found = []
        for _ in range(3):
            put(outside)
            y, z = call(torch.ones(2, dtype=torch.float32))
            found.append((ask(), y.dtype, z.dtype))
            put(outside)
        return found

    try:
        expected = shown(forward)
        call = torch.compile(forward, backend="aot_eager")
        with dynamo.capture_settings(8):
            assert shown(call) == expected
        assert expected[0][0] == inside
    finally:
        put(before)


def test_the_scripts_own_traces_are_dynamos() -> None:
    draws = random.Random(3)
    call = torch.compile(lambda x: x * draws.random(), backend="eager", fullgraph=True)
    assert torch.equal(call(torch.ones(2)), call(torch.ones(2))), "it is the script's to know"


def test_an_unchanging_result_of_a_cache_stays_in_the_graph() -> None:
    @functools.cache
    def scale(n: int) -> float:
        return n**-0.5

    call = torch.compile(lambda x: x * scale(x.shape[-1]), backend="eager", fullgraph=True)
    with dynamo.capture_settings(8):
        assert torch.equal(call(torch.ones(4)), torch.full((4,), 0.5))


CHECKED = """
import torch
from autofuse.capture import dynamo
with dynamo.capture_settings(8):
    torch.compile(lambda x: x + 1.0, backend="eager")(torch.ones(2))
try:
    torch.distributions.Normal(0.0, -1.0)
except ValueError:
    print("checked")
torch.compile(lambda x: x + 2.0, backend="eager")(torch.ones(2))
torch.distributions.Normal(0.0, -1.0)
print("not since a trace of the script's own")
"""


def test_distributions_go_on_checking() -> None:
    found = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["checked", "not since a trace of the script's own"]


def test_targets_behind_the_end_of_a_list_do_not_count() -> None:
    scores, targets = torch.randn(3, 4), torch.tensor([[1, -1, 2, 0], [-1, 3, 3, 3], [0, 1, 2, 3]])
    call = fused(F.multilabel_margin_loss, Kernels())
    assert torch.equal(call(scores, targets), F.multilabel_margin_loss(scores, targets))
