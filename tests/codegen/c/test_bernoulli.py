"""Masks from our generator are aten's, bit for bit, and leave the generator where aten would."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from autofuse.codegen.c.bernoulli import Bernoulli, agrees_with_aten, make_bernoulli
from autofuse.codegen.generator import FusionKernelGenerator


@pytest.fixture
def fill(generator: FusionKernelGenerator) -> Bernoulli:
    found = make_bernoulli(generator.toolchain)
    if found is None:
        pytest.skip("this machine's aten draws another stream")
    return found


@pytest.mark.parametrize("p", [0.9, 0.5, 1e-3])
@pytest.mark.parametrize("shape", [(7,), (100,), (256,), (33, 67), (4, 128, 256)])
def test_masks_and_state(fill: Bernoulli, shape: tuple[int, ...], p: float) -> None:
    ours, theirs = torch.empty(shape, dtype=torch.bool), torch.empty(shape, dtype=torch.bool)
    torch.manual_seed(11)
    fill(ours, p)
    after = torch.rand(3)
    torch.manual_seed(11)
    theirs.bernoulli_(p)
    assert torch.equal(ours, theirs)
    assert torch.equal(after, torch.rand(3))


def test_threads_do_not_draw_each_others_numbers(fill: Bernoulli) -> None:
    """Of two that draw masks, and of one that draws in eager beside them, no numbers come twice."""
    masks: list[bytes] = []
    numbers: list[tuple[float, ...]] = []
    is_over = threading.Event()

    def draw_masks() -> None:
        for _ in range(300):
            mask = torch.empty(20_000, dtype=torch.bool)
            fill(mask, 0.5)
            masks.append(mask.numpy().tobytes())

    def draw_in_eager() -> None:
        while not is_over.is_set():
            numbers.append(tuple(torch.rand(8, dtype=torch.float64).tolist()))

    beside, *drawing = (threading.Thread(target=f) for f in (draw_in_eager, draw_masks, draw_masks))
    for thread in (beside, *drawing):
        thread.start()
    for thread in drawing:
        thread.join()
    is_over.set()
    beside.join()
    assert len(set(masks)) == 600 and len(set(numbers)) == len(numbers) > 10


def test_an_idle_thread_beside_it_leaves_masks_to_us(fill: Bernoulli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers, notebooks and pools have threads that draw nothing."""
    is_over = threading.Event()
    beside = threading.Thread(target=is_over.wait, daemon=True)
    beside.start()
    ours, atens = torch.empty(5000, dtype=torch.bool), torch.empty(5000, dtype=torch.bool)
    torch.manual_seed(3)
    atens.bernoulli_(0.3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda *_, **__: pytest.fail("aten was called"))
    fill(ours, 0.3)
    is_over.set()
    beside.join()
    assert torch.equal(ours, atens) and torch.equal(torch.rand(3), expected)


def test_once_a_thread_has_drawn_aten_fills_all_masks(fill: Bernoulli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another mask had been begun by then."""
    real, calls, beside = torch.Generator(), [], []
    by_aten: list[int] = []
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda mask, *_, **__: by_aten.append(mask.numel()))

    class Source:
        def get_state(self) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 1:
                beside.append(
                    threading.Thread(target=fill, args=(torch.empty(600, dtype=torch.bool), 0.5, self), daemon=True)
                )
                beside[0].start()
                time.sleep(0.1)  # it waits for this mask
            if len(calls) == 2:
                torch.empty(1).random_(generator=real)
            return real.get_state()

        def set_state(self, state: torch.Tensor) -> None:
            real.set_state(state)

    is_over = threading.Event()
    idle = threading.Thread(target=is_over.wait, daemon=True)
    idle.start()
    fill(torch.empty(500, dtype=torch.bool), 0.5, Source())  # type: ignore[arg-type]
    beside[0].join(10)
    fill(torch.empty(700, dtype=torch.bool), 0.5, real)
    is_over.set()
    assert 500 in by_aten and 700 in by_aten


def test_dropout_draws_the_same(fill: Bernoulli) -> None:
    torch.manual_seed(5)
    expected = torch.nn.functional.dropout(torch.ones(64, 100), 0.25) != 0
    torch.manual_seed(5)
    mask = torch.empty(64, 100, dtype=torch.bool)
    fill(mask, 0.75)
    assert torch.equal(mask, expected)


def test_cached_normal_samples_stay(fill: Bernoulli) -> None:
    def draw(own: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(2)
        torch.randn(1)  # the second sample of the pair waits in the state
        mask = torch.empty(1000, dtype=torch.bool)
        if own:
            fill(mask, 0.5)
        else:
            mask.bernoulli_(0.5)
        return mask, torch.randn(5)

    for a, b in zip(draw(True), draw(False), strict=True):
        assert torch.equal(a, b)


def test_masks_that_are_not_dense_go_through_aten(fill: Bernoulli) -> None:
    torch.manual_seed(3)
    a = torch.empty(64, 64, dtype=torch.bool).t()
    fill(a, 0.5)
    torch.manual_seed(3)
    assert torch.equal(a, torch.empty(64, 64, dtype=torch.bool).t().bernoulli_(0.5))


def test_a_wrong_generator_is_refused() -> None:
    def constant(mask: torch.Tensor, p: float, generator: torch.Generator) -> None:
        mask.fill_(True)

    assert not agrees_with_aten(constant)
