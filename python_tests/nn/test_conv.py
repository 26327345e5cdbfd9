"""Convolutions: SparseConv2d by itself, through recipes, and what keeps its weight in the order of its matrix."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import nmkernels as nm
from nmkernels.layouts import as_matrix
from nmkernels.nn import SparseConv2d
from nmkernels.train.sparsify import select
from python_tests.distributed.ranks import needs_gloo, on_ranks
from python_tests.train.test_wrapped import one_process

P = nm.Pattern("2:4")


def masked_by_hand(weight, n=2, m=4):
    """The N largest magnitudes of every M input channels, at each place of the kernel."""
    out, cols, height, width = weight.shape
    grouped = weight.permute(0, 2, 3, 1).reshape(-1, m)
    kept = torch.zeros_like(grouped, dtype=torch.bool).scatter_(
        1, grouped.abs().sort(dim=1, descending=True, stable=True).indices[:, :n], True
    )
    return weight * kept.view(out, height, width, cols).permute(0, 3, 1, 2)


KINDS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    "1x1": {"kernel_size": 1},
    "dilated, same": {"kernel_size": (3, 5), "dilation": (2, 1), "padding": "same"},
    "reflect": {"kernel_size": (3, 2), "padding": (2, 1), "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": (2, 1)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True])
def test_forward_and_gradients(kind, last):
    torch.manual_seed(0)
    layer = SparseConv2d(8, 6, **KINDS[kind], pattern="2:4")
    dense = nn.Conv2d(8, 6, **KINDS[kind])
    dense.load_state_dict(layer.state_dict())
    dense.weight.data = masked_by_hand(dense.weight.data)
    x = torch.randn(2, 8, 9, 10).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = layer(own), dense(theirs)
    assert torch.allclose(got, want, atol=1e-5)
    g = torch.randn_like(got)
    got.backward(g)
    want.backward(g)
    assert torch.allclose(own.grad, theirs.grad, atol=1e-5)
    assert torch.allclose(layer.weight.grad, dense.weight.grad, atol=1e-4)  # straight through
    assert as_matrix(layer.weight.grad, layer.layout).data_ptr() == layer.weight.grad.data_ptr()
    assert torch.equal(layer(x[0]), layer(x[:1])[0])  # without batch


def test_construction_is_checked():
    with pytest.raises(nm.ShapeError, match="in_channels is 6"):
        SparseConv2d(6, 8, 3)
    with pytest.raises(nm.ShapeError, match=r"groups=2.*4 of the 8 input channels"):
        SparseConv2d(8, 8, 3, groups=2)
    assert "kernel_size=(3, 3), stride=(1, 1), pattern=2:4, uses=HardMask" in repr(SparseConv2d(8, 4, 3))


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(4, (4,), generator=generator)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x, labels = batch(step)
        F.cross_entropy(model(x.to(model[0].weight.dtype)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_which_convolutions_are_taken():
    model = nn.ModuleDict({
        "first": nn.Conv2d(3, 64, 3), "good": nn.Conv2d(64, 64, 3), "point": nn.Conv2d(64, 32, 1), "tiny": nn.Conv2d(32, 8, 3),
        "depthwise": nn.Conv2d(32, 32, 3, groups=32), "up": nn.ConvTranspose2d(32, 32, 2), "one": nn.Conv1d(32, 32, 3),
        "three": nn.Conv3d(32, 32, 3), "lazy": nn.LazyConv2d(32, 3), "normed": nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 3)),
        "own": type("StdConv2d", (nn.Conv2d,), {})(32, 32, 3), "head": nn.Conv2d(32, 32, 1),
    })  # fmt: skip
    chosen, report = select(model, P)
    assert [(c.name, c.layout, c.matrix_shape) for c in chosen] == [("good", "conv2d", (64, 576)), ("point", "conv2d", (32, 64))]
    why = {e.name: e.reason for e in report.skipped}
    for name, reason in {
        "first": "in_channels=3 is not a multiple of M=4", "depthwise": "groups=32, whose outputs each sum over 1 of 32 input channels",
        **dict.fromkeys(("up", "one", "three"), "a convolution other than nn.Conv2d"),
        "tiny": "fewer than 16 channels", "normed": "its weight is computed", "own": "subclass of nn.Conv2d", "head": "output head",
        "lazy": "not initialised",
    }.items():  # fmt: skip
        assert reason in why[name], name
    assert {e.name for e in report.entries if not e.linear} == {"first", "depthwise", "up", "one", "three", "lazy"}


LINEAR_ONLY = {
    "fst:2:4": "makes all three GEMMs", "sste:2:4": r"estimates the output gradients .*mvue=None", "slope:2:4": "adds adapters",
    "bimask:2:4": "another mask", "vnm:2:8": "blocks", "act24:2:4": "activations", "maskllm:2:4": "logits", "lbc:2:4": "scores",
    "complementary:2:4": "not adjacent", "proxsparse:2:4": "initial weights",
    "srste:2:4(packed=True)": "multiplies packed weights", "ste:2:4(packed=True)": "packed='auto'", "sdgf:2:4(packed=True)": "packed",
    "sste:2:4(mvue=None, fp8='hybrid')": "fp8=None", "asp:2:4(score='wanda')": "have seen",
    "step:2:4(inner='sste')": "mvue=None",
}  # fmt: skip


@pytest.mark.parametrize("text", LINEAR_ONLY)
def test_recipes_that_change_gemms_skip_convolutions(text):
    recipe = nm.recipes.get(text, total_steps=10)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 32))
    chosen, report = select(model, nm.Pattern(recipe.pattern), None, recipe)
    assert [c.name for c in chosen] == ["2"]
    assert type(recipe).__name__ in report.entries[0].reason
    with pytest.raises(nm.RecipeError, match=f"chose layer '0'.*{LINEAR_ONLY[text]}"):
        select(model, nm.Pattern(recipe.pattern), lambda module, name: True, recipe)


TAKEN = ["dense", "ste", "srste", "step(switch='fixed', start=2)", "asp", "asp(start=2)", "asp(permute=True, escapes=0)", "sste(mvue=None)",
         "mdgf", "sdgf", "ast", "maxq", "layerwise(rule='magnitude')", "step(switch='fixed', start=2, inner='mdgf')"]  # fmt: skip


@pytest.mark.parametrize("text", TAKEN)
def test_recipes_that_transform_weights_train_convolutions(text):
    name, _, options = text.partition("(")
    recipe = nm.recipes.get(f"{name}:2:4" + (f"({options}" if options else ""), total_steps=6)
    model = net()
    handle = nm.sparsify_(model, recipe)
    assert {type(layer).__name__ for layer in handle.layers.values()} == {"SparseConv2d", "SparseLinear"}
    assert {n for n, layer in handle.layers.items() if isinstance(layer, SparseConv2d)} == {"3", "5"}
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    train(model, optimizer, 6)
    figures = {key: float(value) for key, value in handle.metrics().items()}
    x, _ = batch(99)
    with handle.deployable():
        model.eval()
        want = model(x)
    handle.finish()
    assert torch.allclose(model(x), want, atol=1e-6)
    if recipe.final == "nm":
        assert abs(figures["density"] - 0.5) < 0.01
        for layer in ("3", "5"):
            weight = model.get_submodule(layer).weight.detach()
            groups = weight.permute(0, 2, 3, 1).reshape(-1, 4)
            assert (groups != 0).sum(1).max() <= (2 if name != "layerwise" else 4) and groups.any()


def test_groups_of_layerwise_patterns_stay_among_the_channels():
    model = nn.Sequential(nn.Conv2d(16, 32, 2), nn.Flatten(), nn.Linear(32, 32))  # 32 divides 2 * 2 * 16 and not 16
    with pytest.raises(nm.ShapeError, match="layer '0'.*is 16, which is not a multiple of M=32"):
        nm.sparsify_(model, nm.recipes.LayerWise("8:16", rule=None, given={"0": "8:32"}))
    assert type(model[0]) is nn.Conv2d


def by_hand(decay, steps, lr=1e-2, dtype=torch.float64):
    """STEP's second phase without its first, SR-STE, by the equations: torch's AdamW, gradients through plain tensors."""
    model = net().to(dtype)
    names = ["3", "5", "9"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        x, labels = batch(step)
        kept = {name: model.get_submodule(name).weight.detach().clone() for name in names}
        for name in names:
            w = model.get_submodule(name).weight
            w.data = masked_by_hand(w.data) if w.dim() == 4 else masked_by_hand(w.data[..., None, None])[..., 0, 0]
        F.cross_entropy(model(x.to(dtype)), labels).backward()
        for name in names:
            w = model.get_submodule(name).weight
            pruned = kept[name] * (w.data == 0)
            w.data = kept[name]
            w.grad += decay * pruned
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("which", [torch.optim.AdamW, nm.optim.MaskedAdamW])
def test_srste_equals_its_equations(which):
    want = by_hand(0.05, 5)
    model = net().double()
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.05))
    optimizer = handle.attach(which(model.parameters(), lr=1e-2))
    assert optimizer.state == {}
    for step in range(5):
        x, labels = batch(step)
        F.cross_entropy(model(x.double()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-10), name
    flips = float(handle.metrics()["flip_rate"])
    assert 0 < flips < 0.2


# ---- the order of the memory


def in_order(layer):
    return layer.weight.is_contiguous(memory_format=torch.channels_last) and layer.master.data_ptr() == layer.weight.data_ptr()


def test_the_parameter_stays_and_gets_its_order_in_place():
    layer = nn.Conv2d(16, 32, 3)
    p, before = layer.weight, layer.weight.detach().clone()
    assert not p.is_contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(layer)
    handle = nm.sparsify_(model, "ste:2:4")
    assert model[0] is layer and layer.weight is p and torch.equal(p, before) and in_order(layer)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert type(handle.remove()[0]) is nn.Conv2d and layer.weight is p


def test_loading_moving_and_copying_keep_the_order():
    model = net()
    state = copy.deepcopy(model.state_dict())  # contiguous, from before
    handle = nm.sparsify_(model, "srste:2:4")
    layer = model[3]
    saved = io.BytesIO()
    for change in [
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state, assign=True),
        lambda: model.to(memory_format=torch.contiguous_format),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.double().float(),
        lambda: model.to_empty(device="cpu").load_state_dict(state),
    ]:
        change()
        assert in_order(layer) and torch.equal(layer.weight, state["3.weight"])
        copied = copy.deepcopy(model)[3]
        assert in_order(copied) and copied.weight is not layer.weight
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved), assign=True)
    assert in_order(layer)
    handle.remove()


@pytest.mark.parametrize("which", [torch.optim.AdamW, nm.optim.MaskedAdamW])
def test_a_lost_order_is_never_a_silent_copy(which):
    model = net()
    handle = nm.sparsify_(model, "srste:2:4")
    optimizer = handle.attach(which(model.parameters(), lr=1e-2))
    train(model, optimizer, 2)
    layer, before = model[3], model[3].weight.detach().clone()
    layer.weight.data = layer.weight.data.contiguous()  # as vector_to_parameters does
    x, labels = batch(5)
    F.cross_entropy(model(x), labels).backward()  # reading needs no order
    with pytest.raises(nm.ShapeError, match=r"another order in memory.*handle\.refresh\(\)"):
        optimizer.step()
    handle.refresh()
    assert in_order(layer) and torch.equal(layer.weight, before)
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    train(model, optimizer, 1)
    handle.finish()
    assert nm.ops.is_nm(layer.master, "2:4")


def test_zeros_made_elsewhere_are_adopted():
    """Those of NVIDIA's ASP, which groups input channels too; a model without is refused."""
    model = net()
    model[3].weight.data = masked_by_hand(model[3].weight.data)
    assert list(nm.recipes.adopt(model).layers) == ["3"]  # and what M does not divide is not asked
    handle = nm.sparsify_(net(), "asp:2:4(score='existing')")
    with pytest.raises(nm.RecipeError, match="the weight of layer '3' is not 2:4"):
        handle.finish(allow_unused=True)


