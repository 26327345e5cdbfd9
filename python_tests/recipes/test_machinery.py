"""What transforms may hold, learn, turn in dgrad and do after a step, on toy recipes that use one of these each."""

import ast
import copy
import io
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import WeightTransform
from nmkernels.optim import UpdateRule
from nmkernels.pattern import CheckpointError, Pattern, RecipeError
from nmkernels.recipes import Recipe, Stage
from nmkernels.recipes.state import packed, unpacked
from python_tests.recipes.loop import batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.running import step

DATA = batches(12, torch.float32)


@dataclass(frozen=True)
class Kept(WeightTransform):
    """A held mask that keeps what was large when it was chosen, and one random number."""

    reads: ClassVar = {"nm_mask": "held", "nm_number": "held"}

    def renew(self, weight, extras, generator):
        assert all(e is None for e in extras) or extras[0].dtype == torch.bool
        return {"nm_mask": nm.ops.mask(weight, self.pattern), "nm_number": torch.rand((), generator=generator)}

    def kept(self, weight, mask, number):
        return mask

    def __call__(self, weight, mask, number, out=None):
        return torch.where(mask, weight, 0.0)


@dataclass(frozen=True)
class Gain(WeightTransform):
    """W̃ = a M(W) ⊙ W with a learned, and a weight that is not trained."""

    reads: ClassVar = {"nm_gain": "learned"}

    def start(self, weight):
        return {"nm_gain": torch.ones((), dtype=weight.dtype)}

    def __call__(self, weight, gain, out=None):
        return nm.ops.prune(weight, self.pattern) * gain

    def gradient(self, g, weight, gain):
        return None, {"nm_gain": (g * nm.ops.prune(weight, self.pattern)).sum()}


@dataclass(frozen=True)
class Turned(WeightTransform):
    """dgrad multiplies twice the weight."""

    def for_dgrad(self, used):
        return 2 * used


@dataclass(frozen=True)
class Toy(Recipe):
    transform: str = "Kept"
    renew: int = 0
    decay: float = 0.0
    name: ClassVar = "toy"

    def stage(self, state):
        rule = UpdateRule(masked=True, decay=self.decay)
        return Stage(phase=1, transform=globals()[self.transform](Pattern(self.pattern)), rule=rule, every=self.renew)


@dataclass(frozen=True)
class Shrunk(Recipe):
    """Weights are halved after every step."""

    def stage(self, state):
        return Stage(phase=1, after=self.halved)

    def halved(self, weight, lr):
        assert lr == 1e-2
        return weight / 2


def started(recipe, dtype=torch.float32, lr=1e-2, kind=None):
    model = mlp(dtype)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach((kind or recipe.optimizer)(model.parameters(), lr=lr))
    return model, handle, optimizer


# ---- held


