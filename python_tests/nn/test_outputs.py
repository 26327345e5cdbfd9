"""What a layer returns is an ordinary tensor: written in place, it and the input do what they do after the dense layer."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import GemmPlan, SplitRule, split_linear
from python_tests.for_each import for_each

SHAPES = [(32,), (4, 32), (2, 4, 32), (2, 1, 3, 32), (0, 32), (2, 0, 32)]


def inputs():
    """Inputs of every rank, and some whose leading dimensions are not one in memory."""
    given = [torch.randn(shape) for shape in SHAPES]
    wide, batch = torch.randn(4, 64), torch.randn(3, 2, 32)
    return [*given, wide[:, ::2], batch.transpose(0, 1), batch[:1].expand(4, 2, 32), batch[:, :1].expand(3, 2, 32)]


def first_feature(y):
    y[..., 0] = 0.5
    return y


def half(y):
    y.chunk(2, -1)[0].mul_(2) if not y.requires_grad else y[..., :4].mul_(2)
    return y


WRITES = {
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
    "divide": lambda y: y.div_(8.0),
    "mask": lambda y: y.masked_fill_(y.detach() > 0.1, 0.0),
    "index": first_feature,
    "slice": half,
    "flat": lambda y: y.view(-1).mul_(3),
    "sigmoid": torch.sigmoid_,
    "unsqueeze": lambda y: y.unsqueeze_(0).add_(1),
}


def outcome(run, x, differentiable=True):
    """What ``run`` makes of a copy of x, and the gradient of that; or the error, by its class and first words."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(differentiable)
    torch.manual_seed(0)  # of dropout
    try:
        y = run(leaf * 1.0 if differentiable else leaf)
        if y.requires_grad:
            y.float().square().sum().backward()
    except RuntimeError as error:
        return type(error).__name__, str(error)[:60]
    return y.detach(), leaf.grad


FEW = {key: WRITES[key] for key in ("relu", "index")}


def same(dense, layer, x, writes=None):
    writes = writes or (WRITES if x.shape == SHAPES[2] else FEW)
    for name, write in writes.items():
        for differentiable in (False, True):
            want, got = (outcome(lambda x, of=of: write(of(x)), x, differentiable) for of in (dense, layer))  # noqa: B023
            assert all(map(torch.is_tensor, want[:1])), f"{name}: {want}"
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=f"{name}, {tuple(x.shape)}: {got} and not {want}")


def dense_like(layer, kind=nn.Linear, **how):
    """The dense layer that multiplies what ``layer`` does."""
    dense = kind(layer.in_features, layer.out_features, bias=layer.bias is not None, **how)
    with torch.no_grad():
        dense.weight.copy_(layer.effective_weight() if isinstance(layer, nm.SparseLinear) else layer.dense())
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    dense.weight.requires_grad_(isinstance(layer, nm.SparseLinear))
    return dense