def test_an_optimizer_that_has_stepped_before_sparsify_goes_on():
    """Its moments are in the order of the dimensions; the update is that of an optimizer whose are not."""
    runs = []
    for kind in (torch.optim.AdamW, nm.optim.MaskedAdamW):
        model = net().double()
        optimizer = kind(model.parameters(), lr=1e-2)
        train(model, optimizer, 2)
        handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.1))
        handle.attach(optimizer)
        train(model, optimizer, 3, first=2)
        runs.append(model.state_dict())
    assert all(torch.allclose(runs[0][key], runs[1][key], atol=1e-10) for key in runs[0])


# ---- with the rest of torch


def test_autocast():
    model, (x, labels) = net(), batch()
    nm.sparsify_(model, "srste:2:4")
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[:3](x)
        want = F.conv2d(hidden.bfloat16(), masked_by_hand(model[3].weight.detach()).bfloat16(), padding=1)
        assert torch.equal(model[3](hidden), want) and model[3].effective_weight(torch.bfloat16).dtype == torch.bfloat16
        F.cross_entropy(model(x), labels).backward()
    assert model[3].weight.grad.dtype == torch.float32


def test_never_stale_and_kept_between_microbatches():
    model = net()
    handle = nm.sparsify_(model, "srste:2:4")
    handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    x, layer = torch.randn(1, 16, 8, 8), model[3]
    with torch.no_grad():
        for change in (lambda: layer.weight.mul_(-1.5), lambda: layer.weight.data.copy_(torch.randn_like(layer.weight))):
            layer(x)
            change()
            assert torch.allclose(layer(x), F.conv2d(x, masked_by_hand(layer.weight), padding=1), atol=1e-5)
    layer(x)
    first = layer.effective.copies
    layer(x)
    assert first and all(a is b for a, b in zip(first, layer.effective.copies, strict=True))


