"""Byte GPTs of several widths on the source of ten Python libraries, of which a run reads a small part; ``fetch code`` downloads 33 MB.

What a sparse model is worth is seen beside a smaller dense one, and at the end of a training run rather than at its beginning: runs are
long, and hardly a byte is read twice.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import nmkernels as nm
from examples.train_gpt.data import Corpus, make_corpus
from examples.train_gpt.model import GPTConfig
from nmkernels import ops
from nmkernels.nn import NMWeight

from .. import data
from .base import task, to_model
from .gpt import CONTEXT, ByteGPT

WIDTHS = {32: 150, 48: 180, 64: 230, 96: 360, 128: 520}
"""Width -> CPU-seconds of a run."""

LARGER = {"code-1m": 120, "code-2m": 168, "code-4m": 240, "code-8m": 336, "code-10m": 360, "code-19m": 512}
"""Task -> width of models with about as many weights in their blocks."""

STEPS = 20_000
INTEGERS = ("int8", "int4")
CALIBRATION = 32
"""Batches on which ``nm.compress_`` rounds, the first ones of seed 0."""

WHOLE = "4:4"
"""The pattern that keeps everything, by which dense weights are rounded as sparse ones are."""

IN_8_BITS = ("tokens", "lm_head")
"""The embedding and the output head, in 8 bits where other layers have integers."""


class Code(ByteGPT):
    """Blocks of ``config``, evaluated with weights in bfloat16, and in integers where the run is not for choosing a rate.

    20,000 steps read 10 MB of 90. The rates are the two that are best for dense training of ``gpt`` at this length.
    """

    settings = replace(ByteGPT.settings, steps=STEPS, lr=1e-3, rates=(1e-3, 1.7e-3), patterns=("2:4", "1:4"), tuning_seeds=1, seeds=3)
    windows = 4096

    def __init__(self) -> None:
        self.read(corpus())

    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        found = super().evaluate(self.plain(model, torch.bfloat16), tuning)
        if not tuning:
            found |= {values: super(Code, self).evaluate(self.in_integers(model, values))["val_loss"] for values in INTEGERS}
        return found

    @torch.no_grad()
    def plain(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
        """A dense model that computes what ``model`` does, its weights rounded to ``dtype``."""
        new: Any = self.model().to(next(model.parameters()).device)
        new.load_state_dict(model.state_dict(), strict=False)
        for name, module in model.named_modules():
            if isinstance(module, NMWeight):
                new.get_submodule(name).weight.copy_(module.effective_weight())
        for parameter in new.parameters():
            parameter.copy_(parameter.to(dtype))
        return new

    def in_integers(self, model: nn.Module, values: str) -> nn.Module:
        """A copy with the layers of the blocks in ``values``, embedding and head in 8 bits, and all else in bfloat16."""
        new = self.plain(model)
        weights = [module.weight.detach() for name, module in new.blocks.named_modules() if isinstance(module, nn.Linear)]
        pattern = next(p for p in (*self.settings.patterns[::-1], WHOLE) if all(ops.is_nm(w, p) for w in weights))
        nm.recipes.adopt(new, pattern, lambda module, name: name.startswith("blocks.")).finish(allow_unused=True)
        nm.compress_(new, values=values, data=[to_model(new, self.batch(0, step)[0])[0] for step in range(CALIBRATION)])
        nm.compress_(new, values="int8", dense=IN_8_BITS)
        with torch.no_grad():
            for parameter in new.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(parameter.bfloat16())
        return new


def config(width: int) -> GPTConfig:
    """Two blocks of that width."""
    return GPTConfig(width=width, layers=2, heads=4, context=CONTEXT)


for _width, _seconds in WIDTHS.items():
    _own = {"config": config(_width), "settings": replace(Code.settings, seconds=_seconds), "__doc__": f"Width {_width}."}
    task(f"code-{_width}")(type(f"Code{_width}", (Code,), _own))


class LargerCode(Code):
    """Six blocks and a context of 256 bytes, for a GPU: 5000 steps of 16 kB read nine tenths of the text.

    All have the rate that is best for width 64 in long runs; no other is tried.
    """

    settings = replace(Code.settings, steps=5000, rates=(1e-3,), patterns=("2:4",), seconds=0)
    size = 64
    tokens = 64 * 256
    windows = 1024


for _name, _width in LARGER.items():
    _own = {"config": GPTConfig(width=_width, layers=6, heads=8, context=256), "__doc__": f"Width {_width}."}
    task(_name)(type(f"Larger{_width}", (LargerCode,), _own))


@task("code")
class CodeByLength(Code):
    """Width 64 again, in runs of several lengths, each with a rate of its own."""

    settings = replace(Code.settings, steps=30_000, lr=1.7e-3, rates=(), patterns=("2:4",), seconds=345)


@cache
def corpus() -> Corpus:
    """The text of every Python file of the libraries, of files that are equal only the first."""
    texts: dict[bytes, str] = {}
    for name, wheel in sorted(data.files("code").items()):
        with zipfile.ZipFile(wheel) as archive:
            for file in sorted(archive.namelist()):
                if file.endswith(".py"):
                    texts.setdefault(archive.read(file), f"{name}/{file}")
    return make_corpus({name: text for text, name in texts.items() if text and b"\0" not in text}, "ten Python libraries")
