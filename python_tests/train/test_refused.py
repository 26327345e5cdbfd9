"""What each recipe refuses, at once or at ``sparsify_``, and what it says of a run that is finished too early."""

import dataclasses
import math
import re
import warnings

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn import SquaredReLUMLP
from python_tests.recipes.loop import batches, mlp, snapshot
from python_tests.recipes.training import start, step

REFUSED = {
    **dict.fromkeys(["act24", "ast", "fst", "maskllm", "maxq", "mdgf", "sdgf", "slope", "step"], "total_steps"),
    **dict.fromkeys(["lbc:8:16(total_steps=10)", "maskllm:8:16(total_steps=10)"], "12870"),
    "act24(start=0, multiple=0)": "multiple=0",
    "act24(total_steps=5, start=5)": "leave none",
    "asp(start=0.5)": "total_steps",
    "asp(start=5, score=wanda)": "must be 0",
    "asp(start=5, score=existing)": "must be 0",
    "asp(permute=True, score=existing)": "out of their groups",
    "ast(total_steps=10, every=0)": "every",
    "bimask(criterion=norm)": "criterion='norm' is unknown; choose one of magnitude, count",
    "complementary(spacing=0)": "spacing",
    "fst(every=0)": "every=0",
    "fst(total_steps=10, end=0)": "leave none",
    "fst(end=None, mvue=approx, mvue_pattern='1:4')": "approx",
    "layerwise:2:8(rule=best)": "rule='best' is unknown.*erk, magnitude, energy",
    "layerwise:2:8(inner='srste:1:8')": "is 1:8 and LayerWise itself 2:8",
    "layerwise:2:8(total_steps=20, inner='step:2:8')": r"STEP\(pattern, inner",
    "layerwise:2:8(inner=dense)": "trains nothing sparse",
    "layerwise:2:8(inner=layerwise)": "share the budget out a second time",
    "layerwise:2:8(given={'0': 2})": "must be a table",
    "layerwise:2:8(given='{')": "is not JSON",
    "layerwise:2:8(rows={'0': 0})": "above 0",
    "layerwise:2:8(rows={'0': '2'})": "above 0",
    "lbc(end=0.5)": "total_steps",
    "lbc(start=10, end=10)": "must come after start",
    "lbc(end=10, exponent=0.0)": "exponent",
    "maskllm(total_steps=10, tau_end=0.0)": "tau_end",
    "maskllm(total_steps=10, lr_multiplier=1e999)": "lr_multiplier",
    "maxq(total_steps=10, tau=0.0)": "tau",
    "maxq(total_steps=10, levels=0)": "levels",
    "maxq(total_steps=10, start=4, end=4)": "leave none",
    "maxq:4:4(total_steps=10)": "prunes nothing",
    "mdgf(total_steps=20, start=0.6, end=0.6)": "leave none",
    "mdgf(total_steps=20, residual=0.0)": "residual",
    "mdgf(total_steps=20, residual=1.0)": "residual",
    "mdgf(total_steps=20, coefficient=0.0)": "coefficient",
    "mdgf(total_steps=20, coefficient=1e999)": "coefficient",
    "mdgf(total_steps=20, levels=0)": "levels",
    "proxsparse:1:4": "for 2:4, not 1:4",
    "proxsparse(decay=1e999)": "decay",
    "proxsparse(anchor=1.0, epsilon=0.0)": "epsilon=0",
    "proxsparse(scale_by_lr=1)": "True or False",
    "sdgf:1:8(total_steps=3)": "4 frames do not fit",
    "sdgf(total_steps=20, start=0.5, end=0.5)": "leave none",
    "slope(total_steps=9, rank=1.5)": "rank=1.5 must be a whole number, or a share",
    "slope(total_steps=9, start=9)": "start=9 leaves the adapters none of total_steps=9",
    "slope(total_steps=9, max_aspect=0.5)": "max_aspect=0.5 must be at least 1",
    "srste(decay='2e-4')": "decay",
    "sste(mvue=approx, mvue_pattern='1:4')": "n = 2",
    "step(t_min=5)": "t_max.*total_steps",
    "step(switch=fixed)": "start.*total_steps",
    "step(switch=fixed, start=0)": "step 0",
    "step(t_min=9, t_max=8)": "later than",
    "step(total_steps=10, switch=sometimes)": "relative, paper, paper_geometric, relative_norm, staleness",
    "step(total_steps=10, switch=arithmetic)": "is now called 'paper'",
    "step(total_steps=10, switch=geometric)": "is now called 'paper_geometric'",
    "step(total_steps=10, t_min=windw)": r't_min=\'windw\' must be "window"',
    "step(total_steps=10, clamp=0.0)": "clamp",
    "step(total_steps=10, threshold=0.0)": "threshold",
    "step(total_steps=20, inner=ast)": "AST cannot be its inner recipe",
    "step(total_steps=20, decay=0.1, inner=ste)": "set it on the inner recipe",
    "step:1:8(t_min=3, t_max=9, inner=mdgf)": "total_steps is needed",
    "step:1:8(total_steps=10, inner='srste:2:4')": "SRSTE is 2:4",
    "step:1:8(total_steps=99, inner='mdgf:1:4')": r'MdGf is 1:4 and STEP itself 1:8.*STEP\("1:4", inner=MdGf\("1:4"',
    "step:1:8(total_steps=99, inner=dense)": "begins with a dense phase",
    "step:1:8(total_steps=99, inner='step:1:8')": "begins with a dense phase",
    "step:1:8(total_steps=99, inner=mdgf(start=0.1))": "begins with a dense phase.*start=",
    "step:1:8(total_steps=99, inner=asp(start=3))": "begins with a dense phase.*start=",
    "step:1:8(total_steps=99, inner=asp(score=wanda))": "trained already.*magnitude",
    "step:1:8(total_steps=99, inner=nonesuch)": "no recipe is called",
    "step:1:8(total_steps=99, inner=mdgf(dese=1))": "dese",
    "vnm:8:16": "N ≤ 4 ≤ M",
    "vnm:1:2": "N ≤ 4 ≤ M",
    "vnm:2:8(v=0)": "at least 1",
}


