"""Fine-tuning BERT-base on four tasks of GLUE: ``glue-rte``, ``glue-sst2``, ``glue-qnli`` and ``glue-mnli``, for owners of a GPU.

``NMKERNELS_GLUE`` is the folder of GLUE's own archives, with ``RTE/train.tsv``, ``RTE/dev.tsv`` and so on (``SST-2``, ``QNLI``, ``MNLI``
with ``dev_matched.tsv``); ``NMKERNELS_HF_MODEL`` is the folder of a checkpoint with its tokenizer, such as bert-base-uncased. Nothing is
downloaded.

    NMKERNELS_GLUE=folder NMKERNELS_HF_MODEL=checkpoint \\
        python -m bench.accuracy run --tasks glue-rte glue-sst2 --methods dense step-10 --device cuda --bf16 --out mine

Settings: those of BERT's paper (Devlin et al., NAACL 2019, section 4.1), batches of 32 and 3 epochs, with the linear decay, the warm-up of
10 % and the weight decay of 0.01 of its code; at most 128 tokens. The paper's rates are 2e-5 to 5e-5; the search begins at 3e-5.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..spec import TUNING_SEEDS
from .base import Settings, Task, generator, library, task, to_model

FOLDER, MODEL = "NMKERNELS_GLUE", "NMKERNELS_HF_MODEL"
BATCH, EPOCHS, LONGEST = 32, 3, 128

NLI = ("entailment", "not_entailment")


def _settings(texts: int) -> Settings:
    steps = -(-EPOCHS * texts // BATCH)
    seconds = 60 + 0.025 * steps  # an estimate: so short texts are bound by the launches of kernels
    return Settings(steps, 3e-5, warmup=0.1, floor=0.0, decay="linear", weight_decay=0.01, patterns=("2:4", "1:8"), seconds=seconds)


class Glue(Task):
    """Classification of a text or of a pair. All linear layers of the encoder, and the pooler, can be sparse; embeddings and the classifier
    stay dense.

    GLUE's test sets have no public labels: reported results are on its development set. The search of rates trains on nine tenths of the
    training texts and is evaluated on the others.

    Raises:
        RuntimeError: a variable is not set, a file is missing or has other columns, or transformers is not installed.
    """

    folder: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    """Of the text, or of the two of a pair, and of the label."""

    classes: ClassVar[tuple[str, ...]] = NLI
    dev: ClassVar[str] = "dev.tsv"

    def __init__(self) -> None:
        for variable, what in ((FOLDER, "the folder of GLUE's data"), (MODEL, "the folder of a checkpoint, such as bert-base-uncased")):
            if not os.environ.get(variable):
                raise RuntimeError(f"the task {self.name!r} needs {variable} to name {what}; see bench/accuracy/tasks/glue.py")
        transformers = library(self.name, "transformers")
        transformers.logging.set_verbosity_error()  # every run would report that the classifier is new
        transformers.logging.disable_progress_bar()
        self.checkpoint = Path(os.environ[MODEL])
        self.build: Any = transformers.AutoModelForSequenceClassification
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.checkpoint, local_files_only=True)
        folder, hashed = Path(os.environ[FOLDER]) / self.folder, hashlib.blake2b(digest_size=8)
        read = []
        for name in ("train.tsv", self.dev):
            if not (folder / name).is_file():
                raise RuntimeError(f"{folder / name} is missing; download {self.folder} of GLUE (gluebenchmark.com) and unpack it there")
            hashed.update((folder / name).read_bytes())
            read.append(self._read(folder / name))
        (train, labels), (self.test, self.test_labels) = read
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
        self.train, self.labels = [train[i] for i in order], labels[order]
        self.held_out = max(1, len(train) // 10)
        self.digest = hashed.hexdigest()

    def _read(self, file: Path) -> tuple[list[tuple[str, ...]], Tensor]:
        """The texts or pairs of a file, and their classes; columns are found by the names in the first line."""
        names, *lines = (line.rstrip("\r").split("\t") for line in file.read_text(encoding="utf-8").split("\n") if line.strip())
        missing = [column for column in self.columns if column not in names]
        if missing:
            raise RuntimeError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")
        which = [names.index(column) for column in self.columns]
        picked = [[line[i] for i in which] for line in lines if len(line) == len(names) and line[which[-1]] in self.classes]
        if not picked:
            raise RuntimeError(f"{file} has no line with one of the labels {', '.join(self.classes)}")
        return [tuple(text) for *text, _ in picked], torch.tensor([self.classes.index(label) for *_, label in picked])

    def model(self) -> nn.Module:
        model: nn.Module = self.build.from_pretrained(
            self.checkpoint, local_files_only=True, dtype=torch.float32, num_labels=len(self.classes), ignore_mismatched_sizes=True
        )
        return model.train()  # from_pretrained leaves it in evaluation mode, without dropout

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """Every epoch has all texts once, in an order of its own."""
        n = len(self.train) - (self.held_out if seed in TUNING_SEEDS else 0)
        rows = range((step - 1) * BATCH, step * BATCH)
        orders = {row // n: torch.randperm(n, generator=generator(seed, row // n)) for row in (rows[0], rows[-1])}
        which = [int(orders[row // n][row % n]) for row in rows]
        return self._tokens([self.train[i] for i in which], self.labels[which])

    def _tokens(self, texts: list[tuple[str, ...]], labels: Tensor) -> tuple[Tensor, ...]:
        """Token ids, which of them are tokens, to which text of a pair they belong, and the labels."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        found = self.tokenizer(*columns, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt", return_token_type_ids=True)
        return found["input_ids"], found["attention_mask"], found["token_type_ids"], labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(_logits(model, batch), batch[3])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        texts, labels = (self.train[-self.held_out :], self.labels[-self.held_out :]) if tuning else (self.test, self.test_labels)
        loss, right = 0.0, 0
        for part in torch.arange(len(texts)).split(4 * BATCH):
            batch = to_model(model, *self._tokens([texts[i] for i in part], labels[part]))
            logits = _logits(model, batch)
            loss += F.cross_entropy(logits, batch[3], reduction="sum").item()
            right += int((logits.argmax(-1) == batch[3]).sum())
        return {"val_loss": loss / len(texts), "accuracy": 100 * right / len(texts)}


