"""Which chains of layers or convolutions are found, which are left alone and why, and that those found may be reordered."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.nn.chains import Chain, channel_parameters, find_chains, reorder_
from nmkernels.nn.swap import make_sparse_


class Through(nn.Module):
    """``between`` given two layers and the input."""

    def __init__(self, make, between, **parts):
        super().__init__()
        self.a, self.b, self.between = make(), make(), between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.between(self, x)


def linear():
    return nn.Linear(8, 8)


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


X = {
    make: torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for make, size in ((linear, (5, 8)), (conv, (2, 8, 8, 8)))
}


def through(between, **parts):
    torch.manual_seed(0)
    return Through(linear, between, **parts).double()


FOUND = {
    "relu": (lambda m, x: m.b(F.relu(m.a(x))), {}, ()),
    "module": (lambda m, x: m.b(m.act(m.a(x))), {"act": nn.Sequential(nn.GELU(), nn.Dropout(0.0), nn.PReLU())}, ()),
    "squared": (lambda m, x: m.b(m.a(x).relu() ** 2), {}, ()),
    "handmade gelu": (lambda m, x: m.b(0.5 * (h := m.a(x)) * (1.0 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3))))), {}, ()),
    "cast": (lambda m, x: m.b(m.a(x).float().to(x.dtype)), {}, ()),
    "twice": (lambda m, x: m.b(F.silu(m.a(x))) + m.b(F.relu(m.a(x))), {}, ()),
    "conv, relu": (lambda m, x: m.b(F.relu(m.a(x))), {}, ()),
    "conv, norm": (lambda m, x: m.b(m.norm(m.a(x)).relu()), {"norm": nn.BatchNorm2d(8)}, ("norm",)),
    "conv, no affine part": (lambda m, x: m.b(m.norm(m.a(x))), {"norm": nn.BatchNorm2d(8, affine=False)}, ("norm",)),
    "conv, pooling": (lambda m, x: m.b(m.pool(F.avg_pool2d(m.a(x), 2))), {"pool": nn.MaxPool2d(2, ceil_mode=True)}, ()),
    "conv, functions": (lambda m, x: m.b(F.interpolate(F.max_pool2d(m.a(x), 2), scale_factor=2)), {}, ()),
    "conv, depthwise": (lambda m, x: m.b(m.depth(m.a(x))), {"depth": nn.Conv2d(8, 8, 3, groups=8)}, ("depth",)),
    "conv, norm of both": (lambda m, x: m.b(m.norm(m.a(x))) + m.b(m.norm(m.a(x * 2))), {"norm": nn.BatchNorm2d(8)}, ("norm",)),
}
LEFT = {
    "norm": (lambda m, x: m.b(m.norm(m.a(x))), "norm (LayerNorm)", {"norm": nn.LayerNorm(8)}),
    "softmax": (lambda m, x: m.b(m.a(x).softmax(-1)), "softmax", {}),
    "function softmax": (lambda m, x: m.b(F.softmax(m.a(x), -1)), "softmax", {}),
    "reshape": (lambda m, x: m.b(m.a(x).view(-1, 8)), "view", {}),
    "residual": (lambda m, x: m.b(x + m.a(x)), "the input of the model", {}),
    "parameter": (lambda m, x: m.b(m.a(x) * m.scale), "scale", {"scale": nn.Parameter(torch.ones(8))}),
    "also out": (lambda m, x: (h := m.a(x), m.b(h)), "the output of the model", {}),
    "reduced": (lambda m, x: m.b(m.a(x)) * m.a(x).mean(), "mean", {}),
    "first": (lambda m, x: m.b(m.a(x)) + m.a(x)[..., :1], "getitem", {}),
    "prelu": (lambda m, x: m.b(m.act(m.a(x))), "act (PReLU)", {"act": nn.PReLU(8)}),
    "dropped channels": (lambda m, x: m.b(m.act(m.a(x))), "act (Dropout1d)", {"act": nn.Dropout1d()}),
    "in place": (lambda m, x: m.b(m.a(x).mul_(2)), "mul_", {}),
    "weight read": (lambda m, x: m.b(F.linear(x, m.a.weight)), "linear", {}),
    "weight read too": (lambda m, x: m.b(m.a(x).relu()) + F.linear(x, m.a.weight.t()), "the weight of a is read outside", {}),
    "broadcast": (lambda m, x: m.b(m.a(x) * m.gate(x)), "differ in width", {"gate": nn.Linear(8, 1)}),
    "constant": (lambda m, x: m.b(m.a(x) * torch.arange(8.0)), "_tensor_constant", {}),
    "buffer": (lambda m, x: m.b(m.a(x) + m.norm.running_mean), "running_mean", {"norm": nn.BatchNorm1d(8)}),
    "mode": (lambda m, x: m.b(m.a(x) if m.training else m.a(x).cumsum(-1)), "cumsum", {}),
    "branch": (lambda m, x: m.b(m.a(x) if x.sum() > 0 else x), "cannot be traced", {}),
    "conv, flatten": (lambda m, x: m.b(m.a(x).flatten(2).unflatten(2, (8, 8))), "unflatten", {}),
    "conv, grouped": (lambda m, x: m.b(m.group(m.a(x))), "group (Conv2d)", {"group": nn.Conv2d(8, 8, 1, groups=2)}),
    "conv, group norm": (lambda m, x: m.b(m.norm(m.a(x))), "norm (GroupNorm)", {"norm": nn.GroupNorm(2, 8)}),
    "conv, indices": (lambda m, x: m.b(F.max_pool2d(m.a(x), 2, return_indices=True)[0]), "getitem", {}),
    "conv, padded channels": (lambda m, x: m.b(F.pad(m.a(x), (0, 0, 0, 0, 1, -1))), "pad", {}),
    "conv, linear": (lambda m, x: m.b(m.linear(m.a(x))), "different dimensions", {"linear": nn.Linear(8, 8)}),
    "conv, frozen norm": (lambda m, x: m.b(m.norm(m.a(x))), "norm is frozen", {"norm": nn.BatchNorm2d(8).requires_grad_(False)}),
    "conv, norm of the input too": (lambda m, x: m.b(m.norm(m.a(x))) + m.norm(x), "the model", {"norm": nn.BatchNorm2d(8)}),
    "conv, weight read": (lambda m, x: m.b(m.a(x)) * m.a.weight.mean((1, 2, 3))[:, None, None], "weight of a is read", {}),
}


def still_computes_the_same(call, chain, x, model, close=1e-13):
    want, order = call(x), torch.randperm(chain.channels, generator=torch.Generator().manual_seed(1))
    before = [p.clone() for p in model.parameters()]
    for p, dim in channel_parameters(model, chain):
        reorder_(p.detach(), dim, order)
    assert (call(x) - want).abs().max() < close
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def layer_of(name):
    return conv if name.startswith("conv") else linear


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("sparse", [False, True])
def test_found_and_the_function_stays(name, sparse):
    make, (between, parts, carried) = layer_of(name), FOUND[name]
    model, x = Through(make, between, **copy.deepcopy(parts)).double(), X[make]
    for _ in range(2):  # statistics and affine parts differ from channel to channel
        model(x + torch.randn_like(x))
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    if sparse:
        for layer in (model.a, model.b):
            make_sparse_(layer, "2:4").use(None, layer.plan)
    chains, reasons = find_chains(model)
    assert chains == [Chain(("a",), ("b",), 8, carried)] and set(reasons) == {"a"}
    for mode in (True, False):
        one = copy.deepcopy(model).train(mode)
        still_computes_the_same(one, chains[0], x, one, 1e-6 if name == "cast" else 1e-12)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone_with_a_reason(name):
    between, reason, parts = LEFT[name]
    chains, reasons = find_chains(Through(layer_of(name), between, **parts))
    assert chains == [] and reason in reasons["b"]


def test_obstacles_of_single_layers():
    for change, reason in [
        (lambda m: m[0].register_forward_hook(lambda *a: None), "0 has hooks"),
        (lambda m: m[2].register_forward_pre_hook(lambda *a: None), "2 has hooks"),
        (lambda m: m[0].register_full_backward_hook(lambda *a: None), "0 has hooks"),
        (lambda m: m[1].register_forward_hook(lambda m, x, y: y.cumsum(-1)), "1 (ReLU with hooks)"),
        (lambda m: setattr(m[2], "weight", m[0].weight), "shares its weight"),
        (lambda m: setattr(m[2], "bias", m[0].bias), "shares its bias"),
        (lambda m: setattr(m[2], "weight", nn.Parameter(m[0].weight.data)), "shares its weight"),
        (lambda m: m[0].weight.requires_grad_(False), "frozen"),
        (lambda m: m[0].register_buffer("scale", torch.ones(8)), "further tensors"),
        (lambda m: setattr(m[0], "forward", lambda x: x), "forward replaced"),
        (lambda m: setattr(m[1], "forward", lambda x: x), "1 (ReLU)"),
        (lambda m: nn.utils.parametrizations.weight_norm(m[0]), "0 (ParametrizedLinear)"),
        (lambda m: m.__setitem__(0, type("Odd", (nn.Linear,), {})(8, 8)), "0 (Odd)"),
        (lambda m: setattr(m[1], "baseline", m[0]), "several names"),
    ]:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        change(model)
        chains, reasons = find_chains(model)
        assert not any("2" in chain.consumers and "0" in chain.producers for chain in chains)
        assert reason in " ".join(reasons.values())


def test_every_writer_and_reader_is_found():
    def gated(m, x):
        h = F.silu(m.gate(x)) * m.a(x)
        return m.b(h) + m.probe(h)

    model = through(gated, gate=nn.Linear(8, 8), probe=nn.Linear(8, 8))
    assert find_chains(model)[0] == [Chain(("a", "gate"), ("b", "probe"), 8)]
    # a residual stream of linear layers alone
    model = through(lambda m, x: m.last((h := m.a(x)) + m.b(F.relu(h))), last=nn.Linear(8, 8))
    (chain,), _ = find_chains(model)
    assert chain == Chain(("a", "b"), ("b", "last"), 8)
    still_computes_the_same(model, chain, X[linear], model)


def test_nested_containers_are_one_graph():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Identity(), nn.Linear(16, 8)))
    assert find_chains(model)[0] == [Chain(("0.0",), ("1.1",), 16)]
    shared = nn.Sequential(nn.Linear(8, 8))
    outside = nn.ModuleDict({"one": nn.Sequential(shared, nn.Linear(8, 8)), "two": shared})
    assert find_chains(outside)[0] == [], "others call the producer by itself"
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 8))
    model[0].register_forward_hook(lambda m, x, y: None)
    assert find_chains(model)[0] == []


def test_gpt():
    model = GPT(GPTConfig(width=32, layers=2, heads=2, context=16))
    chains, reasons = find_chains(model)
    assert chains == [Chain((f"blocks.{i}.mlp.fc",), (f"blocks.{i}.mlp.proj",), 128) for i in range(2)]
    assert "LayerNorm" in reasons["blocks.0.mlp.fc"] and "cannot be traced" in reasons["blocks.1.attn.proj"]
    for layer in [m for m in model.modules() if type(m) is nn.Linear]:
        make_sparse_(layer, "2:4")
    assert find_chains(model) == (chains, reasons), "the same of the sparse model"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torch_transformer_blocks():
    for activation in ["relu", F.gelu, nn.SiLU(), lambda x: x.cumsum(-1)]:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, activation=activation, batch_first=True), 2)
        decoder = nn.TransformerDecoderLayer(16, 2, 32, activation=activation, batch_first=True)
        chains, reasons = find_chains(nn.ModuleList([encoder, decoder]))
        if getattr(activation, "__name__", "") == "<lambda>":
            assert chains == [] and "<lambda>" in reasons["1.linear2"]
        else:
            assert [c.consumers for c in chains] == [("0.layers.0.linear2",), ("0.layers.1.linear2",), ("1.linear2",)]


def test_hugging_face():
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=16)).eval()
    (chain,), _ = find_chains(gpt2)
    assert chain == Chain(("transformer.h.0.mlp.c_fc",), ("transformer.h.0.mlp.c_proj",), 64)
    still_computes_the_same(lambda ids: gpt2(ids).logits, chain, torch.arange(8)[None], gpt2, close=1e-5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    at = "model.layers.0.mlp"
    assert find_chains(llama)[0] == [Chain((f"{at}.gate_proj", f"{at}.up_proj"), (f"{at}.down_proj",), 32)]


def test_tracing_leaves_the_model_alone():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

        def forward(self, x, scale=None):
            self.calls += 1
            return self.b(self.a(x) if scale is None else self.a(x) * scale)

    model = Counts()
    model.b.eval()
    before = copy.deepcopy(vars(model))
    chains, reasons = find_chains(model)
    assert chains == [] and "the input of the model" in reasons["b"], "the branch of an optional argument is seen"
    assert model.calls == before["calls"] == 0
    assert model.training and not model.b.training


@pytest.mark.parametrize("keep", [lambda m, h: setattr(m, "last", h), lambda m, h: m.seen["all"].append(h)], ids=["attribute", "list"])
def test_what_a_forward_pass_stores_may_be_read_by_anyone(keep):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), {"all": []}
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x):
            h = self.a(self.inner(x))
            keep(self, h)
            return self.b(h)

    model = Remembers()
    chains, reasons = find_chains(model)
    assert chains == [Chain(("inner.0",), ("inner.1",), 8)] and "cannot be traced" in reasons["b"]
    assert model.seen == {"all": []} and not hasattr(model, "last")


def test_a_model_that_cannot_be_copied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.lock = (i for i in range(3))
    chains, reasons = find_chains(model)
    assert chains == [] and "copying" in reasons["1"]


def test_what_pools_an_image_mixes_the_channels_of_linear_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.MaxPool2d(3, 1, 1), nn.Linear(8, 8))
    chains, reasons = find_chains(model)
    assert chains == [] and "MaxPool2d" in reasons["2"]


def test_residual_network():
    class Block(nn.Module):
        def __init__(self, wide, out):
            super().__init__()
            self.conv1, self.bn1, self.relu = nn.Conv2d(wide, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
            self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
            self.down = None if wide == out else nn.Conv2d(wide, out, 1, bias=False)

        def forward(self, x):
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            y += x if self.down is None else self.down(x)
            return self.relu(y)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(8, 8), Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    chains, reasons = find_chains(nn.Sequential(model, nn.Linear(16, 4)))
    assert {c.consumers: (c.producers, c.between) for c in chains} == {
        ("0.2.conv1", "0.3.conv1", "0.3.down"): (("0.0", "0.2.conv2"), ("0.1", "0.2.bn2")),
        ("0.2.conv2",): (("0.2.conv1",), ("0.2.bn1",)),
        ("0.3.conv2",): (("0.3.conv1",), ("0.3.bn1",)),
    }
    assert "Flatten" in reasons["1"]
