"""Inputs and results of replayed graphs: whatever a script does with them, they are those of launches one by one."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.runtime.replays.bench import (
    UNTIL_KEPT,
    inputs,
    net,
    one_by_one,
    replayed,
    same,
    settle,
    weights,
)

# ---- inputs ----------------------------------------------------------------------------------------------


def test_an_input_freed_and_another_at_its_address(bench, settled):
    router, w, b, plain = settled
    for seed in range(20):
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit
        del x
        same(found, want)


def test_a_parameter_whose_memory_is_exchanged(bench, settled):
    """As ``.data =``, ``set_`` and a step that makes new parameters do it."""
    router, w, b, plain = settled
    held = []
    for seed in range(3 * UNTIL_KEPT):
        held.append(w.data)  # so that the old address stays taken
        if seed % 2:
            w.data = w.data * 0.99
        else:
            with torch.no_grad():
                w.set_((w.data * 0.99).untyped_storage(), 0, (16, 16), (16, 1))
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert bench.player.recordings == 2  # from then on it is copied in
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_parameter_written_to_in_place_is_read_where_it_is(bench, settled):
    router, w, b, plain = settled
    for seed in range(8):
        with torch.no_grad():
            torch._foreach_add_([w, b], 0.125)
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit
        same(found, want)
    assert bench.player.recordings == 1


def test_another_parameter_object_of_the_same_kind(bench, settled):
    """A second module on the same graph: all its addresses differ."""
    router, w, b, plain = settled
    other, its = torch.nn.Parameter(w.detach() + 1), torch.nn.Parameter(b.detach() - 1)
    for seed in range(2 * UNTIL_KEPT):
        mine = (w, b) if seed % 3 else (other, its)
        x = inputs(seed)
        same(router([x, *mine]), plain(x, *mine))


def test_inputs_that_are_views_and_share_memory(bench):
    w, b = weights()
    shapes = inputs(0), w, b
    router, plain = bench.router(net, *shapes), one_by_one(bench, net, *shapes)
    big = inputs(0, 64)

    def make(seed):
        with torch.no_grad():
            big.add_(0.5)
        begin = 8 * (seed % 7)
        return big[begin : begin + 8], big[begin : begin + 16].T.contiguous() if seed % 2 else w, b

    settle(router, make, plain, 2 * UNTIL_KEPT)

    def both(x, y):
        return ((x + y).relu() * 2.0) @ y.T, (x - y).exp().sum(-1)

    router, plain = bench.router(both, shapes[0], shapes[0]), one_by_one(bench, both, shapes[0], shapes[0])
    settle(router, lambda seed: (big[8:16], big[seed % 8 : seed % 8 + 8]), plain)
    before = bench.player.replays
    settle(router, lambda seed: (big[8:16], big[seed % 8 : seed % 8 + 8]), plain, 16)
    assert bench.player.replays == before + 16


def test_an_address_with_another_remainder_is_launched_one_by_one(bench, settled):
    """By which libraries choose their kernels."""
    router, w, b, plain = settled
    room = torch.randn(200)
    shifted = room[1:129].view(8, 16)
    assert shifted.data_ptr() % 64
    want = plain(shifted, w, b)
    hit, found = replayed(bench, lambda: router([shifted, w, b]))
    assert not hit
    same(found, want)
    assert replayed(bench, lambda: router([inputs(3), w, b]))[0]


def test_an_input_written_to_after_the_call(bench, settled):
    router, w, b, plain = settled
    x = inputs(1)
    want = plain(x, w, b)
    found = router([x, w, b])
    x.zero_()
    same(found, want)
    same(router([x, w, b]), plain(x, w, b))


def test_sizes_that_no_node_uses_are_looked_at(bench):
    """A plan's key holds the sizes of its nodes; a graph may have others."""
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    recording = bench.replays.kept[0]
    assert recording.inputs.moved([inputs(1), w, b]) is None
    assert recording.inputs.moved([inputs(1, 4), w, b]) == set()
    assert recording.inputs.moved([inputs(1, 16).T[:8], w, b]) == set()
    assert recording.inputs.moved([inputs(1).double(), w, b]) == set()


