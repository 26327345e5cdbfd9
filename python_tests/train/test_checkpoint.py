"""A recipe's part of a state dict: one text, and masks stored with the moments; and that asking for one changes nothing."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import CheckpointError
from nmkernels.recipes import ASP, SRSTE, STEP
from nmkernels.train.checkpoint import restored, written
from python_tests.for_each import for_each
from python_tests.recipes.loop import distance, loss_of, mlp, snapshot
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA, DATA32, F32, metrics_of, same, start, step, train


@for_each("shape", [(3, 5), (1, 8), (0, 4), (7,)])
def test_values_come_back_from_text(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    third = torch.tensor([1 / 3, float("inf")])
    state = {
        "mask": mask,
        "t": torch.tensor(2.0, dtype=torch.float64),
        "big": torch.tensor([2**62 + 1, -1]),
        "third": third,
        "n": {"a": [None, 1]},
    }
    assert same(restored(written(state, {}, {})[0], {}, {}), state)


@for_each(
    "text", ["", "[]", "{", "3", '{"held": 3}', '{"t": {"dtype": "nothing", "values": 1}}', '{"held": {"0": {"nm_mask": 4}}}', 5, b"x"]
)
def test_texts_of_others(text):
    layers = {"0": nm.nn.SparseLinear(8, 4)}
    with pytest.raises(CheckpointError, match="nmkernels did not write"):
        restored(text, layers, {"0": torch.zeros(4, 8, dtype=torch.uint8)})


@pytest.mark.quick(1, per="entry.recipe.name")
@pytest.mark.parametrize("entry", ROSTER.values(), ids=ROSTER.keys())
def test_keys_of_a_state_dict_are_those_of_a_fresh_one(entry):
    """torch.distributed.checkpoint loads no others into an optimizer whose state it has made by a step at rate 0."""

    def keys(optimizer):
        state = optimizer.state_dict()
        return [(i, own) for i, values in state["state"].items() for own in values if own == "nm_held"], state["param_groups"][0].keys()

    model, _, optimizer = start(entry.recipe, F32)
    zero_step(optimizer)
    first = keys(optimizer)
    for batch in DATA32:
        step(model, optimizer, batch)
        assert keys(optimizer) == first


def zero_step(optimizer):
    """As torch.distributed.checkpoint finds out what state a fresh optimizer will have."""
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step(closure=None)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


OPTIMIZERS = {
    "own": lambda p: MaskedAdamW(p, lr=1e-2, weight_decay=0.1),
    "own_tensor_lr": lambda p: MaskedAdamW(p, lr=torch.tensor(1e-2)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
}
RECIPES = {
    "srste": SRSTE(decay=0.1),
    "step": STEP(t_min=2, t_max=4),
    "asp": ASP(start=3),
    "pruned": ASP(),
    "fst": nm.recipes.get("fst:2:4", total_steps=10, every=2, mvue=None),
}


@for_each("recipe", RECIPES)
@for_each("kind", OPTIMIZERS)
def test_asking_for_the_state_changes_nothing(recipe, kind):
    if recipe == "step" and not kind.startswith("own"):
        return
    runs = []
    for asks in (False, True):
        model, handle, optimizer = start(RECIPES[recipe], make=lambda p, **_: OPTIMIZERS[kind](p))
        if asks:
            before = copy.deepcopy((snapshot(model), handle.state_dict()))
            zero_step(optimizer)
            assert same(before, (snapshot(model), handle.state_dict()))
            assert len(optimizer.state) == (0 if kind == "sgd" else len(list(model.parameters())))
        train(model, optimizer, DATA[:6])
        runs.append((snapshot(model), metrics_of(handle), handle.state_dict()))
    (weights, metrics, state), (others, theirs, their) = runs
    assert distance(weights, others) == 0.0 and str(metrics) == str(theirs) and same(state, their)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("make", [torch.optim.AdamW, MaskedAdamW, torch.optim.RMSprop, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 3])
def test_masks_of_weights_that_were_never_stepped_are_restored_before_attach(steps, make):
    data = [(x := torch.randn(8, 32, generator=torch.Generator().manual_seed(t)), x) for t in range(4)]
    model = Unused()
    handle = nm.sparsify_(model, "asp:2:4")
    optimizer = handle.attach(make(model.parameters(), lr=1e-2))
    train(model, optimizer, data[:steps])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = Unused()
    other.load_state_dict(saved[0])
    with torch.no_grad():
        other.unused.weight[:, 0] = 9.0  # a mask chosen again would keep it
    loaded = make(other.parameters(), lr=1e-2)
    loaded.load_state_dict(saved[1])
    again = nm.sparsify_(other, "asp:2:4")
    again.attach(loaded)
    assert same(handle.run.held.masks, again.run.held.masks)
    for one, its in ((model, optimizer), (other, loaded)):
        train(one, its, data[3:])
    assert torch.equal(model.used.weight, other.used.weight)


def test_a_real_first_step_at_learning_rate_zero_counts():
    """A warm-up often begins at 0; its gradients tell it from a step that only asks."""
    model, handle, optimizer = start(STEP(t_min=2, t_max=4), lr=0.0)
    step(model, optimizer, DATA[0])
    assert handle.state["t"].item() == 1


def begin_two(seed):
    model = mlp(seed=seed)
    handle = nm.sparsify_(model, ASP(start=2))
    parts = [*model[0].parameters(), *model[4].parameters()], model[2].parameters()
    return model, handle.attach(*(MaskedAdamW(part, lr=1e-2) for part in parts))


def train_two(model, both, data):
    for batch in data:
        for optimizer in both:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in both:
            optimizer.step()


def test_masks_of_two_optimizers_lie_with_their_own_weights():
    model, both = begin_two(0)
    train_two(model, both, DATA[:4])
    weights, *states = copy.deepcopy([model.state_dict(), *(optimizer.state_dict() for optimizer in both)])
    assert [[i for i, own in state["state"].items() if "nm_held" in own] for state in states] == [[0], [0]]
    train_two(model, both, DATA[4:8])
    other, theirs = begin_two(5)
    with pytest.raises(CheckpointError, match="in the order in which attach was given them"):
        theirs[1].load_state_dict(states[1])
    other.load_state_dict(weights)
    for optimizer, state in zip(theirs, states, strict=True):
        optimizer.load_state_dict(state)
    train_two(other, theirs, DATA[4:8])
    assert distance(snapshot(model), snapshot(other)) == 0.0
