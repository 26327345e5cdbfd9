"""Each piece of advice appears in the costs that it is for, is not given elsewhere, and its speed-up is that of the changed costs."""

import pytest
import torch

import nmkernels as nm
from nmkernels.audit.advice import break_even, of_sparse
from nmkernels.audit.rules import Layer, LayerCosts, Rules
from nmkernels.gemm.devices import DEVICES, Device
from python_tests.audit.layer_zoo import Zoo

P = nm.Pattern("2:4")
H200 = {"device": "H200", "dtype": "bfloat16"}
A100 = {"device": "A100", "dtype": "bfloat16"}
NO_ESTIMATE = {"recipe": "fst:2:4(mvue=None, end=None)"}
NARROW = {"model": {"fc": (4096, 512)}}
SHORT = {"tokens": 2048}


def audited(**words):
    return nm.audit(**{"model": {"fc": (4096, 4096)}, "recipe": "fst:2:4(end=None)", "tokens": 8192, **H200, **words})


def advice_with(words="", **costs):
    """The advice on the first layer whose text has these words."""
    return [each for each in audited(**costs).layers[0].advice if words in each.text]


@pytest.mark.parametrize(
    ("words", "costs", "changed", "elsewhere"),
    [
        ("4:8 is not a 2:4 pattern", {"recipe": "srste:4:8"}, {"recipe": "srste:2:4"}, {"recipe": "srste:1:8"}),
        ('packed="auto"', {"recipe": nm.recipes.SRSTE("2:4", packed=False)}, {"recipe": "srste:2:4"}, {"recipe": "srste:2:4(packed=True)"}),
        ('packed="auto"', {"recipe": "srste:2:4(packed=False)"}, {"recipe": "srste:2:4"}, {"recipe": "srste:2:4"}),
        ("dgrad is dense", {"recipe": "srste:2:4"}, NO_ESTIMATE, {}),
        ("wgrad is dense", NO_ESTIMATE, {}, {}),
        ("the estimate for wgrad costs more", NARROW, {**NARROW, **NO_ESTIMATE}, {}),
        ("accumulate gradients", SHORT, {**SHORT, "accumulate": 8}, {"tokens": 16384}),
        ("float32 cannot use the sparse tensor cores", {"dtype": "float32"}, {}, {}),
    ],
)
def test_what_to_change_of_a_step(words, costs, changed, elsewhere):
    (advice,) = advice_with(words, **costs)
    assert advice.part == "step" and advice.speedup > audited(**costs).step
    # the weight stays float32 where the GEMMs do not
    assert advice.speedup == pytest.approx(audited(**changed).step, rel=0.02 if "float32" in words else 1e-6)
    assert not advice_with(words, **elsewhere)


def test_nothing_to_say_of_a_large_layer_with_three_sparse_gemms():
    assert advice_with(model={"fc": (16384, 16384)}, tokens=65536) == []


def test_sizes_that_tensor_cores_do_not_take():
    odd = {"fc": (4100, 4100)}
    (advice,) = advice_with("multiples of 64 outputs and 64 inputs: pad", model=odd)
    assert advice.detail == "to (4160,4160)" and audited(model=odd).step < 1 < advice.speedup
    assert advice.speedup < audited(model={"fc": (4160, 4160)}).step
    assert not advice_with("pad", model={"fc": (4112, 4096)}, **A100), "mma.sp takes 16 outputs"
    assert not advice_with("pad", model={"fc": (100, 100)}, recipe="srste:2:4", tokens=16, device="cpu", timer=lambda task: 1e-3)


def test_packing_is_found_where_it_is_set():
    inside = nm.recipes.get("step:2:4(inner='srste(packed=auto)')", total_steps=100)
    assert audited(recipe=inside).step == audited(recipe="srste:2:4").step
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    nm.sparsify_(model, "ste:2:4(packed=False)")
    assert advice_with('packed="auto"', model=model, recipe=None, tokens=65536)
    assert audited(recipe="sste:2:4(fp8=paper)").step < audited(recipe="sste:2:4").step, "emulated FP8 needs the dense layout"