def test_functional_call_vmap_and_hooks():
    model = net()
    nm.sparsify_(model, "ste:2:4")
    layer, x = model[3], torch.randn(3, 16, 6, 6)
    called = []
    layer.register_forward_hook(lambda *args: called.append(1))
    other = torch.randn(32, 16, 3, 3)  # in the order of its dimensions
    got = torch.func.functional_call(layer, {"weight": other}, (x,))
    assert torch.allclose(got, F.conv2d(x, masked_by_hand(other), padding=1), atol=1e-5)
    each = torch.func.vmap(lambda x: layer(x))(x)
    assert torch.allclose(each, layer(x), atol=1e-5) and len(called) == 3


def test_compile_without_a_graph_break():
    model = net()
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.05))
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(2):
        x, labels = batch(step)
        F.cross_entropy(compiled(x), labels).backward()
        if step == 0:
            F.cross_entropy(plain(x), labels).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()


def test_what_changes_a_finished_weight_is_seen():
    model = net()
    handle = nm.sparsify_(model, "srste:2:4")
    handle.finish(allow_unused=True)
    assert "uses=finished" in repr(model[3])
    with torch.no_grad():
        model[3].weight.add_(0.1)
    with pytest.warns(UserWarning, match=r"SparseConv2d \(32, 144\).*is not any more"):
        model.eval()
    with pytest.raises(nm.RecipeError, match="changed after finish"):
        nm.compress_(model)


