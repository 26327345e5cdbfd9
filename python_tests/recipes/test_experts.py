"""Stacks of experts under recipes: each expert is trained as a linear layer of its own would be."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nmkernels as nm
from nmkernels.nn import CompressedExperts, SparseExperts
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import ASP, FST, SRSTE, SSTE, STE, STEP, MaskLLM, MdGf, SdGf, SLoPe
from python_tests.moe import EXPERTS, KINDS, TRANSPOSED, Experts, experts_of, loss_of, mixture, only_experts, tiny, tokens
from python_tests.recipes.loop import Adam, batches
from python_tests.recipes.training import metrics_of, run, same, start, through_a_file, train

RECIPES = [
    STE(packed=False),
    SRSTE(decay=0.1, packed=False),
    STEP(t_min=2, t_max=4, threshold=1e-30),
    STEP("1:4", total_steps=10, switch="fixed", start=3, inner="mdgf(end=0.8)"),
    ASP(start=3),
    SSTE(mvue=None),
    MdGf(total_steps=10),
    SdGf("1:8", total_steps=10),
]
DATA = batches(10)


def fused(params, lr, betas, eps, weight_decay):
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def momentum(params, lr, **_):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def masters(handle):
    """The weights as matrices, one for each expert, in the order of the experts."""
    for name, layer in handle.layers.items():
        master = layer.master.detach()
        yield from layer.by_expert(master) if name.endswith("_proj") else (master,)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.pattern}")
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "make", [MaskedAdamW, *(pytest.param(make, marks=pytest.mark.slow) for make in (torch.optim.AdamW, fused, momentum))]
)
def test_equals_linear_layers(recipe, transposed, make):
    if recipe.setup.optimizer and make is not MaskedAdamW:
        pytest.skip("STEP needs MaskedAdamW")
    results = []
    for apart in (True, False):
        _, handle, _ = run(recipe, data=DATA, model=mixture(apart, transposed=transposed), make=make)
        metrics = metrics_of(handle)
        handle.finish()
        results.append((metrics, list(masters(handle))))
    (theirs, a), (ours, b) = results
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert len(a) == len(b) == 6
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() < 1e-12
        assert torch.equal(x != 0, y != 0)


def test_every_expert_has_a_scale_of_its_own():
    model = mixture(seed=3)
    with torch.no_grad():
        for i, factor in enumerate((1.0, 0.1, 10.0)):
            model.experts.down_proj[i] *= factor
            model.experts.down_proj[i, :, 0] += factor
    handle = nm.sparsify_(model, SSTE(mvue=None))
    stack = handle.layers["experts.down_proj"]
    want = torch.stack([nm.ops.soft_threshold_scale(w, "2:4") for w in stack.by_expert(stack.master.detach())])
    assert torch.equal(stack.nm_scale, want) and len(set(want.tolist())) == 3
    assert "experts.nm_down_proj.nm_scale" in model.state_dict()
    used = stack.by_expert(stack.effective_weight())
    for w, scale, got in zip(stack.by_expert(stack.master.detach()), want, used, strict=True):
        assert torch.equal(got, nm.ops.soft_threshold(w, "2:4") * scale)
    with torch.no_grad():
        model.experts.down_proj[1] = 0
    with pytest.raises(RecipeError, match=r"'experts.down_proj': expert 1: the scale of its soft threshold is"):
        handle.attach(MaskedAdamW(model.parameters()))


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
def test_expert_without_tokens_decays_as_under_adamw(make):
    """Its gradient is zero and not none: λ and weight decay go on, by a dense AdamW that is given λ (1 − M) w as its gradient."""
    model, handle, optimizer = start(SRSTE(decay=0.1), model=mixture(), make=make)
    layer = handle.layers["experts.down_proj"]
    own, others = layer.by_expert(layer.master.detach())[2].clone(), layer.by_expert(layer.master.detach())[0].clone()
    twin = nn.Parameter(own.clone())
    dense = torch.optim.AdamW([twin], **Adam().keywords)
    handle.expert_metrics()
    for x, y in DATA[:3]:
        optimizer.zero_grad()
        F.mse_loss(model(x, 2), y).backward()
        assert not model.experts.down_proj.grad[2].any()
        optimizer.step()
        twin.grad = 0.1 * (twin.detach() - nm.ops.prune(twin.detach(), "2:4"))
        dense.step()
    assert torch.allclose(layer.by_expert(layer.master.detach())[2], twin, atol=1e-12)
    assert not torch.equal(own, twin) and not torch.equal(layer.by_expert(layer.master.detach())[0], others)


def test_metrics_of_single_experts():
    model, handle, optimizer = start(SRSTE(decay=0.1), model=mixture())
    first = handle.expert_metrics()
    assert set(first) == {"experts.gate_up_proj", "experts.down_proj"}
    assert all(metrics["flip_rate"].isnan().all() and metrics["density"].tolist() == [0.5] * 3 for metrics in first.values())
    layer = handle.layers["experts.down_proj"]
    before = layer.by_expert(layer.kept())
    train(model, optimizer, DATA[:3])
    metrics = handle.expert_metrics()["experts.down_proj"]
    flips = (before ^ layer.by_expert(layer.kept())).double().mean((1, 2))
    assert torch.equal(metrics["flip_rate"], flips) and flips.any()
    with torch.no_grad():
        model.experts.down_proj[1] = 0
    assert handle.expert_metrics()["experts.down_proj"]["density"].tolist() == [0.5, 0.0, 0.5]
    assert nm.sparsify_(nn.Sequential(nn.Linear(16, 16)), "ste:2:4").expert_metrics() == {}


# ---- what is taken, and what is refused


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (SSTE(), "SSTE estimates the output gradients"),
        (FST(total_steps=10), "FST makes all three GEMMs"),
        (SLoPe(total_steps=10), "SLoPe prunes linear layers once more"),
        (MaskLLM(total_steps=10), "MaskLLM learns logits"),
        (ASP(score="wanda"), "ASP ranks weights by what linear layers have seen"),
        (STE(packed=True), "STE multiplies packed weights"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_recipes_beyond_weight_transforms_skip_experts(recipe, said):
    model = mixture()
    model.more = nn.Linear(16, 16).double()
    handle = nm.sparsify_(model, recipe)
    reasons = {e.name: e.reason for e in handle.report.skipped}
    assert list(handle.layers) == ["more"] and said in reasons["experts.down_proj"]
    with pytest.raises(RecipeError, match="experts.gate_up_proj.*" + said):
        nm.sparsify_(mixture(), recipe, only_experts)


def test_reasons():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(3, 16, 32))

    class Packed(nn.Module):
        """As gpt-oss is loaded by default, without dequantising."""

        def __init__(self):
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(3, 16, 32, dtype=torch.uint8), requires_grad=False)

    def reasons(model, pattern="2:4", recipe="ste"):
        return {e.name: e.reason for e in nm.sparsify_(model, f"{recipe}:{pattern}").report.entries}

    def plain():
        return nn.Linear(96, 96)

    assert "3-D expert weights of Other, which does not say along which" in reasons(nn.Sequential(plain(), Other()))["1.gate_up_proj"]
    assert "of Packed, quantised to torch.uint8; make the model sparse first" in reasons(nn.Sequential(plain(), Packed()))["1.down_proj"]
    assert "in_features=16 is not a multiple of M=32" in reasons(nn.Sequential(plain(), Experts()), "2:32")["1.gate_up_proj"]
    assert "fewer than 16" in reasons(nn.Sequential(plain(), Experts(inner=8)))["1.down_proj"]
    tied, hooked, half = Experts(), Experts(), Experts().to(torch.float8_e4m3fn)
    hooked.forward = lambda *a: None
    other = Other()
    other.gate_up_proj = tied.gate_up_proj
    found = reasons(nn.Sequential(plain(), tied, other, hooked, half))
    assert "tied" in found["1.gate_up_proj"] and found["1.down_proj"] == "2:4"
    assert "forward was replaced" in found["3.down_proj"] and "float8" in found["4.down_proj"]
    with pytest.raises(ShapeError, match="experts.gate_up_proj"):
        nm.sparsify_(mixture(), "ste:2:32", only_experts)


def test_one_stack_of_two():
    """What the filter leaves out stays a Parameter like any other, also when the model is compressed."""
    model = mixture()
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: name.endswith("down_proj"))
    assert list(handle.layers) == ["experts.down_proj"] and isinstance(model.experts, SparseExperts)
    model(DATA[0][0])
    handle.finish()
    want = model(DATA[0][0])
    nm.compress_(model)
    assert isinstance(model.experts, CompressedExperts) and isinstance(model.experts.gate_up_proj, nn.Parameter)
    assert torch.allclose(model(DATA[0][0]), want, atol=1e-12)
    with pytest.raises(AttributeError):
        model.experts.down_proj  # noqa: B018


@pytest.mark.parametrize("options", [{"gate": False}, {"bias": True}, {"gate": False, "bias": True, "transposed": True}], ids=str)
def test_forms_of_experts(options):
    model, handle, optimizer = start(SRSTE(decay=0.1), model=mixture(**options))
    train(model, optimizer, DATA[:2])
    handle.finish()
    want = model(DATA[0][0])
    assert torch.allclose(nm.compress_(model)(DATA[0][0]), want, atol=1e-12)


def test_removed_and_made_dense_again():
    model = mixture(transposed=True)
    keys, kind = list(model.state_dict()), type(model.experts)
    handle = nm.sparsify_(model, "srste:2:4")
    assert isinstance(model.experts, SparseExperts)
    with pytest.raises(RecipeError, match="sparse layers already"):
        nm.sparsify_(model, "ste:2:4")
    handle.remove()
    assert type(model.experts) is kind and list(model.state_dict()) == keys
    assert set(model.experts.__dict__) == set(Experts().__dict__)
    with pytest.raises(RecipeError, match="expert 0"):  # the model is as it was
        with torch.no_grad():
            model.experts.down_proj.zero_()
        nm.sparsify_(model, SSTE(mvue=None))
    assert type(model.experts) is kind and list(model.state_dict()) == keys


# ---- memory


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW, fused, momentum])
def test_moments_of_a_time_before_follow_the_memory(make):
    """torch's fused AdamW on a CPU goes by memory and not by strides: moments in another order would go to other weights."""
    results = []
    for transposed in (False, True):
        model = mixture(transposed=transposed)
        optimizer = make(model.parameters(), **Adam().keywords)
        train(model, optimizer, DATA[:3])  # a gradient stays, in the order that the weight has now
        handle = nm.sparsify_(model, SRSTE(decay=0.1))
        handle.attach(optimizer)
        for x, y in DATA[3:6]:
            optimizer.zero_grad(set_to_none=False)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        results.append(list(masters(handle)))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_loading_by_assignment_puts_the_memory_in_order():
    model, handle, _ = start(SRSTE(decay=0.1), model=mixture(transposed=True))
    other = mixture(transposed=True, seed=4)
    model.load_state_dict(other.state_dict(), assign=True)
    for name, layer in handle.layers.items():
        assert layer.weight is model.get_parameter(name)
        assert torch.equal(layer.weight, other.get_parameter(name))
        layer.master.detach().zero_()  # a view
        assert not layer.weight.any()
    assert nm.sparsify_(mixture(transposed=True), "ste:2:4").layers["experts.down_proj"].weight.is_contiguous() is False


