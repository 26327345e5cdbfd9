"""Trains the small model of ``loop`` under a recipe: start, step, train, run."""

import io

import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn.adapter import ADAPTER
from python_tests.recipes.loop import Adam, batches, loss_of, mlp, snapshot
from python_tests.recipes.roster import STEPS

F32, F64 = torch.float32, torch.float64
DATA, DATA32 = batches(STEPS), batches(STEPS, F32)


def optimizer_of(recipe, params):
    return recipe.optimizer(params, **Adam().keywords)


def activation_of(recipe):
    """The activation that the recipe needs, for those that make activations sparse."""
    return nm.nn.SquaredReLU if isinstance(recipe, nm.recipes.Activation24) else nn.GELU


def net(recipe, dtype=F64, seed=0):
    return mlp(dtype, seed, activation_of(recipe))


def start(recipe, dtype=F64, seed=0, model=None, make=None, **keywords):
    """Sparsify the small model, or ``model``, and attach the recipe's optimizer, or ``make``'s; keywords are the optimizer's."""
    model = net(recipe, dtype, seed) if model is None else model
    handle = nm.sparsify_(model, recipe)
    return model, handle, handle.attach((make or recipe.optimizer)(model.parameters(), **{**Adam().keywords, **keywords}))


def step(model, optimizer, batch, parts=1):
    optimizer.zero_grad()
    for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        (loss_of(model, (x, y)) / parts).backward()
    optimizer.step()


def train(model, optimizer, data, after=lambda t: None):
    """Train on each batch of ``data``, calling ``after(t)`` after step t, counted from 1."""
    for t, batch in enumerate(data, 1):
        step(model, optimizer, batch)
        after(t)


def run(recipe, dtype=F64, data=DATA, parts=1, **keywords):
    model, handle, optimizer = start(recipe, dtype, **keywords)
    for batch in data:
        step(model, optimizer, batch, parts)
    return model, handle, optimizer


def metrics_of(handle):
    return {k: v.item() for k, v in handle.metrics().items()}


def dense_part(model):
    """The dense model's parameters, without those the recipe added; adapters are added to their weights."""
    values = snapshot(model)
    for k in [k for k in values if k.endswith(".nm_right")]:
        left, right = values[k.replace("right", "left")], values[k]
        values[k.replace("nm_right", "weight")] += (left @ right).t() / len(right)
    return {name: p for name, p in values.items() if ".nm_" not in name}


def learned_part(model):
    """The parameters that the recipe added, without adapters."""
    return {name: p for name, p in snapshot(model).items() if ".nm_" in name and name.rpartition(".")[2] not in ADAPTER}


def same(a, b):
    """Whether two nested states are equal, including their tensors."""
    (xs, spec), (ys, other) = (torch.utils._pytree.tree_flatten(tree) for tree in (a, b))
    return spec == other and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(xs, ys, strict=True))


def through_a_file(*parts):
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