def test_how_many_inputs_and_tokens_pay():
    (advice,) = advice_with("the estimate for wgrad costs more", **NARROW)
    pays = int(advice.detail.split()[2])
    assert 1100 <= pays <= 1340 and not advice_with("the estimate", model={"fc": (4096, pays)})
    shape = {"model": {"fc": (8192, 8192)}, **NO_ESTIMATE}
    (advice,) = advice_with("the step is too small", tokens=256, **shape)
    least = int(advice.detail.split()[-1])
    assert 1050 <= least <= 1350, "a float32 weight is packed: 7.25 bytes an element in place of 5.25"
    assert audited(tokens=least, **shape).step >= 1 > audited(tokens=int(least * 0.85), **shape).step
    assert not advice_with("too small", tokens=least, **shape)
    costs = LayerCosts(DEVICES["H200"], Layer((64, 64), 64, torch.bfloat16, torch.bfloat16), Rules(P, fprop=False))
    assert break_even(costs) is None, "a mask without a sparse GEMM never pays"


def test_what_is_left_dense_and_what_is_expanded():
    (advice,) = advice_with("leaves a dense model", recipe="fst:2:4(total_steps=100)")
    assert advice.part == "inference" and advice.speedup == pytest.approx(audited().inference)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    nm.sparsify_(model, "srste:4:8").finish(allow_unused=True)
    nm.compress_(model)
    costs = {"model": model, "recipe": None, "tokens": 4096}
    (advice,) = advice_with("keep_dense=True", **costs)
    assert audited(**costs).inference < 1
    model[0].keep_dense = True
    assert advice.speedup == audited(**costs).inference == 1.0 and not advice_with("keep_dense", **costs)


def test_a_layer_that_only_loses():
    small = {"model": {"fc": (64, 64)}, "tokens": 64}
    (advice,) = advice_with("leave it dense (filter_fn)", **small)
    assert advice.speedup == 1.0 and audited(**small).step < 0.9 and not advice_with("leave it dense")


def test_16_bits_on_a_cpu_that_multiplies_them_fast():
    slow = Device("slow", 1e10, {"bfloat16": 1e12}, dict.fromkeys(("fprop", "dgrad", "wgrad"), 0.5), 0.5, 0.5, few=None, transposed=True)
    for dtype in (torch.bfloat16, torch.float32):
        found = of_sparse(LayerCosts(slow, Layer((1024, 1024), 512, dtype, dtype), Rules(P)))
        assert ("bfloat16 GEMMs of 2:4 are slower than dense ones here" in found[0].text) == (dtype == torch.bfloat16)


def test_layers_that_stay_dense_and_remedies():
    words = {
        "odd": "pad the features to a multiple of M",
        "attention.in_proj_weight": "instead of nn.MultiheadAttention",
        "attention.out_proj": "instead of nn.MultiheadAttention",
        "tied": "a tied weight stays dense",
        "experts.up": "one nn.Linear per expert",
        "own": "only nn.Linear itself is supported",
        "lm_head": "an output head stays dense by default",
    }
    with torch.device("meta"):
        model = Zoo(4096)
    found = {layer.name: layer for layer in audited(model=model, tokens=65536, rows={"experts": 1}, **A100).layers}
    assert [name for name, layer in found.items() if not layer.sparse and layer.advice] == list(words)
    for name, said in words.items():
        (advice,) = found[name].advice
        assert said in advice.text and advice.speedup > 1.01
    with pytest.warns(UserWarning, match="filter_fn chooses none"):
        assert advice_with("filter_fn leaves it dense", tokens=65536, filter_fn=lambda module, name: False, **A100)
    assert not advice_with("filter_fn", tokens=65536, filter_fn=lambda module, name: True, **A100)
