"""The same machine, versions, threads and seed give the same bits by default: nothing is timed, and the table need not be there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

import nmkernels as nm
from nmkernels import timing
from nmkernels.gemm.choose import forget
from nmkernels.nn import SquaredReLU

STEPS, TOKENS, WIDTH = 24, 64, 128


def recipe_of(name):
    """A recipe as a user makes it, with its defaults, for a run of ``STEPS`` steps."""
    recipe = nm.recipes.get(f"{name}:2:4", total_steps=STEPS)
    short = {
        field.name: 2 for field in fields(recipe) if field.name in ("every", "window") and isinstance(getattr(recipe, field.name), int)
    }
    try:
        return replace(recipe, **short)
    except nm.NMError:
        return recipe


def model_of():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), SquaredReLU(), torch.nn.Linear(2 * WIDTH, WIDTH))


def digest(name):
    """A hash of the weights after a run from one seed, and of what the model computes then."""
    torch.manual_seed(0)
    model, recipe = model_of(), recipe_of(name)
    data = torch.Generator().manual_seed(2)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))
    for _ in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=data)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        tensors = [*model.state_dict().values(), model(torch.randn(TOKENS, WIDTH, generator=data))]
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


@pytest.fixture
def other_process(tmp_path):
    """The digest from a process of its own, with an empty cache."""

    def run(name):
        code = f"from python_tests.gemm.test_determinism import digest; import torch; torch.set_num_threads({torch.get_num_threads()}); "
        environment = {k: v for k, v in os.environ.items() if k != "NMKERNELS_CHOICE"} | {"NMKERNELS_CACHE": str(tmp_path / "other")}
        done = subprocess.run([sys.executable, "-c", code + f"print(digest({name!r}))"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(nm.recipes.names(), key="sste".__ne__))  # the first computes most that could be timed
def test_the_same_seed_gives_the_same_bits(name, cache, other_process, monkeypatch):
    monkeypatch.delenv("NMKERNELS_CHOICE", raising=False)
    monkeypatch.setattr(timing.timer.Timer, "turns", lambda *args, **kwargs: pytest.fail("a choice was timed"))
    found = []
    for _ in range(3):
        forget()
        found.append(digest(name))
    assert len(set(found)) == 1
    assert other_process(name) == found[0]
