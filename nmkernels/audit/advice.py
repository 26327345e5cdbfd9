"""Advice that would make a layer faster, with its predicted gain, and notes on how an audit's numbers were obtained."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..capability import compiled_core
from ..gemm.devices import HALVES
from ..gemm.problem import plain
from .report import Advice, Audit
from .rules import TWO_FOUR, LayerCosts, speedup, total
from .whole import MOST_TOKENS, rounded

LEAST = 1.01  # least gain for advice to be shown
PREPARING = 0.03  # share of a step above which preparing the weight is mentioned


def notes(audit: Audit, costs: LayerCosts, measured: bool) -> tuple[str, ...]:
    """Notes on the prediction, the measurement, and what is counted; ``costs`` is one of the layers."""
    device, dtype = costs.device, plain(costs.layer.dtype)
    rate, memory = device.rate(costs.layer.dtype) / 1e12, device.bandwidth / 1e12
    numbers = f"dense {dtype} GEMMs at {rate:.3g} TFLOP/s, memory of {memory:.3g} TB/s"
    if device.power is not None:
        source = (
            f"Predicted by a roofline, not measured: {device.name}, {numbers}, {100 * device.share:.0f} % of it reached, compute-bound "
            f"2:4 GEMMs {device.ratio['fprop']:g} times as fast as dense. That ratio is {device.low:g} to "
            f"{device.high:g} and not 2, because of shared memory and the limit of {device.power:g} W; it differs between cards."
        )
    else:
        patterns = ", ".join(dict.fromkeys(layer.pattern for layer in audit.layers if layer.pattern)) or "N:M"
        ratios = ", ".join(f"{role} {value:.2f}" for role, value in device.ratio.items())
        source = (
            f"Predicted by a roofline of {device.name} from a short measurement: {numbers}; speed-up of sparse GEMMs of "
            f"{patterns} over dense: {ratios}."
        )
    lines = [source]
    if device.transposed and not compiled_core().ok:
        lines.append(f"The compiled core is missing, so the plain reference runs: {compiled_core().reason}.")
    if measured:
        lines.append(
            "Measured: medians of alternating rounds on random tensors; masking and packing as separate passes. "
            "nm.tune makes layers use such measurements."
        )
    if costs.trains:
        passes = f", {audit.accumulate} passes per optimizer step" if audit.accumulate > 1 else ""
        recipe = f" of {audit.recipe}" if audit.recipe else ""
        lines.append(
            f"A step{recipe}: {audit.tokens} tokens{passes}; three GEMMs, masking and packing of weights, estimates of gradients. The "
            "optimizer's update, which a dense step also has, is not included" + (" in the layers' figures." if audit.whole else ".")
        )
    if audit.whole:
        lines.append(
            "Whole steps add what AdamW and making W̃ move, in the dense model AdamW and the cast of the weight, at "
            f"{100 * device.passes:.0f} % of the bandwidth. From how many tokens they pay is for one forward pass per update on each GPU; "
            "whatever else a model computes makes the gain smaller but does not change that number."
        )
    else:
        lines.append(f"Inference with {audit.tokens} tokens per call.")
    if costs.trains and costs.rules.fp8:
        lines.append(
            "FP8 is not predicted: GEMMs count as those of the dtype. On an H100, 8-bit GEMMs at 2:4 were 1.12 to 1.18 times as fast as "
            "dense FP8 ones, 1.26 to 1.43 with fast accumulation."
        )
    if device.power is not None and costs.rules.values != "float":
        lines.append(
            "Integers are predicted from their bytes, for so few tokens that kernels read them directly; for more, as if the weight were "
            "expanded at every call."
        )
    if costs.trains and not audit.steps:
        lines.append("In training no GEMM of this recipe has a sparse weight or an estimated gradient, so steps gain nothing.")
    if not audit.other:
        lines.append("Only linear layers are counted: no attention scores, norms, embeddings; other=FLOPs per token adds them.")
    return tuple(lines)


def of_sparse(costs: LayerCosts) -> tuple[Advice, ...]:
    suggestions = [*_operand(costs), *(_training(costs) if costs.trains else ()), *_deployed(costs)]
    if costs.speedup() < 1 / LEAST and all((advice.speedup or 0.0) < 1 for advice in suggestions):
        suggestions.append(Advice("it is slower than dense with any of the changes above: leave it dense (filter_fn)", costs.part, 1.0))
    return tuple(suggestions)


def _offer(costs: LayerCosts, text: str, changed: LayerCosts, detail: str = "") -> list[Advice]:
    gained = changed.speedup()
    return [Advice(text, costs.part, gained, detail)] if gained >= LEAST * max(costs.speedup(), 1 / LEAST) else []


def _training(costs: LayerCosts) -> Iterator[Advice]:
    """Changes to a step: packing, operands of dgrad and wgrad, tokens, and where the weight is prepared."""
    rules, pieces = costs.rules, {piece.name: piece for piece in costs.step()}
    if rules.fprop and rules.prepare and not rules.packed:
        text = 'training multiplies the weight in dense layout: packed="auto", where the recipe has that option'
        yield from _offer(costs, text, costs.but({"packed": True}))
    if rules.fprop and not rules.dgrad and not costs.device.transposed:
        text = "dgrad is dense, as the mask is N:M only along inputs: a transposable mask (FST) or a second one (SLoPe) makes it sparse"
        yield from _offer(costs, text, costs.but({"dgrad": True, "prepare": "transposable"}))
    if rules.fprop and rules.trains and rules.estimate is None:
        text = 'wgrad is dense: an estimate of the output gradient (mvue="exact" of S-STE and FST) makes it sparse'
        yield from _offer(costs, text, costs.but({"estimate": TWO_FOUR}))
    dear = rules.estimate is not None and not _estimate_pays(costs, costs.layer.shape[1])
    exact = costs.but({"estimate": None})
    if dear:
        least = _least(lambda width: _estimate_pays(costs, width), 64, 1 << 16)
        text = "with so few inputs the estimate for wgrad costs more than a sparse wgrad saves: mvue=None"
        yield from _offer(costs, text, exact, f"(pays from {rounded(least)} inputs on)" if least else "")
    small = exact if dear and exact.speedup() >= max(1.0, LEAST * costs.speedup()) else costs
    if small.speedup() < 1 and (most := break_even(small)) is not None and most > costs.layer.tokens * costs.accumulate:
        text = "the step is too small to pay for masking and packing: more tokens per optimizer step"
        yield Advice(text, detail=f"needs about {rounded(most)}")
    used = sum(piece.used for piece in pieces.values())
    if "weight" in pieces and pieces["weight"].used > PREPARING * used and costs.accumulate < 8:
        text = f"preparing the weight takes {100 * PREPARING:.0f} % of a step or more: accumulate gradients over 8 passes"
        yield from _offer(costs, text, replace(costs, accumulate=8))


def _estimate_pays(costs: LayerCosts, width: int) -> bool:
    pieces = {p.name: p for p in costs.but(layer={"shape": (costs.layer.shape[0], width)}).step()}
    return pieces["wgrad"].dense - pieces["wgrad"].used >= pieces["estimate"].used


def _operand(costs: LayerCosts) -> list[Advice]:
    """Changes to dtype, pattern and shape so that sparse GEMMs can run."""
    (out, cols), device, pattern, dtype = costs.layer.shape, costs.device, costs.rules.pattern, plain(costs.layer.dtype)
    if device.few is None:
        slow = costs.rules.fprop and dtype in HALVES and device.ratio["fprop"] < 1
        return [Advice(f"{dtype} GEMMs of {pattern} are slower than dense ones here: use float32, or another device")] if slow else []
    why = costs.refused("fprop")
    if why == dtype:
        text = f"{dtype} cannot use the sparse tensor cores: use bfloat16 (torch.autocast); the gain is over dense bfloat16"
        return _offer(costs, text, costs.but(layer={"dtype": torch.bfloat16}))
    if why == "pattern":
        text = f"{pattern} is not a 2:4 pattern, which the sparse tensor cores need: use 2:4, or N <= 2 of 8, 16, ..."
        return _offer(costs, text, costs.but({"pattern": TWO_FOUR}))
    if why == "shape":
        padded = (-(-out // device.rows) * device.rows, -(-cols // device.cols) * device.cols)
        text = f"sparse tensor cores take multiples of {device.rows} outputs and {device.cols} inputs: pad the layer"
        wide = costs.but(layer={"shape": padded})
        here, there = ((one.step() if one.trains else one.inference()) for one in (costs, wide))
        gained = total(here)[0] / total(there)[1]
        return [Advice(text, costs.part, gained, f"to ({padded[0]},{padded[1]})")] if gained >= LEAST * costs.speedup() else []
    return []


def break_even(costs: LayerCosts) -> int | None:
    """The fewest tokens per optimizer step, in one pass, for which a step is as fast as dense; None if no number suffices."""
    once = replace(costs, accumulate=1)
    return _least(lambda tokens: once.but(layer={"tokens": tokens}).speedup() >= 1, 1, MOST_TOKENS)


def _deployed(costs: LayerCosts) -> list[Advice]:
    pieces = costs.inference()
    if costs.rules.deploys_nm and pieces and pieces[0].form == "expanded":
        text = "the weight is expanded for a dense GEMM at every call: nm.compress_(model, keep_dense=True), or fewer tokens at once"
        return [Advice(text, "inference", speedup(replace(costs, has_dense=True).inference()))]
    if not costs.rules.deploys_nm:
        other = costs.but({"deploys_nm": True}).inference()
        text = "the recipe leaves a dense model, which gains nothing in inference: FST(end=None) leaves an N:M one"
        return [Advice(text, "inference", speedup(other))] if speedup(other) >= LEAST else []
    return []


def _least(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number in [low, high] for which the monotonic condition ``holds``; None if there is none."""
    return low + bisect_left(range(low, high), True, key=holds) if holds(high) else None


