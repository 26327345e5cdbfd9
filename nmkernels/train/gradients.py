"""What ``MaskedAdamW`` does in its own pass over memory, for other optimizers and for masks that it cannot know: masking and decay of the
gradients before the update, and counting after it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import ops
from ..autograd.transforms import WEIGHT, masked
from ..layouts import MATRICES, as_matrix, ordered
from ..shards import align_gradient, local, summed
from .run import Attachment

COUNTED = ("pruned_abs", "pruned_grad_abs", "flips", "nonzeros")
"""What is counted here."""


def remove_idle(a: Attachment) -> None:
    """Take the gradients of zeros from Parameters that do not take part yet: the optimizer would decay them, and count a step."""
    for layer in a.run.layers.values():
        for name in layer.idle:
            layer.get_parameter(name).grad = None


def take_part(a: Attachment) -> None:
    """Note which layers the present step updates; of layers that share all their Parameters one."""
    names: dict[tuple[int, ...], str] = {}
    for name, layer in a.layers.items():
        if layer.takes_part():
            names.setdefault((id(layer.parameter), *map(id, layer.learned().values())), name)
    a.took = list(names.values())
    a.numel = sum(a.layers[name].parameter.numel() for name in a.took)


@torch.no_grad()
def prepare(a: Attachment) -> None:
    """Mask or decay the gradients; where a fused optimizer unscales them later, the decay is scaled too."""
    stage, scale = a.run.stage, getattr(a.optimizer, "grad_scale", None)
    # with maximize the optimizer negates the gradient later; the decay must shrink the weight all the same
    negated = {id(p) for group in a.optimizer.param_groups if group.get("maximize") for p in group["params"]}
    a.masks, a.pruned = {}, {}
    take_part(a)
    for name in a.took:
        layer = a.layers[name]
        learned = layer.learned()
        penalties = {} if stage.rule.adds_penalty and not learned else layer.penalties()
        of_weight = penalties.pop(WEIGHT, None)
        for key, value in penalties.items():
            grad = learned[key].grad
            if grad is not None:
                add(grad, id(learned[key]) in negated, scale, value)
        if stage.rule.masked and not stage.held_mask:
            a.masks[name] = layer.kept()
        grad = align_gradient(layer.parameter, layer.layout)
        # torch's fused kernels ignore strides: moments from before sparsify_, or of a dense model's checkpoint, would be of other weights
        moments = {} if layer.layout in MATRICES else a.updating.state.get(layer.parameter, {})
        for key, value in moments.items():
            if isinstance(value, Tensor) and value.shape == layer.parameter.shape:
                moments[key] = ordered(value, layer.layout)
        if grad is None:
            continue
        w, g = layer.master.detach(), as_matrix(local(grad), layer.layout)
        put = partial(add, g, id(layer.parameter) in negated, scale)
        if stage.held_mask:
            g.masked_fill_(~a.run.held.masks[name], 0.0)
        elif stage.rule.masked:
            outside = ~a.masks[name]
            pruned = masked(w, outside)
            size = magnitude(masked(g, outside))
            a.pruned[name] = magnitude(pruned), size if scale is None else size / scale.double()
            if stage.rule.decay:
                put(pruned, stage.rule.decay)
        if of_weight is not None and not stage.rule.adds_penalty:
            put(of_weight)


@torch.no_grad()
def count(a: Attachment, found_inf: Tensor | None) -> Tensor:
    """The sums that MaskedAdamW counts in its own pass, for other optimizers and for masks that it cannot know."""
    device = next(iter(a.layers.values())).master.device
    nothing = torch.zeros((), dtype=torch.float64, device=device)  # a copy from the host could not be captured
    values = dict.fromkeys(ops.STATS, nothing)
    if a.masked is not None and a.masked.stats is not None:
        values.update(zip(ops.STATS, a.masked.stats, strict=True))
    values["applied"] = torch.ones_like(nothing) if found_inf is None else (found_inf == 0).double().reshape(())
    rows = []
    for name in a.took:
        layer = a.layers[name]
        w = layer.master.detach()
        if a.run.stage.held_mask:
            a.run.held.apply(name)
        pruned, flips = a.pruned.get(name, (nothing, nothing)), nothing
        if name in a.masks:
            now = layer.kept()
            if now is not a.masks[name]:  # a held mask is the same tensor until it is renewed
                flips = (now ^ a.masks[name]).count_nonzero()
            nonzeros = (w.ne(0) & now).count_nonzero()
        else:
            nonzeros = w.count_nonzero()
        rows.append((layer.parameter, torch.stack([x.to(device, torch.float64) for x in (*pruned, flips, nonzeros)])))
    a.masks, a.pruned = {}, {}
    if rows:
        values.update(zip(COUNTED, summed(rows), strict=True))
    return torch.stack([values[key].to(device, torch.float64) for key in ops.STATS])


def magnitude(x: Tensor) -> Tensor:
    """Σ|x| in fp64: rows in fp32 first, since a sum in another precision than its operand's begins by copying the whole tensor."""
    rows = torch.promote_types(x.dtype, torch.float32)  # in 16 bits a row's sum would be worth three digits, and fp16's may be too large
    return torch.linalg.vector_norm(x, 1, -1, dtype=rows).sum(dtype=torch.float64)


def add(g: Tensor, negated: bool, scale: Tensor | None, extra: Tensor, factor: float = 1.0) -> None:
    """Add ``factor · extra`` to a gradient that the optimizer may still negate and unscale."""
    factor = -factor if negated else factor
    if scale is None or g.dtype != torch.float16:
        g.add_(extra if scale is None else extra * scale, alpha=factor)
        return
    # the scaler has looked for infs before: where the sum passes fp16's range the decay is smaller than asked for, and nothing is NaN
    most = torch.finfo(g.dtype).max
    g.copy_(g.float().add_(extra.float() * scale, alpha=factor).clamp_(-most, most))
