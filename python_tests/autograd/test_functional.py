"""The layers under torch.func: per-sample gradients, ensembles; right, or refused as forward mode is, never a silent zero."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import nmkernels as nm
from nmkernels import NMError, Pattern
from nmkernels.autograd import GemmPlan, HardMask, SplitRule, linear, sparse_relu2, split_linear
from nmkernels.gemm.route import operands
from nmkernels.recipes.methods.fst import TransposableMask
from nmkernels.recipes.methods.maskllm import GumbelMask
from nmkernels.recipes.methods.mdgf import DecayedMask
from nmkernels.recipes.methods.sste import SoftThreshold

OUT, IN, SAMPLES, MODELS = 8, 16, 5, 3
TOKENS = 2
"""So few that a group of gᵀ has at most 2 non-zeros: an estimate is then a copy, whatever was drawn."""
EXACT = {"rtol": 1e-10, "atol": 1e-10}
PACKED = {"fprop": "packed", "n": 2, "m": 4}
SETTINGS = {
    "ste": (HardMask(Pattern("2:4")), GemmPlan()),
    "packed": (HardMask(Pattern("2:4")), GemmPlan(dgrad="packed", **PACKED)),
    "auto": (HardMask(Pattern("2:4")), GemmPlan(**{**PACKED, "fprop": "auto"}, dgrad="auto")),
    "columns": (TransposableMask(Pattern("2:4")), GemmPlan(dgrad="columns", **PACKED)),
    "chain": (HardMask(Pattern("2:4"), chain=True), GemmPlan()),
    "faded": (DecayedMask(Pattern("2:4")), GemmPlan()),
    "scaled": (SoftThreshold(Pattern("2:4")), GemmPlan()),
    "magnitude": (HardMask(Pattern("2:4")), GemmPlan(wgrad="magnitude", n=2, m=4)),
    "mvue": (HardMask(Pattern("2:4")), GemmPlan(wgrad="mvue", n=2, m=4)),
    "finished": (None, GemmPlan()),
}


FED = {"faded": {"nm_flow": 0.25}, "learned": {"nm_tau": 0.7, "nm_kappa": 9.0, "nm_penalty": 0.0}}


def layer_of(name):
    """A SparseLinear that is in the middle of that method, in fp64."""
    torch.manual_seed(0)
    transform, plan = (GumbelMask(Pattern("2:4")), GemmPlan()) if name == "learned" else SETTINGS[name]
    layer = nm.SparseLinear(IN, OUT).double()
    layer.use(transform, plan)
    if transform is not None:
        layer.begin(transform)
        layer.hold(transform.renew(layer.weight.detach(), [None] * len(transform.reads), torch.Generator()))
    layer.hold({name: torch.tensor(value, dtype=torch.float64) for name, value in FED.get(name, {}).items()}, in_place=True)
    return layer


def parameters(layer):
    return {name: p.detach() for name, p in layer.named_parameters()}


def loss_of(layer):
    return lambda p, x: functional_call(layer, p, (x,)).square().sum()


def eager_gradients(layer, p, x):
    """By backward, of one sample and one model."""
    leaves = {name: v.clone().requires_grad_() for name, v in p.items()}
    x = x.clone().requires_grad_()
    loss_of(layer)(leaves, x).backward()
    return {name: v.grad for name, v in leaves.items()} | {"x": x.grad}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("error::UserWarning")
class TestGradients:
    def test_per_sample(self, name, capfd):
        layer, x = layer_of(name), torch.randn(SAMPLES, TOKENS, IN, dtype=torch.float64)
        p = parameters(layer)
        got, dx = vmap(grad(loss_of(layer), (0, 1)), (None, 0), randomness="different")(p, x)
        for k in range(SAMPLES):
            expected = eager_gradients(layer, p, x[k])
            for part, value in {**got, "x": dx}.items():
                torch.testing.assert_close(value[k], expected[part], **EXACT)
        assert "performance drop" not in capfd.readouterr().err

    def test_ensemble(self, name):
        layer, x = layer_of(name), torch.randn(TOKENS, IN, dtype=torch.float64)
        stacked = {name: torch.randn(MODELS, *v.shape, dtype=v.dtype) for name, v in parameters(layer).items()}
        y = vmap(lambda p: functional_call(layer, p, (x,)))(stacked)
        got = vmap(grad(loss_of(layer)), (0, None), randomness="different")(stacked, x)
        inner = vmap(grad(loss_of(layer)), (None, 0), randomness="different")
        each = vmap(inner, (0, None), randomness="different")(stacked, x[:, None])  # of every model and sample
        for k in range(MODELS):
            p = {name: v[k] for name, v in stacked.items()}
            torch.testing.assert_close(y[k], functional_call(layer, p, (x,)), **EXACT)
            expected = eager_gradients(layer, p, x)
            for part, value in got.items():
                torch.testing.assert_close(value[k], expected[part], **EXACT)
            for part, value in each.items():
                torch.testing.assert_close(value[k, 1], eager_gradients(layer, p, x[1:2])[part], **EXACT)

    def test_forward_mode_is_refused(self, name):
        layer, x = layer_of(name), torch.randn(4, IN, dtype=torch.float64)
        p, x_t = parameters(layer), torch.randn_like(x)
        torch.testing.assert_close(jacrev(layer)(x[0]), layer.effective_weight(), **EXACT)
        by_input, by_all = (lambda x: layer(x)), (lambda p, x: functional_call(layer, p, (x,)))
        for call in (
            lambda: jvp(by_input, (x,), (x_t,)), lambda: jacfwd(layer)(x[0]), lambda: tangent(layer, x, x_t),
            lambda: jvp(by_all, (p, x), (p, x_t)),
        ):  # fmt: skip
            if name == "finished":  # an nn.Linear
                call()
                continue
            with pytest.raises(NMError, match="no derivative in forward mode.*Differentiate backward once"):
                call()

    def test_second_derivatives_are_refused(self, name):
        if name == "finished":
            pytest.skip("an nn.Linear")
        layer, x = layer_of(name), torch.randn(IN, dtype=torch.float64)
        p, loss = parameters(layer), loss_of(layer)
        with pytest.raises(NMError, match="no second derivative|no gradient"):
            hessian(lambda x: loss(p, x))(x)
        with pytest.raises(NMError, match="no second derivative"):
            grad(lambda x: grad(loss, 1)(p, x).sum())(x)
        with pytest.raises(NMError, match="no second derivative"):
            # what the inner one is taken by is linear, so that its gradient looks like a constant
            grad(lambda p: grad(lambda x: functional_call(layer, p, (x,)).sum())(x).square().sum())(p)
        with pytest.raises(NMError, match="no second derivative"):
            grad(lambda x: grad(lambda p: functional_call(layer, p, (x,)).sum())(p)["weight"].square().sum())(x)
        for first, second in (("x", "weight"), ("weight", "x")):
            leaves = {**{name: v.clone().requires_grad_() for name, v in p.items()}, "x": x.clone().requires_grad_()}
            y = functional_call(layer, {name: leaves[name] for name in p}, (leaves["x"],)).sum()
            (g,) = torch.autograd.grad(y, leaves[first], create_graph=True)
            with pytest.raises(NMError, match="no second derivative"):
                torch.autograd.grad(g.square().sum() + leaves[second].sum(), leaves[second])


def test_a_backend_that_was_asked_for_gets_no_wrapped_tensors():
    w, x = torch.randn(OUT, IN), torch.randn(SAMPLES, TOKENS, IN)
    c = nm.ops.compress(w, "2:4")
    plan = GemmPlan(dgrad="packed", **PACKED)

    def loss(w, x):
        return linear(x, w, operands(c, backends=("cpu", "cpu")), plan=plan).square().sum()

    dw, dx = vmap(grad(loss, (0, 1)), (None, 0))(w, x)
    y = x @ c.dense().T
    torch.testing.assert_close(dx, 2 * y @ c.dense(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, 2 * y.mT @ x, rtol=1e-4, atol=1e-4)


def test_a_seed_is_not_advanced_by_torch_func():
    layer, x = layer_of("mvue"), torch.randn(TOKENS, IN, dtype=torch.float64)
    layer.seed = torch.tensor([3, 1])
    with pytest.raises(NMError, match=r"seed.*layer\.seed = None.*randomness"):
        grad(loss_of(layer))(parameters(layer), x)
    assert layer.seed.tolist() == [3, 1]


def test_learned_parameters():
    layer = layer_of("learned")
    x, p = torch.randn(SAMPLES, TOKENS, IN, dtype=torch.float64), parameters(layer)
    got = vmap(grad(loss_of(layer)), (None, 0))(p, x)
    for k in range(SAMPLES):
        torch.testing.assert_close(got["nm_logits"][k], eager_gradients(layer, p, x[k])["nm_logits"], **EXACT)
    with pytest.raises(NMError, match="no derivative in forward mode"):
        jvp(lambda v: functional_call(layer, {**p, "nm_logits": v}, (x[0],)), (p["nm_logits"],), (p["nm_logits"],))
    with pytest.raises(NMError, match="no second derivative"):
        grad(lambda v: grad(lambda x: loss_of(layer)({**p, "nm_logits": v}, x))(x[0]).sum())(p["nm_logits"])


def tangent(fn, x, x_t):
    """By torch's own forward mode, where autograd is off: the graph has no part in it."""
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x_t))).tangent


