"""Every architecture of transformers whose tiny model trains on a CPU: trained, finished, compressed, saved, loaded, dense again.

And pruned in one shot, by the masks of the inputs that layers have in the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nmkernels as nm
from nmkernels import ops
from nmkernels.layouts import CONV2D, MATRICES
from nmkernels.pattern import Pattern
from nmkernels.prune import prune_
from nmkernels.prune.base import resolve
from nmkernels.prune.hessians import rows_of
from nmkernels.prune.prune import choose
from nmkernels.train.parts import stored
from python_tests.house.paths import ROOT

transformers = pytest.importorskip("transformers", minversion="5.0")
from python_tests.integrations.architectures import ARCHITECTURES, UNTRAINED, Untrained, dense, loss_of, outputs, read, saved_  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("srste", {}),
    ("sste", {}),
    ("asp", {}),
    ("ste", {}),
    ("bimask", {}),
    ("proxsparse", {}),
    ("complementary", {}),
    *((name, {"total_steps": 2}) for name in ("slope", "maskllm", "lbc", "mdgf", "step", "ast")),
)
REFUSED = {
    "dac": "encoder.conv1 .* a convolution other than nn.Conv2d",
    "bit": "WeightStandardizedConv2d is a subclass of nn.Conv2d with behaviour of its own",
    "encodec": "a convolution other than nn.Conv2d",
    "falcon": "FalconLinear is a subclass of nn.Linear with behaviour of its own",
}
"""Architectures of which no layer can be made 2:4 sparse, and what the report says of their layers."""


def recipe(architecture: str) -> Any:
    """The recipe for an architecture, so that all take part, and each time the same."""
    name, options = RECIPES[zlib.crc32(architecture.encode()) % len(RECIPES)]
    return nm.recipes.get(f"{name}:2:4", **options)


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * max(float(t.nan_to_num().abs().max()) for t in one), equal_nan=True)


def there_and_back(architecture: str, folder: Path, load: Callable[[Path, str], None]) -> None:
    """Two steps of training, the compressed form, its files, which ``load`` reads, and back to dense."""
    tiny = dense(architecture)
    model = tiny.model
    kinds, keys = {name: type(m) for name, m in model.named_modules()}, model.state_dict().keys()
    try:
        handle = nm.sparsify_(model, recipe(architecture))
    except nm.RecipeError:  # of linear layers alone, and the model has none
        handle = nm.sparsify_(model, "ste:2:4")
    assert all(entry.reason for entry in handle.report.entries)
    optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model(**tiny.inputs)).backward()
        optimizer.step()
    # of an image's tower, say, to which nothing was shown; but what got a gradient while it was dense must run
    idle = {name for name, layer in handle.layers.items() if not layer.ran}
    bypassed = {name for name in idle if {name, f"{name}.weight"} & tiny.trained}
    assert not bypassed, f"their weights are read by other modules: {bypassed}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two steps are few
        handle.finish(allow_unused=True)
    finished = outputs(model, tiny.inputs)
    nm.compress_(model)
    close(outputs(model, tiny.inputs), finished)
    saved_(folder, tiny)
    load(folder, architecture)
    nm.densify_(model)
    close(outputs(model, tiny.inputs), finished)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert model.state_dict().keys() == keys


@pytest.mark.parametrize("architecture", ["bert", "mixtral", "vit"])
def test_a_few(architecture: str, tmp_path: Path) -> None:
    there_and_back(architecture, tmp_path, read)


@pytest.fixture(scope="module")
def reader() -> Iterator[Callable[[Path, str], None]]:
    """Another process, which loads what this one has saved; one for all, since it takes seconds to start."""
    command = [sys.executable, "-m", "python_tests.integrations.architectures"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def load(folder: Path, architecture: str) -> None:
            print(json.dumps([str(folder), architecture]), file=process.stdin, flush=True)
            answer = process.stdout.readline()  # type: ignore[union-attr]
            assert answer and (said := json.loads(answer)) == "ok", f"in the other process: {said if answer else 'it has ended'}"

        yield load
        process.stdin.close()  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every(architecture: str, tmp_path: Path, reader: Callable[[Path, str], None]) -> None:
    if any(architecture in names.split() for names in UNTRAINED.values()):
        with pytest.raises(Untrained):
            dense(architecture)
        return
    try:
        if architecture in REFUSED:
            with pytest.raises(nm.RecipeError, match=f"(?s){REFUSED[architecture]}"):
                nm.sparsify_(dense(architecture).model, "ste:2:4")
            return
        there_and_back(architecture, tmp_path, reader)
    except ImportError as error:
        pytest.skip(str(error).strip().partition("\n")[0])


# ---- one-shot pruning


ONE_BY_ONE = {"gemma3n_text": "KeyError: 'sliding_attention'"}
"""Architectures whose blocks cannot be run one by one, and why: later layers of Gemma 3n take keys and values of earlier ones."""


def batch(inputs: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Other numbers of the same form, where they say something."""
    g, made = torch.Generator().manual_seed(number), dict(inputs)
    for name, t in inputs.items():
        if number and not any(word in name for word in ("mask", "grid", "shapes", "bbox", "pos")):
            made[name] = 2 * t * torch.rand(t.shape[-1], generator=g) if t.is_floating_point() else t.roll(number, -1)
    return made


