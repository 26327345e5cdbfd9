"""State dicts: uncast, shared with nobody, from and into plain AdamW, and foreign ones refused."""

import copy

import pytest
import torch

from nmkernels.optim import AnnealedAdamW, MaskedAdamW
from nmkernels.pattern import CheckpointError, OptionError
from python_tests.for_each import for_each
from python_tests.recipes.training import through_a_file


def layer(dtype=torch.float32, features=8):
    torch.manual_seed(0)
    return torch.nn.Linear(16, features, dtype=dtype)


def train(model, optimizer, steps, first=0):
    for t in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(t)).to(model.weight.dtype)
        model(x).float().square().sum().backward()
        optimizer.step()


def same(a, b):
    return all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in b)


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
STATES = {"": {}, "nearest": {"states": "bfloat16"}, "stochastic": {"states": "bfloat16", "rounding": "stochastic"}}


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@for_each("amsgrad", [False, True])
@for_each("fused", [None, True])
@for_each("rounding", STATES)
def test_resume_is_bit_for_bit(dtype, amsgrad, fused, rounding):
    """Moments keep their dtype; a resumed run draws the same random numbers, and one with another seed others."""
    a, b, c = (layer(dtype) for _ in range(3))
    options = {"lr": 0.01, "amsgrad": amsgrad, "fused": fused, **STATES[rounding]}
    first, second = (MaskedAdamW(m.parameters(), seed=3, **options) for m in (a, b))
    train(a, first, 4)
    weights, state = through_a_file(a.state_dict(), first.state_dict())
    b.load_state_dict(weights)
    second.load_state_dict(state)
    wanted = torch.float64 if dtype == torch.float64 else torch.bfloat16 if rounding else torch.float32
    assert {s[name].dtype for s in first.state.values() for name in MOMENTS[: 2 + amsgrad]} == {wanted}
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert same(second.state[q], first.state[p]) and len(first.state[p]) == 3 + amsgrad
    train(a, first, 4, first=4)
    train(b, second, 4, first=4)
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias) and all(map(same, first.state.values(), second.state.values()))
    train(c, MaskedAdamW(c.parameters(), seed=4, **options), 8)
    assert torch.equal(c.weight, a.weight) == (rounding != "stochastic" or dtype == torch.float64)


@for_each("fused", [False, True])
def test_from_and_into_plain_adamw(fused):
    """The run goes on in the other optimizer as if nothing had happened."""
    for first, second in ((torch.optim.AdamW, MaskedAdamW), (MaskedAdamW, torch.optim.AdamW)):
        a, b = layer(), layer()
        before, after = first(a.parameters(), lr=0.02, fused=fused), second(b.parameters(), lr=0.5, fused=fused)
        train(a, before, 5)
        b.load_state_dict(a.state_dict())
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.param_groups[0]["lr"] == 0.02
        assert same(after.state[b.weight], before.state[a.weight])
        train(a, before, 5, first=5)
        train(b, after, 5, first=5)
        assert torch.allclose(a.weight, b.weight, rtol=1e-6, atol=1e-7)


def test_moments_saved_in_bf16_are_taken_as_they_are():
    a, b = layer(torch.bfloat16), layer(torch.bfloat16)
    plain, ours = torch.optim.AdamW(a.parameters()), MaskedAdamW(b.parameters())
    train(a, plain, 3)
    ours.load_state_dict(plain.state_dict())
    train(b, ours, 1)
    assert ours.state[b.weight]["exp_avg"].dtype == torch.float32
    assert int(ours.state[b.weight]["step"]) == 4 and int(plain.state[a.weight]["step"]) == 3, "two optimizers count apart"


