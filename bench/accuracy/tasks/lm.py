"""GPT-2 of 124 and 350 million parameters on your own tokenised text: ``gpt-124m`` and ``gpt-350m``, for owners of a GPU.

``NMKERNELS_TOKENS`` is a folder with ``train.bin`` and ``val.bin``, each a sequence of uint16 tokens (GPT-2's tokenizer, or any other of
fewer than 50,304 tokens); nanoGPT's ``data/openwebtext/prepare.py`` writes them. Nothing is downloaded.

    NMKERNELS_TOKENS=folder python -m bench.accuracy run --tasks gpt-124m --methods dense srste-2e-4 --device cuda --bf16 --out mine
    NMKERNELS_TOKENS=folder torchrun --nproc-per-node 8 -m bench.accuracy run --tasks gpt-350m ... --parallel fsdp

Settings: those of the GPT-2 runs of FST (Hu et al., ICML 2024) and S-STE (Hu et al., NeurIPS 2024), whose published configuration
(github.com/thu-ml/2by4-pretrain-acc-examples) is nanoGPT's: context 1024, batches of 512 sequences (0.5 million tokens), AdamW with β =
(0.9, 0.95), weight decay 0.1 on matrices, gradients clipped at 1, no dropout, a warm-up and a cosine to a tenth of the peak, 6e-4; here the
search begins at the nearest rates of its grid. They train for 300,000 steps, 157 billion tokens: 4 days on one H100 for 124 million
parameters. Here it is 5,000 steps, 2.6 billion tokens, about 20 per parameter of the smaller model; ``NMKERNELS_LM_STEPS`` sets another
number, and runs of different lengths are different cases. Warm-up is 5 % of the steps instead of 2,000 steps.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.model import GPT, GPTConfig

from .base import Settings, Task, generator, task, to_model

VARIABLE, STEPS = "NMKERNELS_TOKENS", "NMKERNELS_LM_STEPS"
VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, padded to a multiple of 64."""

CONTEXT, BATCH = 1024, 512
VAL_WINDOWS = 1024
"""The most windows of ``CONTEXT`` tokens for an evaluation, spread over its half of ``val.bin``."""

SAMPLE = 1 << 20
"""Tokens of each end of a file that its digest covers, with its length; the whole of train.bin has gigabytes."""


class LanguageModel(Task):
    """GPT-2 with the output head tied to the embedding. All linear layers of the blocks can be sparse; embeddings and head stay dense.

    The first half of ``val.bin`` is for the search of rates, the second for reported results.

    Raises:
        RuntimeError: ``NMKERNELS_TOKENS`` does not name the folder, or a file in it is missing, too short, or has too large tokens.
    """

    config: GPTConfig
    batch_size = BATCH

    def __init__(self) -> None:
        folder = Path(os.environ.get(VARIABLE) or "nowhere")
        files = [folder / "train.bin", folder / "val.bin"]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise RuntimeError(
                f"the task {self.name!r} reads the folder that {VARIABLE} names ({folder}) and does not find {', '.join(missing)} there; "
                "write tokens to these files as uint16, as nanoGPT's data/openwebtext/prepare.py does, and set the variable."
            )
        # mapped, not read: a step touches half a million tokens of gigabytes
        self.train, self.val = (np.memmap(file, dtype=np.uint16, mode="r") for file in files)
        for file, tokens in zip(files, (self.train, self.val), strict=True):
            if len(tokens) < 2 * (self.config.context + 1):
                raise RuntimeError(f"{file} has {len(tokens)} tokens, too few for two sequences of {self.config.context}")
            largest = max(int(part.max()) for part in (tokens[:SAMPLE], tokens[-SAMPLE:]))
            if largest >= self.config.vocab:
                raise RuntimeError(f"{file} has the token {largest}; the model's vocabulary is {self.config.vocab}")
        digest = hashlib.blake2b(digest_size=8)
        for tokens in (self.train, self.val):
            digest.update(f"{len(tokens)} ".encode() + tokens[:SAMPLE].tobytes() + tokens[-SAMPLE:].tobytes())
        self.digest = digest.hexdigest()

    def model(self) -> nn.Module:
        model = GPT(self.config)
        model.lm_head.weight = model.tokens.weight
        return model

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = generator(seed, step)
        starts = torch.randint(len(self.train) - self.config.context, (self.batch_size,), generator=rng)
        return self._windows(self.train, starts)

    def _windows(self, tokens: np.ndarray, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = np.stack([tokens[start : start + self.config.context + 1] for start in starts.tolist()])
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        middle = len(self.val) // 2
        half = self.val[:middle] if tuning else self.val[middle:]
        count = (len(half) - 1) // self.config.context
        windows = torch.arange(count) if count <= VAL_WINDOWS else torch.arange(VAL_WINDOWS) * count // VAL_WINDOWS
        parts = (windows * self.config.context).split(self.most or len(windows))
        losses = [self.loss(model, to_model(model, *self._windows(half, part))).item() * len(part) for part in parts]
        return {"val_loss": sum(losses) / len(windows)}


def _settings(lr: float, seconds: float) -> Settings:
    steps = int(os.environ.get(STEPS) or 5000)
    return Settings(steps, lr, betas=(0.9, 0.95), tuning_seeds=1, patterns=("2:4", "1:8"), margin=0.01, seconds=seconds * steps / 5000)


@task("gpt-124m")
class GPT124M(LanguageModel):
    """12 layers, 768 wide, 12 heads; 16 sequences at a time."""

    config = GPTConfig(vocab=VOCABULARY, width=768, layers=12, heads=12, context=CONTEXT)
    settings = _settings(5.5e-4, 5_800)
    tokens = BATCH * CONTEXT
    most = 16


@task("gpt-350m")
class GPT350M(LanguageModel):
    """24 layers, 1024 wide, 16 heads; 8 sequences at a time."""

    config = replace(GPT124M.config, width=1024, layers=24, heads=16)
    settings = _settings(3e-4, 16_200)
    tokens = BATCH * CONTEXT
    most = 8
