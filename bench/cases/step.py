"""Whole models: one training step of a recipe compared with its dense baseline, and generation from a compressed model."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig, generate
from nmkernels import testing
from nmkernels.autograd import STRAIGHT_THROUGH, HardMask
from nmkernels.gemm.forms import layout_on

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours

SIZES = {"GPT 1024x2": GPTConfig(width=1024, layers=2, heads=16, context=512), "GPT 1024x4": GPTConfig(1024 // 4, 1024, 4, 16, 128)}
SIZES["GPT 64x1"] = GPTConfig(width=64, layers=1, heads=2, context=32)
"""Models by name, width x layers; the last one is for tests."""

RECIPES = ("srste", "sste", "fst")
"""With their defaults."""

GEMM = "one GEMM"

GEMMS = ("aten::addmm", "aten::mm", "aten::bmm", "nmkernels::nm_linear", "nmkernels::nm_linear_dgrad", "nmkernels::nm_linear_wgrad")


@family("train_step", grids=(Grid(models=("GPT 1024x2",), tokens=(2048,)),))
def train_step(spec: Spec, device: str) -> Work:
    """Forward, backward and optimizer step: dense with ``torch.optim.AdamW(fused=True)``, and each recipe with its own optimizer."""
    config = SIZES[spec.model]
    torch.manual_seed(0)
    model = GPT(config).to(device=device, dtype=spec.torch_dtype)
    ids = torch.randint(config.vocab, (max(1, spec.tokens // config.context), min(spec.tokens, config.context) + 1), device=device)
    runs = [_Training("torch dense", copy.deepcopy(model), ids)]
    for name in RECIPES:
        recipe = nm.recipes.get(f"{name}:{spec.pattern}", total_steps=1000)
        runs.append(_Training(f"nmkernels {name}", copy.deepcopy(model), ids, recipe))
    ratios = [Ratio("time over dense", run.provider.name, ("torch dense",), "time") for run in runs[1:]]
    gemms = one_gemm(config.width * 4, config.width, ids[:, 1:].numel(), spec, device)
    ratios.append(Ratio("x dense", gemms[0].name, (gemms[1].name,)))
    return Work(
        [*(run.provider for run in runs), *gemms],
        ratios,
        finish=lambda: {key: value for run in runs for key, value in run.gemm_time().items()},
    )


def one_gemm(rows: int, cols: int, tokens: int, spec: Spec, device: str) -> tuple[Provider, Provider]:
    """The forward GEMM of the largest layer, compressed and dense, on which the gain of a step depends."""
    weight = _ours.normal(rows, cols, device=device, dtype=spec.torch_dtype)
    x = _ours.normal(tokens, cols, device=device, dtype=spec.torch_dtype, seed=1)
    layout = layout_on(weight.device, rows) if weight.is_cuda and spec.dtype != "float32" else "canonical"
    packed = nm.ops.pack(weight, spec.pattern, layout=layout).rows
    assert packed is not None
    ours = Provider(f"nmkernels, {GEMM}", lambda: nm.ops.linear(x, packed))
    return ours, Provider(f"torch dense, {GEMM}", lambda: nn.functional.linear(x, weight))


class _Training:
    """One model in training, whose step records the time of its parts."""

    def __init__(self, name: str, model: GPT, ids: Tensor, recipe: Any = None) -> None:
        self.model, self.x, self.y = model, ids[:, :-1], ids[:, 1:]
        self.preparation, self.handle = 0.0, None
        self.parts: dict[str, list[float]] = {part: [] for part in ("forward", "backward", "optimizer", "weight preparation")}
        if recipe is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        else:
            self.handle = nm.sparsify_(model, recipe)
            self.optimizer = self.handle.attach(recipe.optimizer(model.parameters(), lr=1e-4))
            for layer in self.handle.layers.values():
                layer.effective.read = self._timed(layer.effective.read)  # type: ignore[method-assign]
        parts = {} if ids.is_cuda else self.parts
        self.provider = Provider(name, self.step, check=self._check if self.handle else None, parts=parts)

    def step(self) -> None:
        """One ordinary training step; timing the parts adds four clock readings."""
        stamps, self.preparation = [time.perf_counter()], 0.0
        self.optimizer.zero_grad()
        loss = self.model.loss(self.x, self.y)
        stamps.append(time.perf_counter())
        loss.backward()
        stamps.append(time.perf_counter())
        self.optimizer.step()
        stamps.append(time.perf_counter())
        forward, backward, update = (b - a for a, b in itertools.pairwise(stamps))
        if not self.x.is_cuda:  # there the host would only time the launches
            for part, took in zip(self.parts, (forward - self.preparation, backward, update, self.preparation), strict=True):
                self.parts[part].append(took)

    def _timed(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            found = read(*args)
            self.preparation += time.perf_counter() - start
            return found

        return timed

    def gemm_time(self) -> dict[tuple[str, str], float]:
        """Microseconds of one step spent in GEMMs, measured outside the timed rounds."""
        if self.x.is_cuda:
            return {}  # the host would only time the launches
        with _GemmTime() as seen:
            self.step()
        return {(self.provider.name, "us GEMM"): 1e6 * seen.seconds}

    def _check(self) -> None:
        """Check that after some steps the loss and weight gradients of a sequence equal those of a dense model with the masked weights."""
        assert self.handle is not None
        self.step()
        baseline, layers = _ours.as_dense(self.model, self.handle), self.handle.layers
        for name, layer in layers.items():
            if isinstance(layer.transform, HardMask):
                pattern, used = layer.pattern, layer.effective_weight()
                part = _ours.ends(*used.shape)[0]
                testing.assert_equal_bits(used[part], _ours.reference("nm_prune")(layer.master.detach()[part], pattern.n, pattern.m), name)
        baseline.zero_grad()
        self.optimizer.zero_grad()
        losses = [model.loss(self.x[:1], self.y[:1]) for model in (self.model, baseline)]  # type: ignore[operator]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
        plans = {name: layer.plan for name, layer in layers.items()}
        for layer in layers.values():
            layer.plan = STRAIGHT_THROUGH  # an estimated gradient is right only on average
        losses[0] = self.model.loss(self.x[:1], self.y[:1])
        for loss in losses:
            loss.backward()
        for name, layer in layers.items():
            layer.plan = plans[name]
            mine, theirs = (model.get_parameter(f"{name}.weight").grad for model in (self.model, baseline))
            assert mine is not None and theirs is not None
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3 * float(theirs.abs().max()))


class _GemmTime(TorchDispatchMode):
    """Sums the time of GEMMs; torch's profiler would print lines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start if func.name().split(".")[0] in GEMMS else 0.0
        return found