WAYS_OUT = (
    # for a layer that stays dense: part of the reason, and what to do
    ("is not a multiple of M", "pad the features to a multiple of M, or use a pattern whose M divides them"),
    ("which a transposable mask needs", "pad the outputs to a multiple of M"),
    ("output head", "an output head stays dense by default; filter_fn can include it, if the loss allows it"),
    ("tied to another module", "a tied weight stays dense: untie it, or leave it"),
    (
        "MultiheadAttention",
        "write attention with nn.Linear and F.scaled_dot_product_attention instead of nn.MultiheadAttention",
    ),
    ("multi_head_attention_forward", "write attention with F.scaled_dot_product_attention and layers that are called"),
    ("3-D expert weights", "one nn.Linear per expert can be made sparse"),
    ("not chosen by the filter", "filter_fn leaves it dense"),
    ("left dense", "it was left dense when the model was made sparse; change filter_fn to include it"),
    ("is a subclass of", "only nn.Linear itself is supported: replace it with one"),
    ("has kernels", "cast the weight to bfloat16 or float32"),
)


def of_dense(why: str, costs: LayerCosts) -> tuple[Advice, ...]:
    """Advice for a layer that stays dense for the reason ``why``; ``costs`` has the rules it would follow if sparse."""
    text = next((way for word, way in WAYS_OUT if word in why), "")
    (out, cols), pattern = costs.layer.shape, costs.rules.pattern
    gained = costs.but(layer={"shape": (pattern.groups(out) * pattern.m, pattern.groups(cols) * pattern.m)}).speedup()
    return (Advice(text, costs.part, gained),) if text and gained >= LEAST else ()
