"""What is copied into a recording and out of it, for tensors of any dtype that lie in memory in any way."""

import pytest
import torch

from autofuse.runtime.replays import inputs as replay_inputs
from autofuse.runtime.replays.inputs import Inputs, Unfit
from autofuse.runtime.replays.plan_replay import are_equal
from autofuse.runtime.replays.results import Results
from autofuse.wrapper.node_call import empty_like_spec

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool),
)


def base_of(dtype):
    base = torch.randint(-5, 5, (6, 10)).to(dtype)
    if dtype.is_floating_point:
        base[0, 0], base[0, 1] = float("nan"), -0.0
    return base


def views_of(base):
    yield from (base, base.t(), base[:, 2:7], base[3], base[2, 3], base[:0], base[::2, ::3], base[1:], base[:1, :1])
    yield base.repeat(2, 3).reshape(2, 3, 6, 10).contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def alignment_of_a_cpu(monkeypatch):
    monkeypatch.setattr(replay_inputs, "ALIGNMENT", 64)


def taken(*args, moving=(0,)):
    return Inputs(args, set(moving), empty_like_spec, lambda tensor: 0)


def given_out(*found):
    return Results(found, [], empty_like_spec).hand_out([])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_the_same_to_the_bit_and_lie_alike(dtype):
    for view in views_of(base_of(dtype)):
        inputs = taken(view, 3)
        assert inputs.moved([view, 3]) is None and inputs.moved([view, 4]) == set()
        inputs.copy_in([view, 3])
        copy = inputs.given[0]
        assert (are_equal([copy], [view]) and copy.data_ptr() != view.data_ptr()) or not view.numel()
        assert not view.numel() or copy.data_ptr() % 64 == view.data_ptr() % 64
        result, again, nothing, number = given_out(view, view.detach(), None, 7)
        assert are_equal([result, again], [view, view]) and (nothing, number) == (None, 7)
        if view.numel():
            assert result.storage_offset() == view.storage_offset() and result.data_ptr() != view.data_ptr()
            assert result.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
        (alone,) = given_out(view)
        assert are_equal([alone], [view]) and alone._version == 0 and not alone._is_view()


def test_overlaps_are_refused_as_arguments_and_kept_in_results():
    base = base_of(torch.float32)
    for view in (base[:1].expand(4, 10), torch.as_strided(base, (3, 3), (1, 1))):
        with pytest.raises(Unfit, match="overlaps itself"):
            taken(view)
        assert taken(view, moving=()).moved([view]) is None  # where it stays
        assert are_equal(given_out(view), (view,))


def test_what_has_no_copy_is_refused():
    class Marked(torch.Tensor):
        pass

    with pytest.raises(Unfit, match="Marked"):
        taken(torch.ones(3).as_subclass(Marked))
    base = base_of(torch.float32)
    with pytest.raises(Unfit, match="several dtypes"):
        given_out(base.view(torch.uint8), base)


def test_signs_of_zero_and_nan_are_bits():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert not are_equal((zero,), (-zero,)) and are_equal((nan,), (nan.clone(),))
    assert not are_equal((zero,), [zero]) and not are_equal((zero,), (zero, zero)) and are_equal((None, 3), (None, 3))
