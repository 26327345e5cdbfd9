"""An independent training loop, written from the papers' equations in plain torch; it takes nothing from the package.

STE and SR-STE: Zhou et al., ICLR 2021. STEP and AutoSwitch: Lu et al., ICML 2023. Adam with decoupled weight decay:
Loshchilov, Hutter, ICLR 2019.
"""

import math
from dataclasses import dataclass
from functools import partial

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


class Product(torch.autograd.Function):
    """y = x wᵀ, with ∂L/∂w = ``estimate(g, x)`` and ∂L/∂x = g ``back``."""

    @staticmethod
    def forward(ctx, x, w, back, estimate):
        ctx.save_for_backward(x, back)
        ctx.estimate = estimate
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, back = ctx.saved_tensors
        return g @ back, ctx.estimate(g, x), None, None


def loss_at(at, batch, act=F.gelu, estimate=lambda k, g, x: g.T @ x, back=None, adapters=False):
    """The loss of the three-layer net with the parameters ``at``; low-rank ones add x L R / r."""
    h = batch[0]
    for i in (0, 2, 4):
        k = f"{i}.weight"
        y = Product.apply(h, at[k], (back or {}).get(k, at[k]).detach(), partial(estimate, k)) + at[f"{i}.bias"]
        if adapters and k in SPARSE:
            left, right = at[f"{i}.nm_left"], at[f"{i}.nm_right"]
            y = y + h @ left @ right / left.shape[1]
        h = act(y) if i < 4 else y
    return F.mse_loss(h, batch[1])


def gradients(params, batch, masks):
    """Loss and gradients at the masked weights; ``masks`` is empty in a dense phase."""
    at = {k: (v * masks[k] if k in masks else v).detach().requires_grad_() for k, v in params.items()}
    loss = loss_at(at, batch)
    return loss.item(), dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))


def through(w, value):
    """``value``, whose gradient is that of ``w``."""
    return w + (value - w).detach()


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
    """The arguments of STEP; None for STE and SR-STE."""

    switch: str = "relative"
    t_min: int = 5
    t_max: int = 15
    start: int = 10
    threshold: float = 1e-8
    bias_corrected: bool = True
    inside: bool = False
    clamp: float | None = None