@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.filterwarnings("error::UserWarning")
class TestCompressedLinear:
    @pytest.fixture
    def layer(self, keep_dense, columns):
        torch.manual_seed(0)
        c = nm.ops.compress(torch.randn(OUT, IN, dtype=torch.float64), "2:4")
        order = torch.randperm(IN) if columns else None
        return nm.CompressedLinear(c, torch.randn(OUT, dtype=torch.float64), keep_dense=keep_dense, columns=order)

    def test_it_is_a_linear_map(self, layer):
        x = torch.randn(4, IN, dtype=torch.float64)
        w, b = layer.dense(), layer.bias.detach()
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                torch.testing.assert_close(vmap(layer)(x), F.linear(x, w, b), **EXACT)
                torch.testing.assert_close(jacrev(layer)(x[0]), w, **EXACT)
        torch.testing.assert_close(vmap(grad(lambda x: layer(x).square().sum()))(x), 2 * F.linear(x, w, b) @ w, **EXACT)
        by_bias = grad(lambda b: functional_call(layer, {"bias": b}, (x,)).sum())(b)
        torch.testing.assert_close(by_bias, torch.full_like(b, 4.0), **EXACT)

    def test_the_weight_is_a_constant(self, layer):
        x, values = torch.randn(4, IN, dtype=torch.float64), layer.values
        layer(x)  # a copy may be kept now

        def by_values(v):
            return functional_call(layer, {"values": v}, (x,)).sum()

        for refused in (lambda: grad(by_values)(values), lambda: jvp(by_values, (values,), (values,))):
            with pytest.raises(NMError, match="no gradient|constant"):
                refused()
        layer.values.requires_grad_()
        y = layer(x)
        with pytest.raises(NMError, match="no gradient|constant"):
            y.sum().backward()
        assert layer(x).shape == (4, OUT)

    def test_ensemble_of_weights(self, layer):
        x = torch.randn(4, IN, dtype=torch.float64)
        layers = [nm.CompressedLinear(nm.ops.compress(torch.randn(OUT, IN, dtype=torch.float64), "2:4"), layer.bias) for _ in range(MODELS)]
        stacked = {name: torch.stack([getattr(one, name) for one in layers]) for name in ("values", "indices")}
        y = vmap(lambda p: functional_call(layer, p, (x[:, layer.order.long().argsort()] if layer.order is not None else x,)))(stacked)
        for k, one in enumerate(layers):
            torch.testing.assert_close(y[k], one(x).detach(), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["input", "output", "relu2"])
