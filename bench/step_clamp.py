"""Does STEP need its clamp? Test accuracy of a small classifier over seeds, by pattern and clamp.

``python -m bench.step_clamp`` trains a 64-128-128-10 MLP whose training set it can fit, so that gradients vanish in phase 0: the
case in which a frozen second moment is known to break. Rows go to ``bench/results/step_clamp.csv``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import nmkernels as nm

from .rows import RESULTS, Row, append, commit, row

STEPS, BATCH = 2000, 128
PATTERNS = ("2:4", "1:16", "1:32")
CLAMPS = (None, 2.0)


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten classes of four clusters each in 64 features, many of them rarely active, as pixels are: 1200 points to train, 1000 to test."""
    gen = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, 64, generator=gen)
    threshold = 3 * torch.rand(64, generator=gen) - 1
    which = torch.randint(40, (2200,), generator=gen)
    x = (centres[which] + 0.8 * torch.randn(2200, 64, generator=gen) - threshold).relu()
    y = which % 10
    return x[:1200], y[:1200], x[1200:], y[1200:]


def train(recipe: nm.recipes.Recipe, seed: int) -> float:
    """Test accuracy, in percent, of the weights that ``finish()`` would leave; 10 (chance) where training broke down to NaN."""
    x, y, test_x, test_y = data(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    handle = nm.sparsify_(model, recipe, filter_fn=lambda m, name: name != "4")
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3, weight_decay=0.0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    gen = torch.Generator().manual_seed(seed + 1)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (BATCH,), generator=gen)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with handle.deployable(), torch.no_grad():
        return 100 * float((model(test_x).argmax(-1) == test_y).float().mean())


def main() -> None:
    """Run every case over the seeds and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit()  # what the tree is now, not what it may have become when the last row is written
    providers: dict[str, dict[str, object]] = {"srste": {}}
    providers |= {f"step 25% clamp={c}": {"switch": "fixed", "clamp": c} for c in CLAMPS}
    providers |= {f"step auto clamp={c}": {"clamp": c} for c in CLAMPS}
    rows: list[Row] = []
    with tqdm(total=len(PATTERNS) * len(providers) * args.seeds) as bar:
        for pattern in PATTERNS:
            for name, config in providers.items():
                make = nm.recipes.SRSTE if name == "srste" else nm.recipes.STEP
                recipe = make(pattern, STEPS, **config)  # type: ignore[arg-type]
                scores = []
                for seed in range(args.seeds):
                    scores.append(train(recipe, seed))
                    bar.update()
                bar.write(f"{pattern} {name}: median {sorted(scores)[len(scores) // 2]:.1f} worst {min(scores):.1f}")
                shape = f"mlp 64-128-128-10, {STEPS} steps, {args.seeds} seeds"
                rows.append(row("train", name, "test accuracy %", scores, pattern=pattern, dtype="float32", shape=shape))
                rows.append(
                    row("train", name, "worst seed's test accuracy %", [min(scores)], pattern=pattern, dtype="float32", shape=shape)
                )
    append(rows, RESULTS / "step_clamp.csv")


if __name__ == "__main__":
    main()
