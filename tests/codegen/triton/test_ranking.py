"""The guess of what a configuration costs: there is one for every kernel, and it sees what is plain to see."""

from __future__ import annotations

import math
import random

import pytest

from autofuse.codegen.knobs import Knob, default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.ranking import Ranking, Rates, rates_of
from autofuse.codegen.triton.resources import MULTIPROCESSORS
from autofuse.ir.records import Config, make_config
from tests.cases import CASES, ON_GPUS

H100 = rates_of("cuda:90", 132)
assert H100 is not None


def costs(name: str, sizes: tuple[int, ...], changes: dict[str, tuple[object, ...]]) -> list[float]:
    """What a case is expected to cost by the default configuration, with the values of one knob in turn."""
    assert H100 is not None
    form = CASES[name].form()
    kernel, values = lower(form), dict(zip(form.symbols, sizes, strict=True))
    default = dict(default_config(triton_knobs(kernel, values, values)))
    ranking = Ranking(kernel, values, H100)
    ((knob, choices),) = changes.items()
    assert knob in default
    return [ranking(make_config({**default, knob: choice})) for choice in choices]  # type: ignore[dict-item]


def any_config(knobs: tuple[Knob, ...], chance: random.Random) -> Config:
    return make_config({knob.name: chance.choice(knob.choices) for knob in knobs})


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_every_kernel_has_a_cost_in_every_configuration(target: str) -> None:
    rates, chance = rates_of(target, 100), random.Random(target)
    assert rates is not None
    for name in ON_GPUS:
        form = CASES[name].form()
        kernel = lower(form)
        for size in (1, 7, 300, 20_000):
            values = dict.fromkeys(form.symbols, size)
            knobs, ranking = triton_knobs(kernel, values, values), Ranking(kernel, values, rates)
            for config in (default_config(knobs), *(any_config(knobs, chance) for _ in range(3))):
                cost = ranking(config)
                assert math.isfinite(cost) and cost > rates.launch_seconds, (name, size, config)


def test_only_devices_that_are_in_the_tables_have_rates() -> None:
    assert rates_of("cuda:75", 68) is None and rates_of("cuda:90", 0) is None
    assert {target for target in MULTIPROCESSORS if rates_of(target, 1) is None} == set()
    assert isinstance(rates_of("hip:gfx942", 304), Rates)


def test_fewer_passes_over_long_rows_cost_less() -> None:
    one, several = costs("softmax", (1, 256, 1 << 18), {"passes": ("one", "several")})
    assert one < several


def test_a_sum_of_everything_is_not_left_to_one_program() -> None:
    alone, many = costs("sum_all", (64, 512, 512), {"PROGRAMS": (1, 256)})
    assert many < alone / 10
    alone, many = costs("sum_all", (4, 4, 4), {"PROGRAMS": (1, 256)})
    assert alone <= many


def test_narrow_tiles_of_a_transposed_tensor_ask_for_more() -> None:
    narrow, usual = costs("clone_transposed", (4096, 4096), {"BLOCK_ROWS": (1, 64)})
    assert usual < narrow


def test_what_would_spill_comes_last() -> None:
    few, usual = costs("add_layer_norm", (16, 512, 4096), {"num_warps": (1, 16)})
    assert usual < few / 5


def test_what_the_model_does_not_see_costs_the_same() -> None:
    assert len(set(costs("add_layer_norm", (16, 512, 768), {"eviction": ("none", "first")}))) == 1


def test_several_nests_in_one_launch_have_a_cost_that_grows_with_them() -> None:
    small, *_ = costs("moves_of_parts", (64, 100, 31, 3, 50), {"num_warps": (4,)})
    large, *_ = costs("moves_of_parts", (4096, 1000, 310, 30, 50_000), {"num_warps": (4,)})
    assert large > 2 * small
