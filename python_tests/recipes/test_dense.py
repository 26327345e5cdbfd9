"""The dense baseline: the same code path, the same numbers as no package at all."""

import torch

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot, train


def run(make, sparsify):
    model = mlp()
    optimizer = make(model.parameters(), **Adam().keywords)
    handle = None
    if sparsify:
        handle = nm.sparsify_(model, "dense")
        handle.attach(optimizer)
    for batch in batches(10):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model, handle


def test_equals_ordinary_training():
    plain, _ = run(torch.optim.AdamW, sparsify=False)
    through, _ = run(torch.optim.AdamW, sparsify=True)
    assert distance(snapshot(through), snapshot(plain)) == 0.0
    ours, _ = run(MaskedAdamW, sparsify=True)
    want, _, _ = train(snapshot(mlp()), batches(10), 1, 1)
    assert distance(snapshot(ours), snapshot(plain)) < 1e-12
    assert distance(snapshot(ours), want) < 1e-12
