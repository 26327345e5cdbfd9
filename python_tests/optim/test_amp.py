"""GradScaler hands MaskedAdamW its scale; a skipped step changes nothing at all."""

import torch

from nmkernels.optim import MaskedAdamW, Target, UpdateRule
from nmkernels.pattern import Pattern
from python_tests.each import each


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 8)


def trained(cls, scaler=None, unscale=False, clip=None, steps=8):
    layer = model()
    optimizer = cls(layer.parameters(), lr=0.05)
    for t in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        (scaler.scale(loss) if scaler else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return layer, optimizer


def close(a, b):
    return all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@each("unscale", [False, True])
@each("clip", [None, 0.1])
def test_scaler(unscale, clip):
    if clip and not unscale:
        clip = 0.1 * 512  # the gradients that are clipped are the scaled ones
    got, optimizer = trained(MaskedAdamW, torch.amp.GradScaler("cpu", init_scale=512.0), unscale, clip)
    want, _ = trained(torch.optim.AdamW, clip=0.1 if clip else None)
    assert close(got, want)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@each("masked", [False, True])
@each("unscale", [False, True])
def test_found_inf_leaves_everything_untouched(masked, unscale):
    layer, optimizer = trained(MaskedAdamW, steps=3)
    if masked:
        optimizer.targets = {layer.weight: Target(Pattern("2:4"))}
        optimizer.rule = UpdateRule(masked=True, decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    tensors = [*layer.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    before = [t.detach().clone() for t in tensors]
    scaler.scale(layer(torch.full((2, 16), torch.inf)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    if masked:
        assert not optimizer.stats.any()
