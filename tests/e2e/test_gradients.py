"""Gradients of every parameter through fused kernels, against float64, relative to eager's own error.

The criterion of single kernels (twice eager's error plus four units in the last place) holds for a whole model, too:
dropout is on, and its masks are the same in float32 and float64, since the generator draws the same bits for both.
"""

import copy

import pytest
import torch
from small_lm import Model

import autofuse
from autofuse import sessions


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.setenv("AUTOFUSE_TUNE", "wait")
    monkeypatch.setenv("AUTOFUSE_TUNER_TRIALS", "2")
    monkeypatch.setenv("AUTOFUSE_TUNER_ROUNDS", "5")
    monkeypatch.setenv("AUTOFUSE_TUNER_BUDGET_SECONDS", "30")
    monkeypatch.setenv("AUTOFUSE_TUNER_IDLE_EXIT_SECONDS", "5")
    monkeypatch.setenv("AUTOFUSE_CAPTURE_HELD_OUT_SHARE", "0")
    torch._dynamo.reset()
    found = sessions.current_session()
    yield found
    found.finish(0)


def gradients(model, tokens, seed):
    """Loss and gradients of one step with dropout on."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(tokens, tokens.roll(1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradients_of_all_parameters_after_tuning(session):
    torch.manual_seed(0)
    eager = Model()
    exact = copy.deepcopy(eager).double()
    routed = autofuse.optimize(copy.deepcopy(eager))
    for length in (24, 40, 24, 40, 24, 40):  # capture, capture with a symbol, tune
        gradients(routed, torch.randint(0, 64, (8, length)), 0)
    assert session.totals().fused_calls > 0
    before = session.totals()
    for seed, length in enumerate((40, 33, 38)):
        tokens = torch.randint(0, 64, (8, length))
        loss, found = gradients(routed, tokens, seed)
        eager_loss, own = gradients(eager, tokens, seed)
        exact_loss, reference = gradients(exact, tokens, seed)
        ulp = torch.finfo(torch.float32).eps
        assert abs(loss - exact_loss) <= 2 * abs(eager_loss - exact_loss) + 4 * ulp * exact_loss
        for name, gradient in reference.items():
            error = (found[name].double() - gradient).square().mean().sqrt()
            allowed = (own[name].double() - gradient).square().mean().sqrt()
            scale = gradient.square().mean().sqrt()
            assert error <= 2 * allowed + 4 * ulp * scale, (name, length)
    after = session.totals()
    assert after.fused_calls > before.fused_calls
