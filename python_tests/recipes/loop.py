"""An independent training loop, written from the papers' equations in plain torch; it takes nothing from the package.

STE and SR-STE: Zhou et al., ICLR 2021. STEP and AutoSwitch: Lu et al., ICML 2023. Adam with decoupled weight decay:
Loshchilov, Hutter, ICLR 2019.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SPARSE = ("0.weight", "2.weight")
TINY = 2.0**-149


def mlp(dtype=torch.float64, seed=0, act=nn.GELU):
    """Two maskable layers and a last one that is too small to be worth masking."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 8)).to(dtype)


def batches(count, dtype=torch.float64, seed=1):
    """``count`` batches of one fixed regression task."""
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(8, 16, generator=g, dtype=torch.float64)
    xs = [torch.randn(12, 16, generator=g, dtype=torch.float64) for _ in range(count)]
    return [(x.to(dtype), (x @ teacher.T).sin().to(dtype)) for x in xs]


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(got, want):
    """Largest absolute difference over all parameters."""
    return max((got[k].detach().double() - want[k].detach().double()).abs().max().item() for k in want)


def top_n(w, n, m):
    """True at the n largest magnitudes of each m consecutive elements of a row; ties keep the lower index."""
    groups = w.abs().reshape(-1, m)
    best = groups.argsort(dim=1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter(1, best, True).reshape(w.shape)


def gradients(params, batch, masks):
    """Loss and gradients at the masked weights; ``masks`` is empty in a dense phase."""
    at = {k: (v * masks[k] if k in masks else v).detach().requires_grad_() for k, v in params.items()}
    h = batch[0]
    for i in (0, 2, 4):
        h = F.linear(h, at[f"{i}.weight"], at[f"{i}.bias"])
        h = F.gelu(h) if i < 4 else h
    loss = F.mse_loss(h, batch[1])
    return loss.item(), dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))


@dataclass
class Adam:
    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def keywords(self):
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass
class Step:
    """What STEP may be told; None for STE and SR-STE."""

    switch: str = "arithmetic"
    t_min: int = 5
    t_max: int = 15
    start: int = 10
    threshold: float = 1e-8
    bias_corrected: bool = True
    inside: bool = False
    clamp: float | None = None


def train(params, data, n, m, decay=0.0, adam=None, step=None):
    """30 lines of STE, SR-STE (``step`` None) or STEP; returns the parameters and one record per step."""
    a, params, log = adam or Adam(), {k: v.clone() for k, v in params.items()}, []
    m1 = {k: torch.zeros_like(v) for k, v in params.items()}
    v2 = {k: torch.zeros_like(v) for k, v in params.items()}
    watch, switched = Watch(step, a.beta2) if step else None, 0
    for t, batch in enumerate(data, start=1):
        learning = step is None or switched > 0
        masks = {k: top_n(params[k], n, m) for k in SPARSE} if learning else {}
        loss, grads = gradients(params, batch, masks)
        before = {k: v2[k].clone() for k in SPARSE}
        pruned_w = sum(params[k][~masks[k]].abs().sum() for k in masks)
        pruned_g = sum(grads[k][~masks[k]].abs().sum() for k in masks)
        largest = 0.0
        for k, w in params.items():
            g = grads[k]
            if k in masks:
                g = g + decay * w * ~masks[k]
            m1[k] = a.beta1 * m1[k] + (1 - a.beta1) * g
            frozen = switched and k in SPARSE
            if not frozen:
                v2[k] = a.beta2 * v2[k] + (1 - a.beta2) * g * g
            correction = 1 - a.beta2 ** (switched if frozen else t)
            if frozen and not step.bias_corrected:
                correction = 1.0
            inside = step is not None and step.inside and frozen
            d = (v2[k] / correction + a.eps).sqrt() if inside else (v2[k] / correction).sqrt() + a.eps
            u = m1[k] / (1 - a.beta1**t) / d
            largest = max(largest, float(u.abs().max())) if k in SPARSE else largest
            if frozen and step.clamp is not None:
                u = u.clamp(-step.clamp, step.clamp)
            params[k] = w * (1 - a.lr * a.weight_decay) - a.lr * u
        flips = sum(int((top_n(params[k], n, m) ^ masks[k]).sum()) for k in masks)
        log.append({"loss": loss, "flips": flips, "phase": int(learning), "pruned_w": pruned_w, "pruned_g": pruned_g, "largest": largest})
        if watch and not switched and watch.fires(t, [before[k] for k in SPARSE], [v2[k] for k in SPARSE]):
            switched = t
    return params, log, switched


class Watch:
    """The switching policies over plain python lists."""

    def __init__(self, step, beta2):
        self.step, self.window, self.values = step, round(1 / (1 - beta2)), []

    def fires(self, t, before, after):
        s = self.step
        if s.switch == "fixed":
            return t >= s.start
        return t > s.t_max or (self.small(before, after) and t > s.t_min)

    def small(self, before, after):
        s, changes = self.step, torch.cat([(b - a).abs().flatten() for b, a in zip(before, after, strict=True)]).double()
        if s.switch == "arithmetic":
            self.values.append(changes.mean().item())
        elif s.switch == "geometric":
            moved = changes[changes > 0].tolist()
            self.values.append(math.exp(sum(math.log(max(c, TINY)) for c in moved) / len(moved)))
        elif s.switch == "relative_norm":
            norm = [math.sqrt(sum(float(v.double().square().sum()) for v in vs)) for vs in (before, after)]
            return norm[0] > 0 and abs(norm[1] - norm[0]) / norm[0] < s.threshold
        elif s.switch == "staleness":
            self.values.append(sum(float(v.double().abs().sum()) for v in after))
            return len(self.values) > self.window and self.values[-1] / self.values[-1 - self.window] > s.threshold
        recent = self.values[-self.window :]
        return sum(recent) / len(recent) < s.threshold


def train_with(make_optimizers, params, data, n, m, decay=0.0):
    """STE or SR-STE with torch's own optimizers: mask, gradient at the masked weight, decay added, step."""
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    optimizers = make_optimizers(leaves)
    for batch in data:
        masks = {k: top_n(leaves[k].detach(), n, m) for k in SPARSE}
        _, grads = gradients(leaves, batch, masks)
        for k, p in leaves.items():
            p.grad = grads[k] + decay * p.detach() * ~masks[k] if k in masks else grads[k]
        for optimizer in optimizers:
            optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}