def test_moves_and_dtypes():
    model = mixture(transposed=True)
    handle = nm.sparsify_(model, SSTE(mvue=None))
    want = model(DATA[0][0])
    model.to(torch.float32).to(torch.float64)
    assert torch.allclose(model(DATA[0][0]), want, atol=1e-5)
    model._apply(lambda t: t.contiguous())
    assert torch.allclose(model(DATA[0][0]), want, atol=1e-5) and handle.layers["experts.down_proj"].master.is_contiguous()
    model.to(torch.bfloat16)
    layer = handle.layers["experts.down_proj"]
    assert layer.effective_weight().dtype == torch.bfloat16 and layer.nm_scale.shape == (3,)
    with torch.autocast("cpu", torch.bfloat16):
        model.float()(DATA[0][0].float()).sum().backward()
    assert model.experts.down_proj.grad.dtype == torch.float32


# ---- around training


@pytest.mark.parametrize(
    "recipe", [SRSTE(decay=0.1), ASP(start=3), SSTE(mvue=None), STEP(t_min=2, t_max=4, threshold=1e-30)], ids=lambda r: r.name
)
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_resumes_bit_for_bit(recipe, transposed):
    model, _, optimizer = run(recipe, data=DATA, model=mixture(transposed=transposed))
    want = through_a_file(model.state_dict(), optimizer.state_dict())
    model, _, optimizer = run(recipe, data=DATA[:5], model=mixture(transposed=transposed))
    weights, state = through_a_file(model.state_dict(), optimizer.state_dict())
    model, _, optimizer = start(recipe, model=mixture(transposed=transposed, seed=5))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, DATA[5:])
    assert same(through_a_file(model.state_dict(), optimizer.state_dict()), want)


