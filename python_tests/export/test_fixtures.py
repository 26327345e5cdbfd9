"""Files of earlier versions load for ever: every form that was ever written, against the dense tensors that its writer knew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nmkernels as nm
from nmkernels.testing import equal_bits
from python_tests.export.editing import parts
from python_tests.export.fixtures.make import HISTORY, HUGGING_FACE, compressed, contents, dense, expected

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = [kind for kinds in HISTORY.values() for kind in kinds]


def place(kind: str) -> Path:
    return FIXTURES / (kind if kind in HUGGING_FACE else f"{kind}.safetensors")


def check(model: nn.Module, kind: str) -> None:
    """The model holds what the fixture's writer knew, no layer is left dense, and it runs."""
    held, want = contents(model), load_file(FIXTURES / expected(kind))
    assert held.keys() - want.keys() <= {"again", "again.bias", "head.weight", "lm_head.weight"} and want.keys() <= held.keys()
    for name, value in held.items():
        assert equal_bits(value, want[name if name in want else ALIASES[name]]), name


ALIASES = {"again": "a", "again.bias": "a.bias", "head.weight": "embed.weight", "lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("on", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_load_compressed(kind: str, on: str) -> None:
    if kind in (*HUGGING_FACE, "conv1d"):
        pytest.importorskip("transformers", minversion="5.0")
    model = dense(kind, on)
    for value in model.state_dict().values():
        value.zero_()
    loaded = nm.load_compressed(model, place(kind), keep_dense=kind == "adapter")
    check(loaded, kind)
    if kind == "shared":
        assert loaded.again is loaded.a
    if kind in ("linear", "shared"):
        assert loaded.head.weight is loaded.embed.weight
    if kind == "adapter":
        assert loaded[0].keep_dense and loaded[0].adapter is not None
    if kind in ("dense_integers", "llama_dense"):
        embedding, head = (loaded.embed, loaded.head) if kind == "dense_integers" else (loaded.model.embed_tokens, loaded.lm_head)
        assert embedding.values is head.values and (head.weight.kind, head.weight.group) == (("int4", 3) if kind[0] == "d" else ("int8", 0))
    if kind == "columns":
        assert loaded[0].order.tolist() == [i * 7 % 16 for i in range(16)]
    if kind == "integers":
        assert [(loaded[i].weight.kind, loaded[i].weight.group) for i in range(4)] == [("int8", 0), ("int8", 8), ("int4", 8), ("int4", 0)]


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_from_pretrained(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import nmkernels.integrations.hf  # noqa: F401

    model, about = transformers.AutoModelForCausalLM.from_pretrained(place(kind), output_loading_info=True)
    check(model, kind)
    assert not any(about.values()), about
    other = nm.load_compressed(dense(kind), place(kind))
    ids = torch.arange(4)[None]
    assert equal_bits(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_present_code_writes_what_it_reads(kind: str, tmp_path: Path) -> None:
    """A file of the present version holds the same tensors as the fixture, and loads to the same model."""
    if kind in (*HUGGING_FACE, "conv1d"):
        pytest.importorskip("transformers", minversion="5.0")
    model = compressed(kind, dense(kind))
    check(model, kind)
    nm.save_compressed(model, tmp_path / "m.safetensors")
    check(nm.load_compressed(dense(kind), tmp_path / "m.safetensors"), kind)
    if kind not in HUGGING_FACE:
        (old, metadata), (new, others) = parts(place(kind)), parts(tmp_path / "m.safetensors")
        assert len(new) == len(old) and json.loads(others["layers"]) == json.loads(metadata["layers"])