def drawn_alike(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Some models draw numbers."""
    torch.manual_seed(5)
    return model(**inputs)


@torch.no_grad()
def by_hand(model: Any, data: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Wanda's masks of all layers but experts, from their inputs in whole passes; by magnitude where there are fewer than four tokens."""
    pattern = Pattern("2:4")
    layers = {c.name: c for c in choose(model, pattern, None, resolve("wanda"))[0] if c.layout in (*MATRICES, CONV2D)}
    squares: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = rows_of((*args, *kwargs.values())[0], layers[name]).float()
        squares[name] += [row for row in (x[x.isfinite().all(1)].square(),) if len(row)]

    hooks = [
        c.module.register_forward_pre_hook(lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True)
        for name, c in layers.items()
    ]
    for each in data:
        drawn_alike(model, each)
    for hook in hooks:
        hook.remove()
    masks = {}
    for name, c in layers.items():
        size = torch.cat(squares[name]).sum(0) if sum(map(len, squares[name])) >= 4 else torch.ones(())
        least = size[size > 0].min() if bool(size.any()) else torch.ones(())
        masks[name] = ops.mask(c.matrix.float() * torch.where(size > 0, size, 1e-16 * least).sqrt(), pattern)
    return masks


def pruned_in_one_shot(architecture: str) -> None:
    """The masks are those of the inputs that layers have in the model."""
    tiny = dense(architecture)
    model = tiny.model.eval()
    data = [batch(tiny.inputs, number) for number in range(3)]
    want = by_hand(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few tokens
        handle = prune_(model, "2:4", data, method="wanda", sequential=False, forward=drawn_alike)
    why = ONE_BY_ONE.get(architecture, "")
    assert ("ran the whole model" in handle.report.remark) == bool(why) and why in handle.report.remark
    wrong = {name: float((stored(handle.layers[name].effective.pruned) != mask).float().mean()) for name, mask in want.items()}
    assert not {name: share for name, share in wrong.items() if share > 2e-3}


@pytest.mark.parametrize("architecture", ["gemma3n_text", "resnet", "mixtral"])
def test_a_few_in_one_shot(architecture: str) -> None:
    pruned_in_one_shot(architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_one_in_one_shot(architecture: str) -> None:
    if any(architecture in names.split() for names in UNTRAINED.values()):
        pytest.skip("no tiny model of it runs here")
    try:
        if architecture in REFUSED:
            with pytest.raises(nm.RecipeError, match=f"(?s){REFUSED[architecture]}"):
                pruned_in_one_shot(architecture)
            return
        pruned_in_one_shot(architecture)
    except ImportError as error:
        pytest.skip(str(error).strip().partition("\n")[0])