def test_dense_checkpoint_renews_the_scales():
    model = mixture()
    handle = nm.sparsify_(model, SSTE(mvue=None))
    layer = handle.layers["experts.down_proj"]
    before = layer.nm_scale.clone()
    model.load_state_dict(mixture(seed=8).state_dict())  # strict
    assert not torch.equal(layer.nm_scale, before)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({**kept, "experts.nm_down_proj.nm_scale": before})
    assert torch.equal(layer.nm_scale, before)


def test_evaluates_what_finish_leaves():
    model, handle, _ = run(MdGf(total_steps=20), data=DATA[:4], model=mixture())
    with handle.deployable():
        seen = model(DATA[0][0]).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.finish()
    assert torch.equal(model(DATA[0][0]), seen)
    layer = handle.layers["experts.down_proj"]
    assert nm.ops.is_nm(layer.master.detach(), "2:4") and layer.finished


def test_checkpointing_and_functional_call():
    from torch.utils.checkpoint import checkpoint

    model = mixture(transposed=True)
    nm.sparsify_(model, "ste:2:4")
    x = DATA[0][0]
    model(x).sum().backward()
    want = model.experts.down_proj.grad.clone()
    model.zero_grad()
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert torch.equal(model.experts.down_proj.grad, want)
    other = dict(mixture(transposed=True, seed=6).named_parameters())
    twin = mixture(transposed=True, seed=6)
    nm.sparsify_(twin, "ste:2:4")
    assert torch.allclose(torch.func.functional_call(model, other, (x,)), twin(x), atol=1e-12)