# ---- results ---------------------------------------------------------------------------------------------


def test_results_are_the_callers_own(bench, settled):
    router, w, b, plain = settled
    kept = []
    for seed in range(12):
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit and all(t._version == 0 and not t._is_view() and t.is_leaf for t in found)
        kept.append((found, want))
    addresses = {t.data_ptr() for found, _ in kept for t in found}
    assert len(addresses) == 24
    for found, want in kept:
        same(found, want)
    kept[0][0][0].zero_()  # written to
    x = inputs(50)
    same(router([x, w, b]), plain(x, w, b))


def test_results_that_are_inputs_or_views_of_them_or_of_each_other(bench):
    def function(x, w, b):
        hidden = (x @ w + b).relu() * 2.0
        other = (hidden @ w).exp()
        empty = x.narrow(0, 0, 0).exp()
        parts = w.t(), x.narrow(0, 2, 2), hidden, hidden.t(), hidden.narrow(0, 1, 2)
        return other, x, w, *parts, other, empty, (x * 2).t()

    w, b = weights()
    router, plain = bench.router(function, inputs(0), w, b), one_by_one(bench, function, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    x = inputs(3)
    hit, found = replayed(bench, lambda: router([x, w, b]))
    assert hit, (bench.refusals, bench.failures)
    same(found, plain(x, w, b))
    other, own, weight, turned, part, hidden, hidden_t, rows, again, nothing, _ = found
    assert own is x and weight is w and other is again and nothing.shape == (0, 16)
    assert turned.data_ptr() == w.data_ptr() and part.data_ptr() == x[2:4].data_ptr()
    assert hidden.untyped_storage().data_ptr() == hidden_t.untyped_storage().data_ptr()
    version = hidden_t._version
    hidden.add_(1)
    assert torch.equal(hidden_t, hidden.t()) and torch.equal(rows, hidden[1:3]) and hidden_t._version > version
    with torch.no_grad():
        before = turned._version
        w.add_(0)
    assert turned._version > before


def test_inference_tensors_and_calls_in_other_modes(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    frozen = w.detach(), b.detach()
    for seed in range(2 * UNTIL_KEPT):
        with modes[seed % 3]():
            x = inputs(seed)
            found = router([x, *frozen])
            same(found, plain(x, *frozen))
            assert all(t.is_inference() == (seed % 3 == 0) for t in found)
    assert bench.codes == ["replayed"]


def test_a_part_of_a_buffer_at_its_address(bench):
    """As where a graph takes any size, and no node of it has one."""
    w, b = weights()
    x = inputs(0)
    router, plain = bench.router(net, x, w, b), one_by_one(bench, net, x, w, b)
    settle(router, lambda seed: (x.mul_(0.9), w, b), plain)
    (recording,) = bench.replays.kept
    assert recording.inputs.moved([x, w, b]) is None
    assert recording.inputs.moved([x[:4], w, b]) == set() and x[:4].data_ptr() == x.data_ptr()
    assert recording.inputs.moved([x, w.data, b]) == set()


def test_what_we_ask_torch_for_may_be_gone(bench, settled, monkeypatch):
    """In another version of torch: one line, and everything is launched."""
    router, w, b, plain = settled

    def gone():
        raise AttributeError("numerics")

    object.__setattr__(bench.replays.kept[0].owner, "_calls", replace(bench.player.calls(), numerics=gone))
    for seed in range(4):
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert len(bench.failures) == 1
    bench.replays.calls = replace(bench.player.calls(), is_left_alone=gone)
    router, plain = bench.router(net, inputs(0, 4), w, b), one_by_one(bench, net, inputs(0, 4), w, b)
    settle(router, lambda seed: (inputs(seed, 4), w, b), plain, 20)
    assert len(bench.failures) == 2 and bench.player.recordings == 1
