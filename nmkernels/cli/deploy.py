"""Deployment of a trained model: validate, finish, compress, save, load again, and check that the loaded model is the same."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..export import atomic_write, load_compressed, save_compressed, save_dense
from ..models import GPT, generate
from ..nn.compress import compress_
from ..nn.compressed import CompressedLinear
from ..ops.integers import BITS
from ..pattern import CheckpointError
from ..recipes import densify_
from .trainer import Trainer

FILE, DENSE_FILE, SAMPLE_FILE = "model.safetensors", "model-dense.safetensors", "sample.txt"
PROMPT = b"def "
SPEED_TOKENS, SPEED_ROUNDS = 64, 15
SAMPLE_TOKENS = 320


def deploy(trainer: Trainer, out: Path) -> dict[str, Any]:
    """Finish a trained model, write its files into ``out``, and return the measurements of the result."""
    result: dict[str, Any] = {"val_loss": trainer.validate()}
    model, handle = trainer.model.eval(), trainer.handle
    if handle is not None:
        handle.finish()
    save_dense(model, out / DENSE_FILE)
    if handle is None or handle.recipe.final == "dense":
        return {**result, "sample": _sample(model, out)}
    dense = copy.deepcopy(model)
    densify_(dense)
    compress_(model)
    save_compressed(model, out / FILE)
    reloaded = load_compressed(GPT(trainer.config.model).to(trainer.device).eval(), out / FILE)
    x, _ = next(trainer.corpus.val_batches(trainer.config.context, trainer.config.batch, trainer.config.batch))
    with torch.no_grad():
        logits, loaded, masked = (each(x.to(trainer.device)) for each in (model, reloaded, dense))
    result["reload"] = {"identical": torch.equal(logits, loaded), "max_difference_to_dense": (logits - masked).abs().max().item()}
    if not result["reload"]["identical"]:
        raise CheckpointError(f"{out / FILE}: the loaded model gives other logits than the saved one; please report this.")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear)}
    result["bytes"] = {
        "layers_dense": sum(dense.get_parameter(f"{name}.weight").nbytes for name in layers),
        "layers_compressed": sum(m.weight.nbytes + sum(p.nbytes for p in m.adapter or ()) for m in layers.values()),
        "file_dense": (out / DENSE_FILE).stat().st_size,
        "file_compressed": (out / FILE).stat().st_size,
    }
    rounded = {values: copy.deepcopy(model) for values in BITS}
    for values, one in rounded.items():
        compress_(one, values=values)
    result["rounded"] = {
        values: {"layers": sum(one.get_submodule(name).weight.nbytes for name in layers), "val_loss": trainer.validate(other=one)}
        for values, one in rounded.items()
    }
    result["tokens_per_s"] = speeds({"dense": dense, "compressed": model, **rounded})
    return {**result, "sample": _sample(model, out)}


def speeds(models: dict[str, GPT], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Tokens per second of greedy generation at batch 1: medians of alternating rounds, so that load on the machine affects all models."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(SPEED_ROUNDS + 1):
        for name, model in models.items():
            begin = clock()
            generate(model, PROMPT, SPEED_TOKENS, temperature=0)
            if i:  # the first round warms up
                times[name].append(clock() - begin)
    return {name: SPEED_TOKENS / statistics.median(t) for name, t in times.items()}


def _sample(model: GPT, out: Path) -> str:
    text = (PROMPT + generate(model, PROMPT, SAMPLE_TOKENS, temperature=0.7)).decode("utf-8", "replace")
    atomic_write(out / SAMPLE_FILE, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return text