def test_counted_by_the_experts_that_a_token_meets():
    model = mixture()  # two of three
    for name, rows in (("ste:2:4", 0.5), ("dense:2:4", 1.0)):
        cost = nm.flops(model, name, 10)
        parts = {part.name: part.inference for part in cost.layers}
        assert parts["experts.gate_up_proj"] == pytest.approx(2 * 2 * 48 * 16 * rows)
        assert parts["experts.down_proj"] == pytest.approx(2 * 2 * 16 * 24 * rows)
    want = nm.flops(model, "ste:2:4", 10).inference
    handle = nm.sparsify_(model, "ste:2:4")
    assert nm.flops(model, "ste:2:4", 10).inference == want
    audited = {layer.name: layer for layer in nm.audit(handle, 300, device="A100", measure=False).layers}
    assert audited["experts.gate_up_proj"].tokens == 200 and audited["experts.gate_up_proj"].sparse
    nm.compress_(handle.finish(allow_unused=True))
    assert nm.flops(model, "ste:2:4", 10).inference == want
    assert {e.shape for e in nm.tune(model, 3).choices if "experts.down_proj" in e.layers} == {(16, 24)}


# ---- models of transformers


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_saved_in_the_models_own_names(kind, tmp_path):
    """A finished model is saved as the dense one is, one matrix for each expert where that has them, and loads without nmkernels."""
    import safetensors
    from transformers import AutoModelForCausalLM

    model = tiny(kind, layers=2)
    keys = saved(tiny(kind, layers=2), tmp_path / "dense")
    handle = nm.sparsify_(model, "srste:2:4")
    optimizer = handle.attach(MaskedAdamW(model.parameters(), lr=1e-3))
    for ids in tokens(10):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    handle.finish()
    assert saved(model, tmp_path / "sparse") == keys
    ids = tokens()[0]
    assert_adopted(tmp_path / "sparse", model, ids)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse").train()
    again.set_experts_implementation("eager")
    assert type(experts_of(again)[1]) is type(experts_of(tiny(kind))[1])
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-6)
    with safetensors.safe_open(tmp_path / "sparse" / "model.safetensors", "pt") as file:
        experts = [file.get_tensor(key) for key in file.keys() if ".experts." in key and "bias" not in key]  # noqa: SIM118
    assert len(experts) == (4 if kind == TRANSPOSED else 2 * 3 * EXPERTS)
    assert all((w != 0).double().mean() <= 0.5 for w in experts)