class Watch:
    """The switching policies over plain python lists."""

    def __init__(self, step, beta2):
        self.step, self.window, self.values, self.beta2 = step, round(1 / (1 - beta2)), [], beta2

    def fires(self, t, before, after):
        s = self.step
        if s.switch == "fixed":
            return t >= s.start
        return t > s.t_max or (self.small(before, after) and t > s.t_min)

    def small(self, before, after):
        s, changes = self.step, torch.cat([(b - a).abs().flatten() for b, a in zip(before, after, strict=True)]).double()
        if s.switch == "paper":
            self.values.append(changes.mean().item())
        elif s.switch == "paper_geometric":
            moved = changes[changes > 0].tolist()
            self.values.append(math.exp(sum(math.log(max(c, TINY)) for c in moved) / len(moved)))
        elif s.switch == "relative_norm":
            norm = [math.sqrt(sum(float(v.double().square().sum()) for v in vs)) for vs in (before, after)]
            return norm[0] > 0 and abs(norm[1] - norm[0]) / norm[0] < s.threshold
        elif s.switch == "relative":
            self.values.append(sum(float(v.double().sum()) for v in after) / (1 - self.beta2 ** (len(self.values) + 1)))
            t = len(self.values)
            before = max(t // 2, t - self.window)
            return before > 0 and abs(self.values[-1] - self.values[before - 1]) < s.threshold * self.values[-1]
        elif s.switch == "staleness":
            self.values.append(sum(float(v.double().abs().sum()) for v in after))
            return len(self.values) > self.window and self.values[-1] / self.values[-1 - self.window] > s.threshold
        recent = self.values[-self.window :]
        return sum(recent) / len(recent) < s.threshold


def optimize(
    params,
    data,
    use=lambda k, p, t: p[k],
    rule=lambda k, w, g, t: g,
    *,
    begin=lambda t, *tensors: None,
    after=lambda t, params: None,
    estimate=lambda k, g, x, t: g.T @ x,
    back=lambda used, t: {},
    adapters=lambda t: False,
    extra=lambda used, t: 0.0,
    act=lambda y, t: F.gelu(y),
    multiplier=1.0,
    adam=None,
    step=None,
    log=None,
):
    """AdamW on L(W̃) + ``extra``, W̃ = ``use(k, params, t)`` differentiated by autograd, with t from 0.

    ``rule(k, w, g, t)`` adds to a gradient, or says None where the parameter stands still; ``estimate`` is ∂L/∂W̃, ``back`` what ∂L/∂x
    multiplies instead of W̃. Before each step ``begin(t, params, m, v)`` may change them. With a ``step`` all this begins at STEP's switch,
    from which t is then counted and v of the sparse weights is frozen; before it training is dense.
    """
    a, params = adam or Adam(), {k: w.clone() for k, w in params.items()}
    m, v = ({k: torch.zeros_like(w) for k, w in params.items()} for _ in "mv")
    count, switched, log = dict.fromkeys(params, 0), 0, [] if log is None else log
    watch = Watch(step, a.beta2) if step else None
    for now, batch in enumerate(data):
        learning, t = watch is None or switched > 0, now - switched
        if learning:
            begin(t, params, m, v)
        p = {k: w.clone().requires_grad_() for k, w in params.items()}
        used = {k: use(k, p, t) for k in SPARSE} if learning else {}
        parts = {"estimate": lambda k, g, x, t=t: estimate(k, g, x, t), "back": back(used, t), "adapters": adapters(t)} if learning else {}
        loss = loss_at({**p, **used}, batch, lambda y, t=t: act(y, t), **parts) + (extra(used, t) if learning else 0.0)
        grads = torch.autograd.grad(loss, list(p.values()), allow_unused=True)
        log.append({"loss": loss.item(), "phase": int(learning), "largest": 0.0})
        before = [v[k] for k in SPARSE]
        for (k, w), g in zip(list(params.items()), grads, strict=True):
            g = rule(k, w, g, t) if learning and g is not None else g
            if g is None:
                continue
            count[k] += 1
            frozen = switched > 0 and k in SPARSE
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * g
            if not frozen:
                v[k] = a.beta2 * v[k] + (1 - a.beta2) * g * g
            correction = 1 - a.beta2 ** (switched if frozen else count[k])
            if frozen and not step.bias_corrected:
                correction = 1.0
            d = (v[k] / correction + a.eps).sqrt() if frozen and step.inside else (v[k] / correction).sqrt() + a.eps
            u = m[k] / (1 - a.beta1 ** count[k]) / d
            if k in SPARSE:
                log[-1]["largest"] = max(log[-1]["largest"], float(u.abs().max()))
            if frozen and step.clamp is not None:
                u = u.clamp(-step.clamp, step.clamp)
            lr = a.lr * (multiplier if "nm_" in k else 1.0)
            params[k] = w * (1 - lr * a.weight_decay) - lr * u
        after(t, params)
        if watch and not switched and watch.fires(now + 1, before, [v[k] for k in SPARSE]):
            switched = now + 1
            log[-1]["switched"] = switched
    return params


def masked(params, data, mask_of, decay=0.0, chain=False, **how):
    """W̃ = M ⊙ W with M = ``mask_of(k, w, t)``, straight through unless ``chain``, and λ (1 − M) ⊙ W added to the gradient."""
    masks = {}

    def use(k, p, t):
        masks[k] = mask_of(k, p[k].detach(), t).to(p[k].dtype)
        used = p[k] * masks[k]
        return used if chain else through(p[k], used)

    return optimize(params, data, use, lambda k, w, g, t: g + decay * (1 - masks[k]) * w if k in SPARSE else g, **how)


def train(params, data, n, m, decay=0.0, adam=None, step=None):
    """STE, SR-STE (``step`` None) or STEP; returns the parameters, one record per step, and the step of the switch."""
    log, masks = [], {}

    def use(k, p, t):
        masks[k] = top_n(p[k].detach(), n, m)
        return through(p[k], p[k] * masks[k])

    def rule(k, w, g, t):
        if k not in SPARSE:
            return g
        for name, x in (("pruned_w", w), ("pruned_g", g)):
            log[-1][name] = log[-1].get(name, 0.0) + x[~masks[k]].abs().sum()
        return g + decay * w * ~masks[k]

    def after(t, params):
        log[-1]["flips"] = sum(int((top_n(params[k], n, m) ^ mask).sum()) for k, mask in masks.items())

    end = optimize(params, data, use, rule, after=after, adam=adam, step=step, log=log)
    return end, log, next((record["switched"] for record in log if "switched" in record), 0)


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
