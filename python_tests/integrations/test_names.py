"""Names of layers and adapters that other libraries' users pass: what matches nothing is an error with a similar name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.integrations.asp import ASP
from python_tests.integrations.folders import saved


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


@pytest.mark.parametrize("names", [["22"], "22"])
@pytest.mark.parametrize("argument", ["allowed_layer_names", "disallowed_layer_names"])
def test_of_asp(argument: str, names: Any) -> None:
    with pytest.raises(nm.RecipeError, match=f"ASP: {argument} names '22', which matches no layer of the model; did you mean '2'"):
        ASP.init_model_for_pruning(mlp(), **{argument: names})


def test_one_name_as_text() -> None:
    with pytest.raises(nm.RecipeError, match="layers that cannot be pruned to 2:4: '1': not in whitelist"):
        ASP.init_model_for_pruning(mlp(), allowed_layer_names="1")
    assert list(ASP.init_model_for_pruning(mlp(), disallowed_layer_names="2").layers) == ["0"]


def test_of_adapters() -> None:
    """``absorb`` dropped all adapters where none had the name."""
    peft = pytest.importorskip("peft")
    from nmkernels.integrations.peft import absorb, lost_by_merging, merge_and_prune

    model: Any = mlp()
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"]), adapter_name="first")
    before = copy.deepcopy(model.state_dict())
    for call in (absorb, lost_by_merging, merge_and_prune):
        with pytest.raises(
            nm.RecipeError, match="adapter_names names 'frist', which matches no adapter of the model; did you mean 'first'"
        ):
            call(model, ["frist"])
        with pytest.raises(nm.RecipeError, match="names 'other', which matches no adapter of the model, only 'first'"):
            call(model, ["first", "other"])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_of_nmconfig(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from nmkernels.integrations.hf import NMConfig

    folder = saved(tmp_path / "dense", tokenizer=False, layers=1)
    for name, said in (("q_porj", "; did you mean 'q_proj'"), ("mixer", ", only 'model'")):
        with pytest.raises(nm.RecipeError, match=f"NMConfig: skip names '{name}', which matches no layer of the model{said}"):
            transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=NMConfig("2:4", skip=["k_proj", name]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=NMConfig("2:4", skip=["lm_head", "mlp.up_proj"]))
    assert isinstance(model.model.layers[0].self_attn.q_proj, nm.CompressedLinear)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_the_group_of_nmconfig_is_a_whole_number() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import numpy as np

    from nmkernels.integrations.hf import NMConfig

    assert NMConfig("2:4", values="int4", group=np.int64(32)).to_json_string() == NMConfig("2:4", values="int4", group=32).to_json_string()
    for bad in (1.5, "32", -32, True):
        with pytest.raises(nm.NMError, match="NMConfig: group="):
            NMConfig("2:4", values="int4", group=bad)  # type: ignore[arg-type]