@family("generate", grids=(Grid(models=("GPT 1024x4",), dtypes=("float32", "bfloat16"), tokens=(16,)),))
@torch.no_grad()
def generation(spec: Spec, device: str) -> Work:
    """Bytes generated one by one from a short prompt, by dense and compressed models with the same weights."""
    torch.manual_seed(0)
    dense = GPT(SIZES[spec.model]).to(device=device, dtype=spec.torch_dtype).eval()
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.copy_(nm.ops.prune(module.weight, spec.pattern))
    packed = copy.deepcopy(dense)
    nm.sparsify_(packed, nm.recipes.get(f"ste:{spec.pattern}"), filter_fn=lambda m, name: name != "lm_head").finish(allow_unused=True)
    nm.compress_(packed)

    def check() -> None:
        ids = torch.randint(256, (1, 8), device=device, generator=torch.Generator(device).manual_seed(1))
        with torch.no_grad():
            mine, theirs = packed(ids), dense(ids)
        _ours.close(mine, theirs, spec.torch_dtype)

    def call(model: GPT) -> Callable[[], object]:
        return lambda: generate(model, b"def ", spec.tokens, temperature=0)

    ours = Provider("nmkernels CompressedLinear", call(packed), tokens=spec.tokens, check=check)
    return Work([ours, Provider("torch dense", call(dense), tokens=spec.tokens)], [Ratio("x dense", ours.name, ("torch dense",))])