def test_a_step_saved_as_a_number_and_parameters_without_a_state():
    """Old checkpoints have such steps; torch makes of them tensors of the default dtype. The bias has never had a gradient."""
    a, b = layer(), layer()
    a.bias.requires_grad_(False)
    first, second = MaskedAdamW(a.parameters()), MaskedAdamW(b.parameters())
    train(a, first, 2)
    state = copy.deepcopy(first.state_dict())
    for s in state["state"].values():
        s["step"] = float(s["step"])
    torch.set_default_dtype(torch.float64)
    try:
        second.load_state_dict(state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert second.state[b.weight]["step"].dtype == torch.float32
    train(b, second, 1)
    assert (int(second.state[b.weight]["step"]), int(second.state[b.bias]["step"])) == (3, 1)


def test_foreign_states_are_refused_and_change_nothing():
    model = layer()
    optimizer = MaskedAdamW(model.parameters(), lr=0.123)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    sgd = torch.optim.SGD(layer().parameters(), lr=0.1, momentum=0.9)
    wide = layer(features=6)
    other = MaskedAdamW(wide.parameters())
    train(wide, other, 1)
    rms = copy.deepcopy(before)
    for s in rms["state"].values():
        del s["exp_avg"]
    cases = ((sgd.state_dict(), "no betas and eps"), (other.state_dict(), r"exp_avg has shape \(6, 16\)"), (rms, "has no exp_avg"))
    for state, said in cases:
        with pytest.raises(CheckpointError, match=said):
            optimizer.load_state_dict(state)
    short = copy.deepcopy(before)
    short["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(short)
    assert optimizer.param_groups[0]["lr"] == 0.123
    for i, s in before["state"].items():
        assert same(optimizer.state_dict()["state"][i], s)


def test_states_in_bf16_from_and_into_float32():
    a, b, c, d = (layer() for _ in range(4))
    wide, narrow = MaskedAdamW(a.parameters(), lr=0.02), MaskedAdamW(b.parameters(), states="bfloat16")
    train(a, wide, 5)
    b.load_state_dict(a.state_dict())
    narrow.load_state_dict(wide.state_dict())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        for name in MOMENTS[:2]:
            assert torch.equal(narrow.state[q][name], wide.state[p][name].bfloat16())
    train(b, narrow, 2, first=5)
    for model, optimizer in ((c, torch.optim.AdamW(c.parameters())), (d, MaskedAdamW(d.parameters()))):
        model.load_state_dict(b.state_dict())
        optimizer.load_state_dict(copy.deepcopy(narrow.state_dict()))
        for q, p in zip(b.parameters(), model.parameters(), strict=True):
            for name in MOMENTS[:2]:
                assert torch.equal(optimizer.state[p][name], narrow.state[q][name].float())
        train(model, optimizer, 1, first=7)
    assert torch.allclose(c.weight, d.weight, rtol=1e-6, atol=1e-7)


def test_states_in_bf16_stay_close_to_float32_where_their_rounding_is_random():
    """To nearest v never falls with beta2 = 0.999: a change of a thousandth is less than half a unit. At random it follows on average."""
    grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(t)) * (1.0 if t < 20 else 0.01) for t in range(220)]
    moments = {}
    for states, rounding in (("float32", "nearest"), ("bfloat16", "nearest"), ("bfloat16", "stochastic")):
        w = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = MaskedAdamW([w], lr=1e-3, states=states, rounding=rounding)
        for g in grads:
            w.grad = g
            optimizer.step()
        moments[states, rounding] = optimizer.state[w]["exp_avg_sq"].float().mean().item()
    exact, nearest, stochastic = moments.values()
    assert abs(stochastic / exact - 1) < 0.005 and abs(nearest / exact - 1) > 0.1


def test_the_options_of_states_are_copied_and_checked():
    model = layer()
    optimizer = MaskedAdamW(model.parameters(), states="bfloat16", rounding="stochastic", seed=9)
    train(model, optimizer, 1)
    again = copy.deepcopy(optimizer)
    assert (again.states, again.rounding, again.seed) == ("bfloat16", "stochastic", 9)
    assert MaskedAdamW(model.parameters()).states == "float32"
    for options, said in (
        ({"states": "bf16"}, "states='bf16'.*'float32' or 'bfloat16'"),
        ({"rounding": "up"}, "rounding='up'.*'nearest' or 'stochastic'"),
        ({"rounding": "stochastic"}, "for states='bfloat16'"),
        ({"seed": 2**32}, r"below 2\*\*32"),
        ({"seed": -1}, "seed=-1"),
    ):
        with pytest.raises(OptionError, match=said):
            MaskedAdamW(model.parameters(), **options)
    with pytest.raises(OptionError, match="AnnealedAdamW.*nearest"):
        AnnealedAdamW(model.parameters(), states="bfloat16", rounding="stochastic")