def assert_adopted(folder, model, ids):
    """Another process, another library: the zeros are found again, and compressed."""
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(folder)
    nm.sparsify_(again, ASP(score="existing")).finish(allow_unused=True)
    assert isinstance(experts_of(nm.compress_(again))[1], CompressedExperts)
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)


def saved(model, folder):
    import safetensors

    model.save_pretrained(folder)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", TRANSPOSED])
def test_compiled_as_a_whole(kind):
    """Without a graph break, and with the gradients of the eager call."""
    model = tiny(kind, "grouped_mm", layers=2)
    nm.sparsify_(model, SRSTE(packed=False))
    ids = tokens()[0]
    loss_of(model, ids).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(ids, labels=ids)
    assert found.graph_break_count == 0, found.break_reasons
    torch.compile(model, backend="eager", fullgraph=True)(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, want[name], atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", TRANSPOSED])
def test_exported(kind):
    """torch.export takes the finished model and the compressed one, which is expanded in a graph."""
    model, ids = tiny(kind, "batched_mm").eval(), tokens()[0]
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    want = model(ids).logits
    for _ in range(2):
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        assert torch.allclose(program.module()(ids, use_cache=False).logits, want, atol=1e-5)
        nm.compress_(model) if not isinstance(experts_of(model)[1], CompressedExperts) else None


@pytest.mark.slow
def test_checkpoint_in_training_has_the_scales(tmp_path):
    """``save_pretrained`` takes the stacks apart, and leaves the other weights whole."""
    import safetensors

    model = tiny()
    handle = nm.sparsify_(model, SSTE(mvue=None))
    model.save_pretrained(tmp_path)
    name, _ = experts_of(model)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {key.split(".experts.")[1]: file.get_tensor(key) for key in file.keys() if ".experts." in key and "nm_" in key}  # noqa: SIM118
    assert set(found) == {f"nm_{key}.nm_scale" for key in ("gate_up_proj", "down_proj")}
    assert torch.equal(found["nm_down_proj.nm_scale"], handle.layers[f"{name}.down_proj"].nm_scale)