@pytest.mark.parametrize("shape", [(3, 5), (1, 8), (0, 4), (7,)])
def test_masks_are_saved_as_bits(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    saved = packed(mask)
    assert saved["bits"].numel() == -(-mask.numel() // 8) and torch.equal(unpacked(saved), mask)
    other = torch.arange(3)
    assert torch.equal(unpacked(packed(other)), other)


@pytest.mark.parametrize("kind", [None, torch.optim.AdamW], ids=["own", "adamw"])
def test_held_masks_change_only_when_renewed(kind):
    model, handle, optimizer = started(Toy(renew=4), lr=0.3, kind=kind)
    layer, seen, flips = model[0], [], []
    for batch in DATA:
        seen.append(layer.nm_mask.clone())
        used = layer.effective_weight()
        assert torch.equal(used, layer.weight.detach() * layer.nm_mask)
        step(model, optimizer, batch)
        flips.append(handle.metrics()["flip_rate"].item())
    changed = [t for t in range(1, 12) if not torch.equal(seen[t], seen[t - 1])]
    assert changed and set(changed) <= {4, 8} and all((f > 0) == (t % 4 == 3) for t, f in enumerate(flips))
    assert "nm_mask" not in "".join(model.state_dict()) and handle.state["held_steps"] == 12


@dataclass(frozen=True)
class Parted(Toy):
    """A second part begins after three steps."""

    def first_state(self, group):
        return {"t": 0}

    def advance(self, state, observed):
        state["t"] += 1
        return state["t"] == 3

    def stage(self, state):
        return replace(super().stage(state), part=int(state.get("t", 0) >= 3))


def test_held_tensors_are_renewed_where_a_part_begins_and_counted_from_there():
    model, handle, optimizer = started(Parted(renew=2))
    numbers = [model[0].nm_number.item()]
    for batch in DATA[:8]:
        step(model, optimizer, batch)
        numbers.append(model[0].nm_number.item())
    assert [t for t in range(1, 9) if numbers[t] != numbers[t - 1]] == [2, 3, 5, 7] and handle.state["held_steps"] == 5


def test_held_decay_uses_the_held_mask():
    ends = []
    for decay in (0.0, 0.5):
        model, handle, _ = started(Toy(decay=decay), torch.float64)
        sgd = handle._attachments[0].optimizer
        layer = model[0]
        with torch.no_grad():
            layer.weight.copy_(layer.weight.flip(1))  # the largest are others now; the mask stays
        loss_of(model, batches(1)[0]).backward()
        before = layer.weight.grad.clone()
        sgd.step()
        ends.append((layer.weight.grad - before, layer.weight.detach().clone(), layer.nm_mask))
    assert ends[0][0].abs().max() == 0 and (ends[1][0] != 0).equal(~ends[1][2])


def test_held_state_resumes_and_is_checked():
    model, handle, optimizer = started(Toy(renew=4), lr=0.3)
    for batch in DATA[:6]:
        step(model, optimizer, batch)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    numbers = [layer.nm_number.item() for layer in handle.layers.values()]
    other, again, theirs = started(Toy(renew=4), lr=0.3)
    other.load_state_dict(weights)
    theirs.load_state_dict(state)
    assert [layer.nm_number.item() for layer in again.layers.values()] == numbers and len(set(numbers)) == len(numbers)
    for batch in DATA[6:]:
        step(model, optimizer, batch)
        step(other, theirs, batch)
    assert distance(snapshot(model), snapshot(other)) == 0
    bad = copy.deepcopy(handle.state_dict())
    bad["nm_recipe"]["held"]["elsewhere"] = {}
    with pytest.raises(CheckpointError, match="elsewhere"):
        handle.load_state_dict(bad)


def test_a_skipped_step_is_not_counted():
    model, handle, optimizer = started(Toy(renew=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (True, False, True, False):
        x, y = DATA[0]
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x * (torch.inf if bad else 1.0), y))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.state["held_steps"] == 2


# ---- learned


def test_learned_parameters_train_and_frozen_weights_stay():
    model, handle, optimizer = started(Toy(transform="Gain"))
    before, gains = model[0].weight.detach().clone(), [layer.nm_gain for layer in handle.layers.values()]
    assert all(any(g is p for p in model.parameters()) for g in gains)
    for batch in DATA:
        step(model, optimizer, batch)
    assert torch.equal(model[0].weight, before) and all(g.item() != 1.0 for g in gains)
    assert "0.nm_gain" in model.state_dict() and handle.metrics()["density"] == 0.5


def test_the_gradient_of_a_learned_parameter():
    model, _, _ = started(Toy(transform="Gain"), torch.float64)
    x, y = batches(1)[0]
    loss_of(model, (x, y)).backward()
    got = [model[i].nm_gain.grad.item() for i in (0, 2)]
    plain, gains = mlp(torch.float64), [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for i, gain in zip((0, 2), gains, strict=True):
        weight = nm.ops.prune(plain[i].weight.detach(), "2:4") * gain
        bias = plain[i].bias
        plain[i] = nn.Module()
        plain[i].forward = lambda h, w=weight, b=bias: nn.functional.linear(h, w, b)
    loss_of(plain, (x, y)).backward()
    assert got == pytest.approx([g.grad.item() for g in gains], rel=1e-10)


def test_an_optimizer_without_the_learned_parameters_is_refused():
    model = mlp()
    params = list(model.parameters())
    handle = nm.sparsify_(model, Toy(transform="Gain"))
    with pytest.raises(RecipeError, match="0.nm_gain"):
        handle.attach(torch.optim.AdamW(params))
    handle.attach(torch.optim.AdamW(model.parameters()))
    handle.remove()
    assert list(model.state_dict()) == list(mlp().state_dict())


def test_a_dense_checkpoint_renews_the_very_parameter():
    model = started(Toy(transform="Gain"))[0]
    gain = model[0].nm_gain
    with torch.no_grad():
        gain.fill_(3.0)
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(mlp(torch.float32, seed=2).state_dict())
    assert model[0].nm_gain is gain and gain.item() == 1.0
    model.load_state_dict(saved)
    assert gain.item() == 3.0


# ---- dgrad and settling


def test_dgrad_multiplies_what_the_transform_says():
    model, _, _ = started(Toy(transform="Turned"), torch.float64)
    layer = model[0]
    x = torch.randn(3, layer.in_features, dtype=torch.float64, requires_grad=True)
    (y := layer(x)).sum().backward()
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(x.grad, 2 * layer.weight.detach().sum(0).expand(3, -1))


@pytest.mark.parametrize("kind", [None, torch.optim.AdamW], ids=["own", "adamw"])
def test_what_comes_after_a_step(kind):
    model, handle, optimizer = started(Shrunk(), kind=kind)
    plain = mlp(torch.float32)
    theirs = (kind or Shrunk().optimizer)(plain.parameters(), lr=1e-2)
    for batch in DATA[:3]:
        step(model, optimizer, batch)
        step(plain, theirs, batch)
        with torch.no_grad():
            for name in handle.layers:
                plain.get_submodule(name).weight.div_(2)
    assert distance(snapshot(model), snapshot(plain)) < 1e-6


def test_nothing_comes_after_a_skipped_step():
    model, _, optimizer = started(Shrunk())
    before = model[0].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = DATA[0]
    scaler.scale(loss_of(model, (x * torch.inf, y))).backward()
    scaler.step(optimizer)
    assert torch.equal(model[0].weight, before)


def test_modules_do_not_import_each_other_in_a_circle():
    root = Path(nm.recipes.__file__).parent
    graph = {}
    for path in root.rglob("*.py"):
        inside = path.relative_to(root.parent).with_suffix("").parts
        if inside[-1] == "__init__":
            continue
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.level]
        targets = {(*inside[: -node.level], *(node.module or "").split(".")) for node in froms}
        graph[inside] = {target for target in targets if target[0] == "recipes"}
    assert {target for targets in graph.values() for target in targets} <= graph.keys() and len(graph) > 20
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
