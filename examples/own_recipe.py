"""Write your own recipe and train with it and torch's AdamW.

python examples/own_recipe.py --steps 300 --out leaky.safetensors

The method: weights outside the N largest of their group are scaled down at first, and set to zero after half of the run.
"""

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.autograd import HardMask, WeightTransform
from nmkernels.recipes import Stage, recipe
from nmkernels.recipes.contract import number
from nmkernels.recipes.schedule import ScheduledRecipe, resolve_step


@dataclass(frozen=True)
class Leaky(WeightTransform):
    """W̃ = (M + leak (1 − M)) ⊙ W, M the mask of the N largest magnitudes; the gradient of W̃ goes to all of W."""

    leak: float = 0.1

    def _traits(self):
        return replace(super()._traits(), is_nm=False)  # W̃ is not N:M yet: GEMMs are dense, nothing is packed

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        leaky = torch.where(nm.ops.mask(weight, self.pattern), weight, self.leak * weight)
        return leaky if out is None else out.copy_(leaky)


@recipe("leaky")  # its name for nm.recipes.get("leaky:2:4(leak=0.2)", total_steps=300)
@dataclass(frozen=True)
class LeakyMask(ScheduledRecipe):
    """``Leaky`` until ``switch``, then SR-STE's hard mask."""

    leak: float = number(0.1)  # validated: a number of at least 0
    switch: float | int = 0.5  # a share of the run, or a step

    @cached_property
    def stages(self):
        """(the step after which the stage begins, the stage)."""
        switch = resolve_step("LeakyMask", "switch", self.switch, self.total_steps)
        return (
            (0, Stage(phase=0, transform=Leaky(self.pattern, leak=self.leak))),
            (switch, Stage(phase=1, transform=HardMask(self.pattern))),
        )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # its outputs are the targets
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
handle = nm.sparsify_(model, nm.recipes.get("leaky:2:4", total_steps=args.steps))
optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=2e-3))

for step in range(1, args.steps + 1):
    x = torch.randn(128, 64)
    loss = F.mse_loss(model(x), teacher(x).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % max(args.steps // 6, 1) == 0:
        print(f"step {step}  loss {loss.item():.4f}  phase {handle.metrics()['phase'].item():.0f}")

handle.finish()  # checks that every weight is 2:4
nm.save_compressed(nm.compress_(model), args.out)