def test_sparse_activations(side):
    rule = SplitRule(Pattern("2:4"), dense=0.0, shuffle=False)

    def fn(w, x):
        return sparse_relu2(x * w[0, 0], rule.pattern, "ste") if side == "relu2" else split_linear(x, w, None, rule, side)

    def loss(w, x):
        return fn(w, x).square().sum()

    w, x = torch.randn(OUT, IN, dtype=torch.float64), torch.randn(SAMPLES, 4, IN, dtype=torch.float64)
    got = vmap(grad(loss, (0, 1)), (None, 0))(w, x)
    for k in range(SAMPLES):
        leaves = w.clone().requires_grad_(), x[k].clone().requires_grad_()
        for value, expected in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(value[k], expected, **EXACT)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(grad(loss), backend="aot_eager")(w, x[0]), got[0][0], **EXACT)
    with pytest.raises(NMError, match="no derivative in forward mode"):
        tangent(lambda x: fn(w, x), x[0], x[0])
    for refused in (lambda: grad(lambda x: grad(loss, 1)(w, x).sum())(x[0]), lambda: hessian(lambda x: loss(w, x))(x[0])):
        with pytest.raises(NMError, match="no second derivative|no derivative in forward mode"):
            refused()
    with pytest.raises(NMError, match="no second derivative"):
        grad(lambda x: grad(lambda w: fn(w, x).sum())(w).square().sum())(x[0])


CALLS = {
    "grad": lambda f, p, x: grad(lambda p, x: f(p, x).square().sum())(p, x)["bias"],
    "grad_x": lambda f, p, x: grad(lambda x: f(p, x).square().sum())(x),
    "per_sample": lambda f, p, x: vmap(grad(lambda p, x: f(p, x).square().sum()), (None, 0))(p, x)["bias"],
    "vmap": lambda f, p, x: vmap(lambda x: f(p, x))(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["sparse", "compressed"])
def test_compiled_is_eager_or_an_error(kind, call):
    """torch.compile does not trace our rules: it runs the function eagerly, or with fullgraph says so."""
    layer = (
        nm.SparseLinear(IN, OUT)
        if kind == "sparse"
        else nm.CompressedLinear(nm.ops.compress(torch.randn(OUT, IN), "2:4"), torch.randn(OUT))
    )
    p, x = parameters(layer), torch.randn(4, IN)

    def fn(p, x):
        return CALLS[call](lambda p, x: functional_call(layer, p, (x,)), p, x)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager")(p, x), fn(p, x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs eagerly"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(p, x)
