"""The settings of a training run: the options of ``train``, their defaults, those of the demo, and those stored in a checkpoint."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from .. import recipes
from ..models import GPTConfig
from ..pattern import CheckpointError, Pattern, RecipeError
from ..recipes import Activation24, Recipe
from ..recipes.registry import find, parse, suggestion
from .ranks import PARALLEL

PLAIN = {"none": None, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SET_ELSEWHERE = {"pattern": "it follows the recipe's name, --recipe NAME:N:M", "total_steps": "it is the length of the run, --steps"}
"""Keywords of recipes that --set does not take, and how they are set."""


OPTIONS = {"decay": 2.0}
"""Keywords of the default recipe: λ is the best one of the task ``gpt`` in ``bench/accuracy``, a byte-level GPT with AdamW as here."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines the numbers of a run; a checkpoint is resumed only with the same settings.

    ``recipe`` is ``name:N:M`` with ``options`` for its keywords; ``steps``, ``batch`` (sequences) and ``context`` (bytes) set the
    amount of training; ``lr`` rises over ``warmup`` (a share of the steps), then falls along a cosine to a tenth. β₂ is 0.99 because
    Adam's usual 0.999 averages over a window of 1/(1−β₂) = 1000 steps, longer than many runs here.
    """

    recipe: str = "srste:2:4"
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    steps: int = 2000
    batch: int = 16
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    activation: str = "gelu"
    lr: float = 2e-3
    seed: int = 0
    warmup: float = 0.05
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(width=self.width, layers=self.layers, heads=self.heads, context=self.context, activation=self.activation)

    @property
    def tokens(self) -> int:
        """Number of training bytes over the whole run."""
        return self.steps * self.batch * self.context

    def build_recipe(self) -> Recipe:
        return recipes.get(self.recipe, total_steps=self.steps, **self.options)


DEMO: dict[str, Any] = {"steps": 800, "batch": 4, "width": 256, "layers": 2, "lr": 1e-3}
"""Wide enough that 2:4 speeds up generation, and short: under two minutes on two cores with the dense baseline."""


def settings(args: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that options or ``--demo`` name; the rest are absent. ``saved`` are the settings of the checkpoint that is resumed."""
    chosen = dict(DEMO) if args.demo else {}
    names = {f.name for f in fields(TrainConfig)} - {"options"}
    chosen.update({name: value for name, value in vars(args).items() if name in names and value is not None})
    name, pattern, options = parse(str(chosen.get("recipe", (saved or {}).get("recipe", TrainConfig.recipe))))
    cls = find(name)
    if "recipe" in chosen:
        chosen["recipe"] = f"{cls.name}:{Pattern(cls.pattern if pattern is None else pattern)}"
    options.update(option(text) for text in args.set or ())
    known = {f.name: f.type for f in fields(cls) if f.name not in SET_ELSEWHERE}
    for key, value in options.items():
        if key in SET_ELSEWHERE:
            raise RecipeError(f"--set does not take {key}: {SET_ELSEWHERE[key]}.")
        if key not in known:
            near, takes = suggestion(key, known) or ".", ", ".join(known) or "none"
            raise RecipeError(f"{cls.name} has no keyword {key!r}{near} It takes {takes}; see `python -m nmkernels recipes {cls.name}`.")
        if not _fits(value, get_type_hints(cls)[key]):
            raise RecipeError(f"{key} of {cls.name} takes {known[key]}; got {value!r}.")
    if saved is None and "recipe" not in chosen:
        options = {**OPTIONS, **options}
    if saved is None or options:
        chosen["options"] = options
    return chosen


def new_config(chosen: dict[str, Any]) -> TrainConfig:
    """The configuration of a new run; without ``--activation``, the activation that the recipe needs."""
    config = TrainConfig(**chosen)
    needs = "activation" not in chosen and isinstance(config.build_recipe(), Activation24)
    return replace(config, activation="relu2") if needs else config


def resumed_config(chosen: dict[str, Any], saved: dict[str, Any], path: object) -> TrainConfig:
    """The configuration stored in the checkpoint ``path``.

    Raises:
        CheckpointError: it is not of this version, or an option contradicts it.
    """
    try:
        config = TrainConfig(**saved)
    except TypeError as error:
        raise CheckpointError(f"{path}: it was saved by another version of nmkernels, with other settings ({error}).") from error
    have = asdict(config)
    differ = [f"{name} is {have[name]} there and {value} here" for name, value in chosen.items() if have[name] != value]
    if differ:
        raise CheckpointError(
            f"{path} is of another run: {'; '.join(differ)}. Leave those options out to resume, or start a new run in another --out."
        )
    return config