PLANS = {
    "auto": None,
    "dense": GemmPlan(),
    "packed": GemmPlan("packed", "packed", n=2, m=4),
    "mvue": GemmPlan("auto", "auto", "mvue", n=2, m=4),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_sparse_linear(plan, bias):
    layer = nm.SparseLinear(32, 32, bias=bias)
    if PLANS[plan] is not None:
        layer.use(layer.transform, PLANS[plan])
    dense = dense_like(layer)
    for x in inputs():
        same(dense, layer, x)


@for_each("fp8", ["paper", "hybrid"])
def test_fp8(fp8):
    layer = nm.SparseLinear(32, 32)
    layer.use(layer.transform, GemmPlan(fp8=fp8))
    for x in inputs()[:4]:
        assert torch.equal(outcome(lambda x: layer(x).relu_(), x)[1], outcome(lambda x: layer(x).relu(), x)[1])


@for_each("keep, bias", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("choice", ["", "dense", "packed"])
def test_compressed_linear(keep, bias, choice, monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", choice) if choice else monkeypatch.delenv("NMKERNELS_CHOICE", raising=False)
    nm.gemm.choose.forget()
    c = nm.ops.compress(torch.randn(32, 32), "2:4")
    layer = nm.CompressedLinear(c, torch.randn(32) if bias else None, keep_dense=keep)
    for x in inputs():
        same(dense_like(layer), layer, x)
        with torch.no_grad():
            before = layer(x)
            layer(x).zero_()  # the kept weight is not the output's memory
            assert torch.equal(before, layer(x))


@for_each("kind", [nm.SparseLinear, nm.CompressedLinear])
def test_autocast(kind):
    sparse = nm.SparseLinear(32, 32)
    layer = sparse if kind is nm.SparseLinear else nm.CompressedLinear(nm.ops.compress(sparse.weight.detach(), "2:4"), torch.randn(32))
    for x in inputs():
        for write in FEW.values():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = write(layer(x))
            y.float().sum().backward()


@for_each("frozen, autocast", [(False, False), (True, False), (False, True)])
def test_the_input_after_the_layer(frozen, autocast):
    """Refused where nn.Linear has saved it, and allowed where that has saved a copy, or nothing."""
    layer = nm.SparseLinear(32, 32).requires_grad_(not frozen)
    dense = dense_like(layer).requires_grad_(not frozen)

    def run(of):
        def call(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = of(x)
            x.add_(1)
            return y

        return call

    said = set()
    for x in inputs():
        if 0 in x.stride():
            continue  # torch refuses to write into it
        for differentiable in (False, True):
            # a view keeps the strides, which a clone need not
            strided = lambda of, x=x: run(lambda leaf: of(leaf.as_strided(x.shape, x.stride())))  # noqa: E731
            base = torch.zeros(x.untyped_storage().nbytes() // 4)
            want, got = (outcome(strided(of), base, differentiable)[0] for of in (dense, layer))
            assert (want if isinstance(want, str) else "") == (got if isinstance(got, str) else ""), (tuple(x.shape), x.stride(), want, got)
            said.add(isinstance(want, str))
    assert said == ({False} if frozen or autocast else {False, True})


def test_squared_relu_and_split_linear():
    rule = SplitRule(nm.Pattern("2:4"), multiple=4)
    act, weight, bias = nm.nn.SquaredReLU("2:4"), torch.randn(32, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    for x in inputs():
        for write in WRITES.values():
            for side in ("input", "output"):
                assert torch.is_tensor(outcome(lambda x: write(act(write(split_linear(x, weight, bias, rule, side)))), x)[0])  # noqa: B023


@for_each("kernel, bias", [(3, True), (3, False), (1, True)])
def test_convolutions(kernel, bias):
    """Their results also lie in memory as those of nn.Conv2d do, so that ``view`` takes them."""
    sparse = nm.nn.SparseConv2d(8, 8, kernel, padding=kernel // 2, bias=bias)
    dense, frozen = (nn.Conv2d(8, 8, kernel, padding=kernel // 2, bias=bias) for _ in range(2))
    packed = nm.nn.CompressedConv2d(nm.ops.compress(sparse.effective_weight(), "2:4"), kernel, sparse.bias, padding=kernel // 2)
    frozen.weight.requires_grad_(False)
    with torch.no_grad():
        for of in (dense, frozen):
            of.weight.copy_(packed.dense().view(8, kernel, kernel, 8).permute(0, 3, 1, 2))
            if bias:
                of.bias.copy_(sparse.bias)
    x = torch.randn(2, 8, 6, 6)
    for given in (x, x.to(memory_format=torch.channels_last), x[0], x.transpose(2, 3)):
        writes = WRITES if given is x else FEW
        for theirs, ours in ((dense, sparse), (frozen, packed)):
            same(theirs, ours, given, writes)
            assert theirs(given).stride() == ours(given).stride()
    sparse.use(None, sparse.plan)
    assert sparse(x).is_contiguous()


def test_convolution_as_patches(monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    c = nm.ops.compress(torch.randn(8, 72), "2:4")
    x = torch.randn(2, 8, 6, 6)
    layer = nm.nn.CompressedConv2d(c, 3, padding=1)
    y = layer(x.requires_grad_())
    y.relu_().view(2, -1).sum().backward()
    with torch.no_grad():
        assert layer(x.contiguous(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def test_transforms_of_torch_func():
    layer = nm.SparseLinear(32, 32)
    dense = dense_like(layer)
    for x in inputs()[:4]:
        for of in (layer, dense):
            torch.func.vmap(lambda x: of(x).relu_())(x[None].repeat(3, *[1] * x.dim()))  # noqa: B023
        grads = [torch.func.grad(lambda x: of(x).relu_().square().sum())(x) for of in (layer, dense)]  # noqa: B023
        torch.testing.assert_close(*grads)


def test_gradients_with_create_graph():
    layer = nm.SparseLinear(32, 32)
    grads = torch.autograd.grad(layer(torch.randn(2, 4, 32)).square().sum(), list(layer.parameters()), create_graph=True)
    assert all(g.mul_(2) is g for g in grads)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_written_outside_a_graph(backend):
    layer = nm.SparseLinear(32, 32)
    graph = torch.compile(layer, backend=backend)
    for x in inputs()[:3]:
        same(dense_like(layer), graph, x, FEW)
