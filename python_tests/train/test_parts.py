"""What transforms may hold, on toy recipes."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import WeightTransform
from nmkernels.optim import UpdateRule
from nmkernels.pattern import CheckpointError, Pattern
from nmkernels.recipes import Hooks, Recipe, Setup, Stage
from python_tests.recipes.training import DATA32, F32, start, step

DATA = DATA32[:12]


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
class Toy(Recipe):
    renew: int = 0
    name: ClassVar = "toy"

    def stage(self, state):
        return Stage(phase=1, transform=Kept(Pattern(self.pattern)), rule=UpdateRule(masked=True), every=self.renew)


@pytest.mark.parametrize("kind", [None, torch.optim.AdamW], ids=["own", "adamw"])
def test_held_masks_change_only_when_renewed(kind):
    model, handle, optimizer = start(Toy(renew=4), F32, make=kind, lr=0.3)
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


class Renewing(Hooks):
    """Renews what layers hold as a stage begins, and counts steps from there."""

    def enter(self, stage):
        if "held_steps" in self.run.state:
            self.run.state["held_steps"] = 0
            self.run.renew_held()


@dataclass(frozen=True)
class Parted(Toy):
    """A second part begins after three steps."""

    @property
    def setup(self):
        return Setup(hooks=partial(Renewing, self))

    def first_state(self, group):
        return {"t": 0}

    def advance(self, state, observed):
        state["t"] += 1
        return state["t"] == 3


def test_hooks_may_renew_held_tensors():
    model, handle, optimizer = start(Parted(renew=2), F32)
    numbers = [model[0].nm_number.item()]
    for batch in DATA[:8]:
        step(model, optimizer, batch)
        numbers.append(model[0].nm_number.item())
    assert [t for t in range(1, 9) if numbers[t] != numbers[t - 1]] == [2, 3, 5, 7] and handle.state["held_steps"] == 5


def test_state_of_missing_layers_is_refused():
    _, handle, _ = start(Toy(renew=4), F32)
    bad = handle.state_dict()
    bad["nm_recipe"]["held"]["elsewhere"] = {}
    with pytest.raises(CheckpointError, match="elsewhere"):
        handle.load_state_dict(bad)