def option(text: str) -> tuple[str, Any]:
    """The keyword and the value of ``--set KEY=VALUE``; a value that is not a Python literal is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise RecipeError(f"--set {text}: write it as KEY=VALUE, for instance --set decay=2e-4.")
    word = value.strip()
    try:
        return key, PLAIN[word.lower()] if word.lower() in PLAIN else ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return key, value


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` matches an annotation such as ``float | int | None``; True is not a number."""
    kinds = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
    return bool in kinds if isinstance(value, bool) else isinstance(value, (*kinds, *[int] * (float in kinds)))


def _number(kind: type[int] | type[float], name: str, holds: Callable[[float], bool], problem: str) -> Callable[[str], Any]:
    """A ``type=`` for argparse: a number for which ``holds``; else argparse reports ``problem``."""

    def read(text: str) -> int | float:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{value} is {problem}")
        return value

    read.__name__ = name
    return read


positive = _number(int, "positive", lambda value: value >= 1, "below 1")
rate = _number(float, "rate", lambda value: 0 < value < float("inf"), "not a finite number above 0")
seed = _number(int, "seed", lambda value: 0 <= value < 2**63, "not between 0 and 2**63 - 1")


def path(text: str) -> Path:
    """A ``type=`` for argparse: a path that is not empty, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; pass a path, . for the current folder")
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--recipe", metavar="NAME:N:M", help="training recipe, default srste:2:4(decay=2.0); `python -m nmkernels recipes` lists them"
    )
    text = "keyword of the recipe, e.g. --set decay=2e-4; may be repeated; `python -m nmkernels recipes NAME` lists them"
    what.add_argument("--set", metavar="KEY=VALUE", action="append", help=text)
    what.add_argument("--data", metavar="FILE_OR_FOLDER", help="text to train on; default: the source of the Python standard library")
    what.add_argument("--demo", action="store_true", help="the settings of `make demo`, with --baseline: under two minutes on two cores")
    what.add_argument("--baseline", action="store_true", help="also train the dense baseline on the same batches, and compare")
    size = parser.add_argument_group("size")
    size.add_argument("--steps", type=positive, help="optimizer steps, default 2000")
    size.add_argument("--batch", type=positive, help="sequences per step, default 16")
    size.add_argument("--context", type=positive, help="bytes per sequence, default 128")
    size.add_argument("--width", type=positive, help="features of the model, default 128")
    size.add_argument("--layers", type=positive, help="transformer blocks, default 4")
    size.add_argument("--heads", type=positive, help="attention heads, default 4; divides the width")
    size.add_argument("--activation", metavar="NAME", help="gelu or relu2; default gelu, for the recipe act24 relu2")
    size.add_argument("--lr", type=rate, help="peak learning rate, default 2e-3")
    size.add_argument("--seed", type=seed, help="random seed of the weights and of the batches, default 0")
    run = parser.add_argument_group("the run")
    text = "folder for all results, new or empty; default runs/train, demo_out with --demo"
    run.add_argument("--out", metavar="DIR", type=path, help=text)
    text = "continue the run in --out, from its newest checkpoint or from CHECKPOINT"
    run.add_argument("--resume", metavar="CHECKPOINT", nargs="?", type=path, const=False, help=text)
    run.add_argument("--overwrite", action="store_true", help="replace the run in --out; other files there are kept")
    run.add_argument("--checkpoint-every", metavar="STEPS", type=positive, default=100, help="default 100")
    run.add_argument("--log-every", metavar="STEPS", type=positive, default=20, help="default 20")
    run.add_argument("--tensorboard", action="store_true", help="also write event files into --out")
    run.add_argument("--threads", type=positive, help="threads of PyTorch; default: PyTorch's choice")
    run.add_argument("--device", default="cpu", help="default cpu; with --parallel, cuda means one GPU per process")
    text = "how the processes that torchrun started share the work: ddp, fsdp, hsdp or tp; default none, one process"
    run.add_argument("--parallel", choices=PARALLEL, default="none", help=text)
    text = "with hsdp, the number of processes over which the model is sharded; default: those of one node"
    run.add_argument("--shard-ways", metavar="N", type=positive, help=text)
    run.add_argument("--json", action="store_true", help="print the result as JSON on stdout and everything else on stderr")
