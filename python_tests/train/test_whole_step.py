"""The whole step compiled: ``torch.compile`` of the model, of ``optimizer.step``, and of one function that does all of it.

Torch's own AdamW breaks its graph once, whatever is done. A recipe adds no break, and what it does stays as without compiling.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import nmkernels as nm
from nmkernels.gemm.choose import forget

STEPS = 8
RUNS = {
    "srste, MaskedAdamW": ("srste:2:4(decay=0.01)", nm.optim.MaskedAdamW),
    "srste, AdamW": ("srste:2:4(decay=0.01)", torch.optim.AdamW),
    "step, MaskedAdamW": ("step:2:4(switch=fixed,start=3)", nm.optim.MaskedAdamW),
    "asp, AdamW": ("asp:2:4(start=3)", torch.optim.AdamW),
    "asp, MaskedAdamW": ("asp:2:4(start=3)", nm.optim.MaskedAdamW),
    "sste, AdamW": ("sste:2:4", torch.optim.AdamW),
    "sste, SGD": ("sste:2:4", torch.optim.SGD),
    "mdgf, MaskedAdamW": ("mdgf:2:4", nm.optim.MaskedAdamW),
    "fst, AdamW": ("fst:2:4", torch.optim.AdamW),
    "ast, AnnealedAdamW": ("ast:2:4", nm.optim.AnnealedAdamW),
}


def start(recipe: str | None, make, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    handle = None if recipe is None else nm.sparsify_(model, nm.recipes.get(recipe, total_steps=STEPS))
    optimizer = make(model.parameters(), lr=1e-2)
    return model, optimizer if handle is None else handle.attach(optimizer), handle


def train(run: tuple[str | None, type], compiled: str) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
    """The weights after ``STEPS`` steps under a schedule of the learning rate, the metrics of each step, and how often the graph broke."""
    torch._dynamo.reset()
    counters.clear()
    model, optimizer, handle = start(*run)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    forward, update = model, optimizer.step
    if compiled == "parts":
        forward, update = torch.compile(model, backend="eager"), torch.compile(optimizer.step, backend="eager")

    def step(x: Tensor) -> Tensor:
        loss = forward(x).square().mean()
        loss.backward()
        update()
        return loss

    whole = torch.compile(step, backend="aot_eager") if compiled == "one function" else step
    seen = []
    for x in torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1)):
        whole(x)
        optimizer.zero_grad()
        scheduler.step()
        seen.append({} if handle is None else {key: value.clone() for key, value in handle.metrics().items()})
    return [p.detach().clone() for p in model.parameters()], seen, sum(counters["graph_break"].values())


def check(run, compiled):
    """Compiled it trains as without, with as many graph breaks as this returns."""
    weights, metrics, breaks = train(run, compiled)
    expected, want_metrics, _ = train(run, "")
    for a, b in zip(weights, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(metrics, want_metrics, strict=True):
        assert a.keys() == b.keys()
        for key, value in b.items():
            assert torch.allclose(a[key].double(), value.double(), rtol=1e-4, atol=1e-6, equal_nan=True), key
    return breaks


def test_no_more_breaks_than_without_a_recipe():
    allowed = train((None, torch.optim.AdamW), "parts")[2]
    assert 1 <= allowed <= 2  # one of AdamW's, one of the scheduler that has wrapped its step
    assert check(RUNS["srste, MaskedAdamW"], "parts") <= allowed
    assert train((None, nm.optim.MaskedAdamW), "parts")[2] <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_recipe(name, monkeypatch):
    # where it is one function, there is one more break at backward; GEMMs by one method, compiled and not: for any number of tokens a graph
    # may choose another one, and Adam makes a difference in the last bit of a tiny gradient as large as a step
    for compiled, allowed, choice in (("parts", 2, "dense"), ("one function", 3, "packed")):
        monkeypatch.setenv("NMKERNELS_CHOICE", choice)
        forget()
        assert check(RUNS[name], compiled) <= allowed
    monkeypatch.undo()
    forget()


@pytest.mark.slow
def test_a_closure():
    model, optimizer, handle = start("srste:2:4", torch.optim.AdamW)
    update = torch.compile(optimizer.step, backend="eager")
    x = torch.randn(4, 16)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first, last = update(closure), [update(closure) for _ in range(5)][-1]
    assert last < first and handle.run.max_applied_steps == 6
