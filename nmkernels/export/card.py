"""What a Hugging Face folder with a compressed model says of itself: its entry in ``config.json``, and the section of its model card."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..layouts import EXPERTS, EXPERTS_T

METHOD = "nmkernels"
CARD = "README.md"
ENCODING = {"encoding": "utf-8", "errors": "surrogateescape"}
"""How cards are read and written: bytes that are not UTF-8 stay as they are."""
HEADING = "## N:M sparse weights"
SECTION = f"""{HEADING}

Weights of this model are {{patterns}}stored compressed by nmkernels{{rounded}}. Where that is installed
(`pip install nmkernels`) every program opens the model that uses transformers. Elsewhere transformers does not know the format: it
refuses the file, or, with `ignore_mismatched_sizes=True`, begins with random weights.

```python
from transformers import {{kind}}

model = {{kind}}.from_pretrained("{{folder}}"{{options}})
```
"""


def is_dense(about: Any) -> bool:
    """Whether an entry of a table of ``save_compressed`` is of a dense layer with integers."""
    return isinstance(about, dict) and about.get("pattern") == "1:1" and "values" in about


def rounds_experts(about: Any) -> bool:
    """Whether such an entry is of a stack of experts with integers."""
    return isinstance(about, dict) and about.get("layout") in (EXPERTS, EXPERTS_T) and "values" in about


def first_of(layers: Mapping[str, Any]) -> str:
    """The layer under whose dense weight's name a folder with such a table has an empty tensor: the first sparse one, if there are any."""
    return min(layers, key=lambda name: (is_dense(layers[name]), name))


def patterns_of(layers: Mapping[str, Any]) -> list[str]:
    """The patterns in a table of ``save_compressed``, without those of dense integers."""
    return sorted({str(about.get("pattern")) for about in layers.values() if isinstance(about, dict) and not is_dense(about)})


def integers_of(layers: Mapping[str, Any]) -> list[str]:
    """The kinds of integers in such a table, as ``int4, a step per 128 columns``."""
    kinds = {(str(a["values"]), str(a.get("group"))) for a in layers.values() if isinstance(a, dict) and "values" in a}
    return [f"{values}, a step per {'row' if group == '0' else f'{group} columns'}" for values, group in sorted(kinds)]


def format_version(integers: bool, dense: bool = False, experts: bool = False) -> int:
    """The format version of a folder: the first with its names, which never changed in folders. ``dense``, ``experts``: whether dense
    weights and those of experts are integers."""
    return 8 if experts else 7 if dense else 5 if integers else 4


def config_entry(layers: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a compressed model."""
    entries = layers.values()
    version = format_version(bool(integers_of(layers)), any(map(is_dense, entries)), any(map(rounds_experts, entries)))
    return {"quant_method": METHOD, "version": version, "layers": copy.deepcopy(layers)}


def own_class(auto_map: Any, name: Any) -> tuple[str, str]:
    """(the auto class, the reference to code in the folder) that a configuration's ``auto_map`` has for the class ``name``; else empty."""
    for auto, reference in (auto_map if isinstance(auto_map, dict) else {}).items():
        if isinstance(reference, str) and reference.rpartition(".")[2] == name:
            return auto, reference
    return "", ""


def opened_by(model: Any) -> tuple[str, str]:
    """(the name of the class whose ``from_pretrained`` opens a folder of ``model``, further options of that call)."""
    name = type(model).__name__
    auto, _ = own_class(getattr(model.config, "auto_map", None), name)
    return (auto, ", trust_remote_code=True") if auto else (name, "")


def write_card(folder: Any, model: Any, layers: Mapping[str, Any]) -> None:
    """Add the section on loading ``model`` to the folder's model card, or write a card; existing text is kept."""
    from huggingface_hub import ModelCard, ModelCardData

    path = Path(folder) / CARD
    integers = integers_of(layers)
    rounded = f", with values in {'; '.join(integers)}" if integers else ""
    kind, options = opened_by(model)
    patterns = patterns_of(layers)
    sparse = f"{', '.join(patterns)} sparse and " if patterns else ""
    section = SECTION.format(patterns=sparse, rounded=rounded, kind=kind, folder=path.parent.name, options=options)
    if not path.exists():
        data = ModelCardData(library_name="transformers", tags=[METHOD])
        path.write_text(f"---\n{data.to_yaml()}\n---\n\n# {path.parent.name}\n\n{section}", **ENCODING)
        return
    text = path.read_text(**ENCODING)
    with suppress(Exception):  # a header that cannot be parsed is kept
        card: Any = ModelCard(text)
        card.data.tags = [*(card.data.tags or ()), *({METHOD} - set(card.data.tags or ()))]
        text = str(card)
    if HEADING not in text:
        text = f"{text.rstrip()}\n\n{section}"
    path.write_text(text, **ENCODING)


def end_card(folder: Path, heading: str, text: str) -> None:
    """Make ``text`` the last section of the folder's model card, in place of an earlier one with that heading."""
    card = (folder / CARD).read_text(**ENCODING).partition(heading)[0].rstrip()
    (folder / CARD).write_text(f"{card}\n\n{heading}\n\n{text}", **ENCODING)
