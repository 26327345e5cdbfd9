"""Every architecture of transformers whose tiny model trains on a CPU: trained, finished, compressed, saved, loaded, dense again."""

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
    "dac": "encoder.conv1 .* a convolution of another kind than nn.Conv2d",
    "bit": "WeightStandardizedConv2d is a subclass of nn.Conv2d with behaviour of its own",
    "encodec": "a convolution of another kind than nn.Conv2d",
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
