"""Each piece of advice appears in the case that it is for, is not given elsewhere, and its figure is that of the changed case."""

import pytest
import torch

import nmkernels as nm
from nmkernels.audit.advice import Case, break_even, of_sparse
from nmkernels.audit.devices import DEVICES, Device
from nmkernels.audit.rules import Layer, Rules

P = nm.Pattern("2:4")
BIG = {"fc": (4096, 4096)}
FULL = "fst:2:4(end=None)"


def told(shapes=BIG, recipe=FULL, tokens=8192, **words):
    """text -> (speed-up after the change, detail) of the first layer."""
    words = {"device": "H200", "dtype": "bfloat16", **words}
    layer = nm.audit(shapes, tokens, recipe, **words).layers[0]
    return {each.text: (each.speedup, each.detail) for each in layer.advice}


def one(found, words):
    """The one piece of advice with these words in it."""
    (text,) = [text for text in found if words in text]
    return found[text]


def now(shapes=BIG, recipe=FULL, tokens=8192, **words):
    return nm.audit(shapes, tokens, recipe, **{"device": "H200", "dtype": "bfloat16", **words})


def test_nothing_to_say_of_a_large_layer_with_three_sparse_gemms():
    assert told({"fc": (16384, 16384)}, tokens=65536) == {}


def test_float32_on_a_gpu():
    speed, _ = one(told(dtype="float32"), "float32 does not reach the sparse tensor cores")
    assert speed == pytest.approx(now().step, rel=0.02), "the weight stays float32"
    assert now(dtype="float32").step < 1 and "tensor cores" not in " ".join(told())


def test_a_pattern_that_is_not_2_4():
    speed, _ = one(told(recipe="srste:4:8"), "4:8 is not a 2:4 pattern")
    assert speed == pytest.approx(now(recipe="srste:2:4").step)
    assert not [text for text in told(recipe="srste:1:8") if "2:4 pattern" in text]


def test_sizes_that_tensor_cores_do_not_take():
    speed, detail = one(told({"fc": (4100, 4100)}), "multiples of 64 outputs and 64 inputs: pad")
    assert detail == "to (4160,4160)" and now({"fc": (4100, 4100)}).step < 1 < speed < now({"fc": (4160, 4160)}).step
    assert not [text for text in told({"fc": (4112, 4096)}, device="A100") if "pad" in text], "mma.sp takes 16 outputs"
    assert not [text for text in told({"fc": (100, 100)}, "srste:2:4", 16, device="cpu", timer=clock) if "pad" in text]


def test_a_recipe_that_does_not_pack():
    for recipe in (nm.recipes.SRSTE("2:4"), "srste:2:4(packed=False)"):
        assert now(recipe=recipe).step < 1
        assert one(told(recipe=recipe), 'packed="auto"')[0] == pytest.approx(now(recipe="srste:2:4").step)
    assert not [text for text in told(recipe=nm.recipes.SRSTE("2:4", packed=True)) if "packed" in text]
    inside = nm.recipes.get("step:2:4(inner='srste(packed=auto)')", total_steps=100)
    assert now(recipe=inside).step == now(recipe="srste:2:4").step
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    nm.sparsify_(model, "ste:2:4")
    assert 'packed="auto"' in nm.audit(model, 65536, device="H200", dtype="bfloat16").layers[0].advice[0].text
    assert now(recipe="sste:2:4(fp8=paper)").step < now(recipe="sste:2:4").step, "emulated FP8 needs the dense layout"


def test_a_gemm_that_is_dense():
    speed, _ = one(told(recipe="srste:2:4"), "dgrad is dense")
    assert speed > now(recipe="srste:2:4").step
    assert speed == pytest.approx(now(recipe="fst:2:4(mvue=None, end=None)").step)
    speed, _ = one(told(recipe="fst:2:4(mvue=None, end=None)"), "wgrad is dense")
    assert speed == pytest.approx(now().step)
    assert not [text for text in told() if "dgrad" in text or "wgrad is dense" in text]


def test_an_estimate_for_too_few_inputs():
    narrow = {"fc": (4096, 512)}
    speed, detail = one(told(narrow), "the estimate for wgrad costs more")
    assert speed == pytest.approx(now(narrow, "fst:2:4(mvue=None, end=None)").step) and speed > now(narrow).step
    pays = int(detail.split()[2])
    assert 1340 <= pays <= 1800
    assert not [text for text in told({"fc": (4096, pays)}) if "the estimate" in text]


def test_too_few_tokens():
    shape = {"fc": (8192, 8192)}
    _, detail = one(told(shape, tokens=256, optimizer="separate", recipe="fst:2:4(mvue=None, end=None)"), "the step is too small")
    least = int(detail.split()[-1])
    assert 1300 <= least <= 1600, "a float32 weight is packed: 6.375 bytes an element in place of 4.375"
    for tokens, pays in ((least, True), (int(least * 0.85), False)):
        assert (now(shape, "fst:2:4(mvue=None, end=None)", tokens, optimizer="separate").step >= 1) == pays
    assert not [text for text in told(shape, tokens=least, optimizer="separate") if "too small" in text]
    case = Case(DEVICES["H200"], Layer((64, 64), 64, torch.bfloat16, torch.bfloat16), Rules(P, fprop=False))
    assert break_even(case) is None, "a mask without a sparse GEMM never pays"