def test_bad_configuration():
    wrong = {}
    for text, words in REFUSED.items():
        try:
            wrong[text] = repr(nm.recipes.get(text))
        except (nm.NMError, TypeError) as error:
            if not re.search(words, str(error)):
                wrong[text] = str(error)
    assert wrong == {}


UNCHECKED = {"pattern", "shuffle", "permute", "hard", "kernel", "bias_corrected", "freeze"}
"""Checked elsewhere; or only True and False make sense."""


@pytest.mark.parametrize("name", nm.recipes.names())
def test_every_setting_refuses_what_it_cannot_be_by_its_name(name):
    recipe = nm.recipes.get("vnm:2:8" if name == "vnm" else name, total_steps=100)
    for setting in {f.name for f in dataclasses.fields(recipe)} - UNCHECKED:
        for bad in (-1, -1.5, math.nan, "nonesuch", [8], torch.tensor(1.5)):
            if (setting, bad) not in (("seed", -1), ("inner", "nonesuch")):
                said = {"gradient": "grad", "dense_features": "dense", "mvue_pattern": "pattern"}.get(setting, setting)
                with pytest.raises(nm.NMError, match=said):
                    dataclasses.replace(recipe, **{setting: bad})


def narrow():
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))


def without_a_scale():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    return model


def not_finite():
    model = mlp()
    nn.init.constant_(model[2].weight, torch.nan)
    return model


AT_SPARSIFY = {
    "act24(start=0)": (mlp, r"no nm\.nn\.SquaredReLU"),
    "act24:2:8(start=0)": (
        lambda: nn.ModuleDict({"mlp": SquaredReLUMLP(16, 36)}),
        "the 36 hidden features of 'mlp' are not a multiple of M=8",
    ),
    "complementary(spacing=4)": (narrow, r"layer '0'.*in_features=24 is not a multiple of spacing x M = 4 x 4"),
    "layerwise:2:8(given={'x*': '1:8'})": (mlp, "given names 'x.', which matches no sparse layer of the model, only '0', '2'"),
    "layerwise:2:8(given={'2': '4:8'})": (mlp, "leave 0.00% of the weights.*at least 4.17% at 1:8"),
    "layerwise:2:8(rule=None, given={'2': '2:5'})": (mlp, "layer '2'.*not a multiple of M=5"),
    "layerwise:2:8(rule=magnitude)": (not_finite, "layer '2' has NaN"),
    "sste": (without_a_scale, r"sparsify_: layer '2': .*all zero.*filter_fn"),
}


@pytest.mark.parametrize("text", AT_SPARSIFY)
def test_refused_models_stay_as_they_were(text):
    model, said = AT_SPARSIFY[text][0](), AT_SPARSIFY[text][1]
    before, types = snapshot(model), [type(module) for module in model.modules()]
    with pytest.raises(nm.NMError, match=said):
        nm.sparsify_(model, text)
    assert [type(module) for module in model.modules()] == types and list(model.state_dict()) == list(before)
    assert all(torch.equal(p, before[name]) or p.isnan().any() for name, p in model.named_parameters())


# ---- finished too early

EARLY = {
    ("act24(total_steps=12, start=6)", 3): "act24 is still in its dense warm-up, so the model has not been trained in the form",
    ("ast(total_steps=20, end=10)", 9): "ast is still raising its decay",
    ("ast(total_steps=20, end=10)", 10): "",
    ("fst(total_steps=20)", 3): "fst has not reached its dense end",
    ("maskllm(total_steps=100)", 1): "99 of 100 steps to go",
    ("maxq(total_steps=8, end=6)", 3): "still has 50.0% of its groups dense",
    ("mdgf:1:8(total_steps=20, start=4, end=14)", 5): "mdgf still lets 54.9% of each pruned weight through.*total_steps",
    ("mdgf:1:8(total_steps=20, start=4, end=14)", 11): "mdgf still lets 1.5% of each pruned weight through.*total_steps",
    ("mdgf:1:8(total_steps=20, start=4, end=14)", 14): "",
    ("sdgf:1:8(total_steps=20)", 6): "sdgf is still at 4:8",
    ("slope(total_steps=20, rank=2, start=15)", 10): "slope has not trained its adapters.*total_steps",
    ("step:2:8(total_steps=20, inner=vnm(v=8))", 1): "dense phase",
    ("step:1:8(total_steps=20, switch=fixed, start=6, inner=sdgf)", 3): "dense phase",
    ("step:1:8(total_steps=20, switch=fixed, start=6, inner=sdgf)", 9): "still at 4:8",
    ("step:1:8(total_steps=20, switch=fixed, start=6, inner=sdgf)", 20): "",
}


@pytest.mark.parametrize(("text", "steps"), EARLY)
def test_finishing_early_is_reported(text, steps):
    model, handle, optimizer = start(nm.recipes.get(text))
    for batch in batches(steps):
        step(model, optimizer, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.finish()
    said = EARLY[text, steps]
    assert len(caught) == bool(said)
    if said:
        with pytest.raises(UserWarning, match=said):
            raise caught[0].message
    for layer in handle.layers.values() if handle.recipe.final != "dense" else ():
        assert nm.ops.is_nm(layer.weight.detach(), layer.pattern)
