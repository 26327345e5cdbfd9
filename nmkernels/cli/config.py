"""The settings of a training run: defaults, the demo's, what the user gave, and what a checkpoint remembers.

``--set KEY=VALUE``: keywords of a recipe from the command line, each as the type that the recipe's field declares.
"""

from __future__ import annotations

import argparse
import ast
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .. import recipes
from ..models import GPTConfig
from ..pattern import CheckpointError, Pattern, RecipeError
from ..recipes import Recipe
from ..recipes.registry import find, suggestion
from ..recipes.text import parse

BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NOT_HERE = {"pattern": "it stands behind the recipe's name, --recipe NAME:N:M", "total_steps": "it is the length of the run, --steps"}
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "none"}


def options(recipe: type[Recipe], texts: Iterable[str]) -> dict[str, Any]:
    """The keywords that ``texts`` set for ``recipe``; of one given twice, the last counts.

    Raises:
        RecipeError: a text is not KEY=VALUE, the recipe has no such keyword, or the value is of another type.
    """
    return dict(_option(recipe, text) for text in texts)


def _option(recipe: type[Recipe], text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise RecipeError(f"--set {text}: write it as KEY=VALUE, for instance --set decay=2e-4.")
    if key in NOT_HERE:
        raise RecipeError(f"--set {text}: {key} is not set here; {NOT_HERE[key]}.")
    known = [f.name for f in fields(recipe) if f.name not in NOT_HERE]
    if key not in known:
        near = suggestion(key, known) or "."
        takes = f"It takes {', '.join(known)}" if known else "It takes none"
        raise RecipeError(
            f"--set {text}: {recipe.name} has no keyword {key!r}{near} {takes}; see `python -m nmkernels recipes {recipe.name}`."
        )
    allowed = _members(get_type_hints(recipe)[key])
    try:
        return key, _value(value, allowed)
    except ValueError as error:
        kinds = " or ".join(WORDS.get(kind.__name__, kind.__name__) for kind in allowed)
        raise RecipeError(f"--set {text}: {key} of {recipe.name} is {kinds}, and {value!r} is not.") from error


def _members(hint: Any) -> list[Any]:
    """The plain types of an annotation such as ``float | int | None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _members(part)]
    if get_origin(hint) is Literal:
        return [str]
    return [get_origin(hint) or hint]


def _value(text: str, allowed: list[Any]) -> Any:
    word = text.strip().lower()
    if word == "none" and type(None) in allowed:
        return None
    if word in BOOL and bool in allowed:
        return BOOL[word]
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in allowed:
        return text
    try:
        value = ast.literal_eval(text)  # a tuple or a table
    except (ValueError, SyntaxError):
        raise ValueError(text) from None
    if not any(isinstance(value, kind) for kind in allowed if isinstance(kind, type)):
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run; a checkpoint resumes only under the same ones.

    ``recipe`` is ``name:N:M`` with ``options`` for its keywords; ``steps``, ``batch`` (sequences) and ``context`` (bytes) set the
    amount of training; ``lr`` rises over ``warmup`` (a share of the steps), then falls along a cosine to a tenth. β₂ is 0.99 because
    short runs cannot fill the window of 1/(1−β₂) steps that Adam's usual 0.999 averages over.
    """

    recipe: str = "step:2:4"
    options: dict[str, Any] = field(default_factory=dict)
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
        """The sizes of the model, and its activation."""
        return GPTConfig(width=self.width, layers=self.layers, heads=self.heads, context=self.context, activation=self.activation)

    @property
    def tokens(self) -> int:
        """Bytes that the whole run trains on."""
        return self.steps * self.batch * self.context

    def build_recipe(self) -> Recipe:
        """The recipe, with the run's length.

        Raises:
            RecipeError: a value is out of range. PatternError: N:M is not usable.
        """
        return recipes.get(self.recipe, total_steps=self.steps, **self.options)


DEMO: dict[str, Any] = {"steps": 800}
"""Under four minutes on two cores, twin included: 1.6 M bytes of text for each of the two."""


def settings(args: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values that the user asked for, by option or by ``--demo``; options left out are absent.

    Args:
        saved: the settings of the checkpoint that is resumed, whose recipe ``--set`` is for.

    Raises:
        RecipeError: no recipe has that name, or ``--set`` is of no use to it. PatternError: N:M is not usable.
    """
    asked = dict(DEMO) if args.demo else {}
    names = {f.name for f in fields(TrainConfig)} - {"options"}
    asked.update({name: value for name, value in vars(args).items() if name in names and value is not None})
    spec = asked.get("recipe", (saved or {}).get("recipe", TrainConfig.recipe))
    name, pattern, inside = parse(str(spec))
    cls = find(name)
    if "recipe" in asked:
        asked["recipe"] = f"{cls.name}:{Pattern(cls.pattern if pattern is None else pattern)}"
        if inside:
            asked["options"] = inside
    if args.set:
        asked["options"] = {**asked.get("options", {}), **options(cls, args.set)}
    return asked


def fresh(asked: dict[str, Any]) -> TrainConfig:
    """The configuration of a new run; its activation is one that the recipe can work on where the user named none."""
    config = TrainConfig(**asked)
    needs = "activation" not in asked and config.build_recipe().final_activation() is not None
    return replace(config, activation="relu2") if needs else config


def resumed(asked: dict[str, Any], saved: dict[str, Any], path: object) -> TrainConfig:
    """The configuration of a checkpoint, once it agrees with what the user asked for now.

    Raises:
        CheckpointError: it was written by another version, or an option differs; the message lists which.
    """
    try:
        config = TrainConfig(**saved)
    except TypeError as error:
        raise CheckpointError(f"{path}: its settings are not those of this version of nmkernels ({error}).") from error
    have = asdict(config)
    differ = [f"{name} is {have[name]} there and {value} here" for name, value in asked.items() if have[name] != value]
    if differ:
        raise CheckpointError(
            f"{path} is of another run: {'; '.join(differ)}. Leave those options out to resume, or start anew in another --out."
        )
    return config