def _train_on_half():
    rank = torch.distributed.get_rank()
    model = net()
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.05))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
    model.eval()  # the statistics of a batch norm are those of its rank
    for step in range(3):
        x, labels = (part[rank * 2 : rank * 2 + 2] for part in batch(step))
        F.cross_entropy(parallel(x), labels).backward()
        assert in_order(model[3])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert as_matrix(model[3].weight.grad, model[3].layout).data_ptr() == model[3].weight.grad.data_ptr()
    return model.state_dict()


@pytest.mark.slow
@needs_gloo
def test_ddp_buckets_keep_the_order(tmp_path):
    model = net()
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4", decay=0.05))
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
    model.eval()
    train(model, optimizer, 3)
    for got in on_ranks(2, _train_on_half, tmp_path):
        assert all(torch.allclose(value, got[key], atol=1e-4) for key, value in model.state_dict().items())


@needs_gloo
def test_sharded_convolutions_are_refused(tmp_path):
    with one_process(tmp_path):
        model = net()
        handle = nm.sparsify_(model, "srste:2:4")
        with pytest.raises(NotImplementedError, match="does not support non-contiguous parameters"):
            fully_shard(model[3])  # torch's own word
        fully_shard(model[5])
        with pytest.raises(
            nm.RecipeError, match=r"attach: the weight of layer '5', a \w*SparseConv2d, is sharded.*DistributedDataParallel"
        ):
            handle.attach(nm.optim.MaskedAdamW(model.parameters()))
        model = net()
        fully_shard(model[3])
        handle = nm.sparsify_(model, "srste:2:4")
        assert "not split among ranks" in next(e.reason for e in handle.report.entries if e.name == "3")
        handle.attach(nm.optim.MaskedAdamW(model.parameters()))