def test_the_optimizers_own_pass_and_accumulation():
    apart = told(tokens=2048, optimizer="separate")
    assert one(apart, "MaskedAdamW masks and packs")[0] == pytest.approx(now(tokens=2048).step)
    assert one(apart, "accumulate gradients")[0] == pytest.approx(now(tokens=2048, optimizer="separate", accumulate=8).step)
    assert not [text for text in told(tokens=2048) if "MaskedAdamW" in text]
    assert not [text for text in told(tokens=2048, recipe="sste:2:4", optimizer="separate") if "MaskedAdamW" in text]
    assert not [text for text in told(tokens=2048, accumulate=8) if "accumulate" in text]


def test_what_is_left_dense_and_what_is_expanded():
    speed, _ = one(told(recipe="fst:2:4(total_steps=100)"), "leaves a dense model")
    assert speed == pytest.approx(now().inference)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    nm.sparsify_(model, "srste:4:8").finish(allow_unused=True)
    nm.compress_(model)
    words = {"device": "H200", "dtype": "bfloat16"}
    found = nm.audit(model, 4096, **words)
    assert found.inference < 1
    (expanded,) = [each for each in found.layers[0].advice if "keep_dense=True" in each.text]
    model[0].keep_dense = True
    assert expanded.speedup == nm.audit(model, 4096, **words).inference == 1.0
    assert not [each for each in nm.audit(model, 4096, **words).layers[0].advice if "keep_dense" in each.text]


def test_a_layer_that_only_loses():
    speed, _ = one(told({"fc": (64, 64)}, tokens=64), "leave it dense (filter_fn)")
    assert speed == 1.0 and now({"fc": (64, 64)}, tokens=64).step < 0.9
    assert not [text for text in told() if "leave it dense" in text]


def clock(task):
    return 1e-3


def test_16_bits_on_a_cpu_that_multiplies_them_fast():
    slow = Device("slow", 1e10, {"bfloat16": 1e12}, dict.fromkeys(("fprop", "dgrad", "wgrad"), 0.5), 0.5, 0.5, few=None, transposed=True)
    case = Case(slow, Layer((1024, 1024), 512, torch.bfloat16, torch.bfloat16), Rules(P))
    assert "bfloat16 GEMMs of 2:4 are slower than dense ones here" in of_sparse(case)[0].text
    single = Case(slow, Layer((1024, 1024), 512, torch.float32, torch.float32), Rules(P))
    assert not [each for each in of_sparse(single) if "slower than dense ones" in each.text]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("odd", "pad the features to whole groups"),
        ("tied", "a tied weight stays dense"),
        ("attention.out_proj", "in place of nn.MultiheadAttention"),
        ("attention.in_proj_weight", "in place of nn.MultiheadAttention"),
        ("experts.up", "one nn.Linear per expert"),
        ("lm_head", "an output head stays dense by default"),
        ("own", "only nn.Linear itself is taken"),
    ],
)
def test_ways_out_of_staying_dense(name, words):
    found = {layer.name: layer for layer in nm.audit(_model(), 65536, FULL, device="A100", dtype="bfloat16", rows={"experts": 1}).layers}
    (advice,) = found[name].advice
    assert words in advice.text and advice.speedup > 1.01 and not found[name].sparse


class Own(torch.nn.Linear):
    """A subclass that may do anything."""


def _model():
    with torch.device("meta"):
        model = torch.nn.Module()
        model.odd = torch.nn.Linear(4098, 4096)
        model.attention = torch.nn.MultiheadAttention(4096, 2)
        model.embedding = torch.nn.Embedding(8192, 4096)
        model.tied = torch.nn.Linear(4096, 8192, bias=False)
        model.tied.weight = model.embedding.weight
        model.experts = torch.nn.Module()
        model.experts.up = torch.nn.Parameter(torch.empty(4, 4096, 4096))
        model.own = Own(4096, 4096)
        model.lm_head = torch.nn.Linear(4096, 8192)
    return model


def test_a_wider_filter():
    words = {"device": "A100", "dtype": "bfloat16"}
    left = nm.audit(BIG, 65536, FULL, filter_fn=lambda module, name: False, **words).layers[0]
    assert left.why == "not chosen by the filter" and left.advice[0].text == "filter_fn leaves it dense"
    taken = nm.audit(BIG, 65536, "srste:2:4", filter_fn=lambda module, name: True, **words).layers[0]
    assert taken.sparse and not [each for each in taken.advice if "filter_fn" in each.text]
