"""English-German text pairs from programs' message catalogs, cleaned, split and tokenised, for the task ``translation``."""

from __future__ import annotations

import gettext
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .data import deb_files, save

LOCALE = "de/LC_MESSAGES/"
"""The folder of the catalogs in a package, after any prefix."""

WORDS = (2, 25)
"""The fewest and the most words of a source."""

RATIO, LETTERS = 3, 0.75
"""The largest ratio of the lengths of a pair's texts, and the least share of letters."""

HELD_OUT = ("coreutils", "mc-data")
"""Packages held out from training: a third of their texts are sentences of five words or more, on subjects of their own."""

VALIDATION, TEST = 2, 4
"""Percent of the other packages' sources used for choosing rates and for the test, selected by a hash of the text."""

VOCABULARY = 2000
"""Size of the byte-level BPE for both languages, learned from the training pairs."""

PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")

LONGEST = 48
"""The most tokens of a text, including its end; pairs with a longer one are left out."""


class Pair(NamedTuple):
    """A text in English and German, and the package that it comes from."""

    package: str
    source: str
    target: str


@dataclass(frozen=True)
class Tokens:
    """Pairs as padded ids, ``[pairs, LONGEST]`` each (int16): sources end with ``END``, targets begin with ``BEGIN`` as well."""

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source)

    def take(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """These pairs (int64), cut to the longest of them."""
        return trim(self.source[which]), trim(self.target[which])

    def order(self, which: Tensor) -> Tensor:
        """The permutation that sorts these pairs by the longer text, so that neighbours make a batch with little padding."""
        source, target = ((side[which] != PAD).sum(1) for side in (self.source, self.target))
        return torch.argsort(torch.maximum(source, target) * LONGEST + target, stable=True)


@dataclass(frozen=True)
class Translations:
    """The data of the task.

    Args:
        tokens: by split: ``train``, ``val``, ``test``, ``packages``.
        texts: the pairs of the evaluated splits.
        tokenizer: a ``tokenizers.Tokenizer``.
        digest: of every pair, split and id.
    """

    tokens: dict[str, Tokens]
    texts: dict[str, list[Pair]]
    tokenizer: Any
    digest: str


def trim(ids: Tensor) -> Tensor:
    """``ids`` as int64, without trailing columns of padding."""
    return ids[:, : int((ids != PAD).sum(1).max())].long()


def clean(text: str) -> str:
    """Remove tags, accelerator marks (``_``, ``&`` or ``~`` before a letter) and line breaks.

    Example:
        >>> clean("<b>Save</b> _As…")
        'Save As…'
    """
    return " ".join(re.sub(r"[_&~](?=\w)", "", re.sub(r"<[^>]*>", " ", text)).split())


def usable(source: str, target: str) -> bool:
    """Whether a cleaned pair is long enough, made of words, and translated."""
    lengths = sorted((len(source), len(target)))
    return (
        WORDS[0] <= len(source.split()) <= WORDS[1]
        and source != target
        and 0 < lengths[1] <= RATIO * lengths[0]
        and all(sum(map(str.isalpha, text)) >= LETTERS * len(text.replace(" ", "")) for text in (source, target))
    )


def messages(catalog: bytes) -> Iterator[tuple[str, str]]:
    """(message, translation) of a compiled catalog (.mo), with only the first plural form and without contexts."""
    # gettext has no other list of messages; keys are messages, or (message, number) for plural forms
    found: dict[str | tuple[str, int], str] = gettext.GNUTranslations(io.BytesIO(catalog))._catalog  # type: ignore[attr-defined]
    for key, translation in found.items():
        message, number = (key, 0) if isinstance(key, str) else key
        if number == 0:
            yield message.rpartition("\x04")[2], translation


def pairs(packages: Mapping[str, Path]) -> list[Pair]:
    """The cleaned pairs of these Debian packages, each source once, in a fixed order."""
    found: dict[str, Pair] = {}
    for package in sorted(packages):
        catalogs = dict(deb_files(packages[package], lambda name: LOCALE in name and name.endswith(".mo")))
        for name in sorted(catalogs):
            for message, translation in messages(catalogs[name]):
                source, target = clean(message), clean(translation)
                if usable(source, target):
                    found.setdefault(source, Pair(package, source, target))
    return list(found.values())


def letters(text: str) -> str:
    """The lower-case letters of a text: equal for texts that differ only in case, punctuation and numbers.

    Example:
        >>> letters("Open file (2)…") == letters("open File")
        True
    """
    return re.sub(r"[\W\d_]+", "", text.casefold())


def split(found: Iterable[Pair], held_out: Sequence[str] = HELD_OUT) -> dict[str, list[Pair]]:
    """Split into ``train``; ``val`` and ``test``, other texts of the same packages; and ``packages``, texts of held-out packages.

    No text of the last three has the same letters as a source or a target of ``train``, or describes a command-line option (``-``). They
    are in the order of a hash, so that a prefix is a fair sample.
    """
    parts: dict[str, list[Pair]] = {"train": [], "val": [], "test": [], "packages": []}
    for pair in found:
        share = _number(pair) % 100
        name = "val" if share < VALIDATION else "test" if share < VALIDATION + TEST else "train"
        parts["packages" if pair.package in held_out else name].append(pair)
    sources = {letters(pair.source) for pair in parts["train"]}
    targets = {letters(pair.target) for pair in parts["train"]}
    for name in ("val", "test", "packages"):
        apart = (p for p in parts[name] if letters(p.source) not in sources and letters(p.target) not in targets)
        parts[name] = sorted((p for p in apart if p.source[0] != "-"), key=_number)
    return parts


def _number(pair: Pair) -> int:
    return int.from_bytes(hashlib.blake2b(letters(pair.source).encode(), digest_size=8).digest(), "big")


def translations(packages: Mapping[str, Path], cache: Path) -> Translations:
    """The packages' pairs, split and tokenised; read from a file in ``cache`` if there is one."""
    import tokenizers

    made_of = [Path(__file__).read_text(), tokenizers.__version__, *(f"{p.name} {p.stat().st_size}" for _, p in sorted(packages.items()))]
    path = cache / f"translation-{_digest(made_of)}.pt"
    if not path.exists():
        _save(path, split(pairs(packages)))
    cached = torch.load(path, weights_only=True)
    tokens = {name: Tokens(*part) for name, part in cached["tokens"].items()}
    texts = {name: [Pair(*pair) for pair in part] for name, part in cached["texts"].items()}
    return Translations(tokens, texts, tokenizers.Tokenizer.from_str(cached["tokenizer"]), cached["digest"])


def _save(path: Path, parts: dict[str, list[Pair]]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in parts["train"] for text in (pair.source, pair.target)), trainer)
    tokens, texts = {}, {}
    for name, part in parts.items():
        source, target = ([e.ids for e in tokenizer.encode_batch([getattr(p, side) for p in part])] for side in ("source", "target"))
        short = [i for i in range(len(part)) if max(len(source[i]), len(target[i]) + 1) < LONGEST]
        tokens[name] = (_padded([source[i] + [END] for i in short]), _padded([[BEGIN, *target[i], END] for i in short]))
        texts[name] = [tuple(part[i]) for i in short]
    ids = [str(side.tolist()) for part in tokens.values() for side in part]
    digest = _digest([*ids, *(text for part in texts.values() for pair in part for text in pair)])
    del texts["train"]  # never evaluated
    content = {"tokens": tokens, "texts": texts, "tokenizer": tokenizer.to_str(), "digest": digest}
    save(content, path)


def _padded(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in rows], dtype=torch.int16)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()
