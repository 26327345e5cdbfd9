"""Whole models on a GPU, since nobody trains or runs a feed-forward block: a training step of each recipe, and generation.

Four layers of Llama-3-8B's and of GPT-2-medium's width, with attention and output head, in torch ops without fusion around the GEMMs. Eager
and captured steps have cases of their own, with two models each, so that 16384 tokens of the larger one fit in 80 GB.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nmkernels as nm

from ..device import graphed
from ..registry import Call, Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from ._decoder import SIZES, Decoder, prunable

RECIPES: dict[str, dict[str, Any]] = {"srste": {}, "sste": {"seed": 0}, "fst": {"seed": 0, "end": None}}
"""Settings by recipe."""
HELD = {"every": 1000}
"""FST decides on the host when it renews its masks; a captured step holds them."""

STEPS, GRAPHS = ({name: f"model_step({words}{name})" for name in RECIPES} for words in ("", "captured "))
TRAINED, RUN = ("Llama-3-8B x4", "GPT-2-medium x4"), ("Llama-3-8B x4", "GPT-2-medium")
"""Generation has all 24 layers of GPT-2-medium: four in 4 bits would stay in the L2 cache of a GPU."""
CONTEXT = 1024
"""Positions in the cache of generation."""

EPS = 6
"""Logits may differ by so many eps of the largest: in 24 layers rounding reaches 1.6, and one wrong weight makes 8."""

TRAINING = Grid(models=TRAINED, dtypes=("bfloat16",), tokens=(4096, 16384), on="cuda")


@family(*STEPS.values(), *GRAPHS.values(), grids=(TRAINING,))
def model_step(spec: Spec, device: str) -> Work:
    """Forward, backward and update of fp32 weights under autocast: dense with ``AdamW(fused=True)``, and a recipe with its optimizer.

    Tuned first on a GPU. A captured step is the replay of a CUDA graph, in which FST holds its masks.
    """
    name, captured = next((name, ops is GRAPHS) for ops in (STEPS, GRAPHS) for name, op in ops.items() if op == spec.op)
    sizes = SIZES[spec.model]
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(sizes)
        length = min(sizes.context, spec.tokens)
        ids = torch.randint(sizes.vocab, (spec.tokens // length, length + 1))
    settings = {**RECIPES[name], **(HELD if captured and name == "fst" else {})}
    recipe = nm.recipes.get(f"{name}:{spec.pattern}", total_steps=1000, **settings)
    mine = _Trained(copy.deepcopy(model), ids, spec, recipe, captured)
    dense = _Trained(model, ids, spec, None, captured)
    words = "step (captured)" if captured else "step"
    pool = cache(torch.cuda.graph_pool_handle)  # a step leaves nothing there: its gradients and its W̃ are freed
    for run in (mine, dense):
        run.call = graphed(run.step, device, pool) if captured else run.step
    ours = Provider(f"nmkernels {name}, {words}", mine.call, tokens=ids[:, 1:].numel(), check=mine.check)
    return Work([ours, Provider(f"torch dense, {words}", dense.call)], [Ratio("x dense", ours.name, (f"torch dense, {words}",))])


class _Trained:
    """A model in training, dense without a recipe; ``call`` is its step or a replay of it."""

    call: Call

    def __init__(self, model: Decoder, ids: Tensor, spec: Spec, recipe: Any, capturable: bool) -> None:
        self.model, self.x, self.y, self.spec = model, ids[:, :-1], ids[:, 1:], spec
        if recipe is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)
            return
        self.handle = nm.sparsify_(model, recipe)
        self.optimizer = self.handle.attach(recipe.optimizer(model.parameters(), lr=1e-4, capturable=capturable))
        if ids.is_cuda:
            with self._cast():
                nm.tune(model, tokens=self.x.numel())

    def _cast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.x.device.type, self.spec.torch_dtype)

    def step(self) -> Tensor:
        """One training step; gradients are freed at its end."""
        with self._cast():
            loss = F.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def check(self) -> None:
        """Check that a step changes weights, and that logits then equal those of a dense model with the effective weights."""
        before = {name: layer.weight.detach().clone() for name, layer in self.handle.layers.items()}
        self.call()
        same = [name for name, layer in self.handle.layers.items() if torch.equal(layer.weight, before.pop(name))]
        assert not same, f"a step does not change the weights of {', '.join(same)}"
        baseline = _ours.as_dense(self.model, self.handle)
        with torch.no_grad(), self._cast():
            _ours.close(self.model(self.x[:1]), baseline(self.x[:1]), self.spec.torch_dtype, EPS)


# ---- generation


@family("decode", grids=(Grid(models=RUN, dtypes=("bfloat16",), tokens=(1, 16), on="cuda"),))
def decode(spec: Spec, device: str) -> Work:
    """The next token of 1 or 16 sequences at once, with attention over a cache of 1024 tokens, each provider in a CUDA graph.

    Dense, and compiled by ``torch.compile``; 2:4, and 2:4 with 4-bit values. All have the same pruned weights.
    """
    sizes = SIZES[spec.model]
    torch.manual_seed(0)
    with torch.device(device):
        dense = Decoder(sizes).to(spec.torch_dtype).eval().requires_grad_(False)
    for _, layer in prunable(dense):
        layer.weight.copy_(nm.ops.prune(layer.weight, spec.pattern))
    fast = torch.compile(copy.deepcopy(dense), fullgraph=True, dynamic=False, backend="inductor" if device.startswith("cuda") else "eager")
    theirs = _decoding("torch dense (captured)", dense, dense, spec, device)
    compiled = _decoding("torch dense, compiled (captured)", fast, dense, spec, device)
    ours = []
    for values, words in ((None, ""), ("int4", " in int4")):
        model = copy.deepcopy(dense)
        nm.sparsify_(model, nm.recipes.get(f"ste:{spec.pattern}")).finish(allow_unused=True)
        nm.compress_(model, values=values)
        p = _decoding(f"nmkernels {spec.pattern}{words} (captured)", model, model, spec, device)
        p.check = _same_as_dense(model, dense, spec)
        ours.append(p)
    ratios = [Ratio("x dense", p.name, (theirs.name,)) for p in (*ours, compiled)]
    ratios += [Ratio("x compiled dense", p.name, (compiled.name,)) for p in ours]
    return Work([*ours, theirs, compiled], ratios)


def _decoding(name: str, run: Callable[..., Any], model: Decoder, spec: Spec, device: str) -> Provider:
    """A step of decoding by ``run``, which is ``model`` or made of it, at the last position of the cache: all of it is read."""
    context, batch, head = min(CONTEXT, model.sizes.context), spec.tokens, model.lm_head.weight
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=head.device)
    memory, at = model.cache(batch, context), torch.full((1,), context - 1, device=head.device)

    @torch.no_grad()
    def step() -> Tensor:
        return ids.copy_(run(ids, memory, at)[:, -1].argmax(-1, keepdim=True))

    return Provider(name, graphed(step, device), tokens=batch)


def _same_as_dense(model: Decoder, dense: Decoder, spec: Spec) -> Callable[[], None]:
    """A check of the logits of a step against a dense model with the values that the compressed layers hold."""

    @torch.no_grad()
    def check() -> None:
        baseline = copy.deepcopy(dense)
        for name, layer in prunable(baseline):
            layer.weight.copy_(model.get_submodule(name).dense())  # type: ignore[operator]
        device = dense.lm_head.weight.device
        ids = torch.arange(spec.tokens, device=device).remainder(dense.sizes.vocab).view(-1, 1)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        mine, theirs = (each(ids, each.cache(spec.tokens, 8), first) for each in (model, baseline))
        _ours.close(mine, theirs, spec.torch_dtype, EPS)

    return check