def _logits(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits: Tensor = model(input_ids=batch[0], attention_mask=batch[1], token_type_ids=batch[2]).logits
    return logits


def _shares(tokens: int) -> dict[str, float]:
    """The pooler and the classifier see one token of each text."""
    return {"bert.pooler": 1 / tokens, "classifier": 1 / tokens}


@task("glue-rte")
class RTE(Glue):
    """2,490 pairs for training and 277 for evaluation, of about 70 tokens."""

    folder, columns = "RTE", ("sentence1", "sentence2", "label")
    settings = _settings(2_490)
    tokens, shares = BATCH * 70, _shares(70)


@task("glue-sst2")
class SST2(Glue):
    """67,349 phrases for training and 872 sentences for evaluation, of about 13 and 25 tokens."""

    folder, columns, classes = "SST-2", ("sentence", "label"), ("0", "1")
    settings = _settings(67_349)
    tokens, shares = BATCH * 13, _shares(13)


@task("glue-qnli")
class QNLI(Glue):
    """104,743 questions with a sentence for training and 5,463 for evaluation, of about 50 tokens."""

    folder, columns = "QNLI", ("question", "sentence", "label")
    settings = _settings(104_743)
    tokens, shares = BATCH * 50, _shares(50)


@task("glue-mnli")
class MNLI(Glue):
    """392,702 pairs for training and 9,815 matched ones for evaluation, of about 40 tokens."""

    folder, columns, dev = "MNLI", ("sentence1", "sentence2", "gold_label"), "dev_matched.tsv"
    classes = ("entailment", "neutral", "contradiction")
    settings = _settings(392_702)
    tokens, shares = BATCH * 40, _shares(40)
