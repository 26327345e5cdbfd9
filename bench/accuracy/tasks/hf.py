"""Fine-tuning a local Hugging Face checkpoint (GPT-2, BERT) on a text.

``NMKERNELS_HF_MODEL`` is the checkpoint's folder, ``NMKERNELS_HF_TEXT`` a text file or a folder of them. Nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.data import load_corpus

from .base import Settings, Task, generator, library, task, to_model

MODEL, TEXT = "NMKERNELS_HF_MODEL", "NMKERNELS_HF_TEXT"
CONTEXT, BATCH = 128, 16
MASKED = 0.15
"""Share of the tokens that a masked language model has to guess, as in BERT."""

VAL_WINDOWS = 256


@task("hf")
class HuggingFace(Task):
    """A causal or masked language model, according to the checkpoint's configuration; GPT-2's Conv1D layers become sparse too.

    Raises:
        RuntimeError: a variable is not set, or transformers is not installed.
    """

    settings = Settings(steps=2000, lr=1e-4)
    tokens = BATCH * CONTEXT

    def __init__(self) -> None:
        for variable, what in ((MODEL, "the folder of a checkpoint"), (TEXT, "a text file or folder")):
            if not os.environ.get(variable):
                raise RuntimeError(f"the task 'hf' needs {variable} to name {what}.")
        transformers = library(self.name, "transformers")
        self.folder = Path(os.environ[MODEL])
        config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        self.causal = any("CausalLM" in name or "LMHead" in name for name in config.architectures or ())
        self.kind: Any = transformers.AutoModelForCausalLM if self.causal else transformers.AutoModelForMaskedLM
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        corpus = load_corpus(os.environ[TEXT])
        self.train, self.val = (_tokens(tokenizer, part) for part in (corpus.train, corpus.val))
        self.mask_token = tokenizer.mask_token_id
        if not self.causal and self.mask_token is None:
            raise RuntimeError(
                f"{self.folder}: the checkpoint is not a causal model, and its tokenizer has no mask token for a masked one."
            )
        if min(len(self.train), len(self.val)) <= CONTEXT:
            raise RuntimeError(f"{os.environ[TEXT]}: the text has too few tokens for a context of {CONTEXT}; give more.")
        self.digest = corpus.digest

    def model(self) -> nn.Module:
        model: nn.Module = self.kind.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32)
        return model.train()  # from_pretrained leaves it in evaluation mode, without dropout

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = generator(seed, step)
        starts = torch.randint(len(self.train) - CONTEXT, (BATCH, 1), generator=rng)
        return self._with_labels(self.train[starts + torch.arange(CONTEXT)], rng)

    def _with_labels(self, ids: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.causal:
            return ids, F.pad(ids[:, 1:], (0, 1), value=-100)
        hidden = torch.rand(ids.shape, generator=rng) < MASKED
        return ids.masked_fill(hidden, self.mask_token), ids.masked_fill(~hidden, -100)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        rng = torch.Generator().manual_seed(0)
        count = (len(self.val) - 1) // CONTEXT
        windows = torch.arange(count) if count <= VAL_WINDOWS else torch.arange(VAL_WINDOWS) * count // VAL_WINDOWS
        losses, tokens = 0.0, 0
        for part in windows.split(BATCH):
            ids, labels = self._with_labels(self.val[part[:, None] * CONTEXT + torch.arange(CONTEXT)], rng)
            guesses = int((labels != -100).sum())
            if guesses:
                losses, tokens = losses + self.loss(model, to_model(model, ids, labels)).item() * guesses, tokens + guesses
        return {"val_loss": losses / tokens}


def _tokens(tokenizer: Any, text: Tensor) -> Tensor:
    written = bytes(text.tolist()).decode("utf-8", errors="replace")
    return torch.tensor(tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
