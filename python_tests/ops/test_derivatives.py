"""No op has a derivative, and says so: backward, in forward mode, by torch.func and in graphs; torch.vmap gives what a loop gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

from nmkernels import NMError, dispatch, ops
from nmkernels.ops import Compressed
from nmkernels.testing import assert_equal_bits
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw

raw = torch.ops.nmkernels
C = ops.compress(torch.randn(16, 16), "2:4")
B = ops.compress(torch.randn(32, 64, dtype=torch.bfloat16), "1:8")
Q = ops.quantize_values(C)
E = *ops.quantize(torch.ones(2, 128), torch.int8), *ops.quantize_pack(torch.ones(64, 128), torch.int8)
NOT_ON_CPU = ("nm_quantize", "nm_linear_quantized", "nm_quantize_values", "nm_dequantize_values", "nm_linear_integers")
"""All that a CPU has for them is the reference."""


def seed() -> Tensor:
    return torch.tensor([3, 5])


def held(values: Tensor) -> Compressed:
    return Compressed(values, C.indices, "2:4", (16, 16))


PUBLIC: dict[str, Any] = {
    "prune": lambda w: ops.prune(w, "2:4"),
    "mvue": lambda w: ops.mvue(w, "2:4", seed=seed()),
    "compress_mask": lambda w: ops.compress(w, "2:4", C.dense().bool()).values,
    "pack_columns": lambda w: ops.pack(w, "2:4", "transposable", columns=True).columns.values,
}
"""Functions of a weight ``(16, 16)`` whose result is floating-point."""

RAW: dict[str, Any] = {
    "nm_prune": lambda w: raw.nm_prune(w, 2, 4),
    "nm_soft_threshold": lambda w: raw.nm_soft_threshold(w, 2, 4),
    "nm_soft_threshold_scale": lambda w: raw.nm_soft_threshold_scale(w, 2, 4),
    "nm_mvue": lambda w: raw.nm_mvue(w, 2, 4, -1, seed(), "exact"),
    "nm_mvue_compress": lambda w: raw.nm_mvue_compress(w, 2, 4, -1, seed(), "exact")[0],
    "nm_compress": lambda w: raw.nm_compress(w, 2, 4)[0],
    "nm_decompress": lambda w: raw.nm_decompress(w[:, :8], C.indices, 2, 4, 16),
    "nm_pack": lambda w: raw.nm_pack(w, 2, 4, "magnitude", None, None, None, True, False, "canonical")[0],
    "nm_linear": lambda w: raw.nm_linear(w, C.values, C.indices, 2, 4, 16),
    "nm_linear_values": lambda w: raw.nm_linear(torch.ones(3, 16), w[:, :8], C.indices, 2, 4, 16),
    "nm_linear_bias": lambda w: raw.nm_linear(torch.ones(3, 16), C.values, C.indices, 2, 4, 16, w[0]),
    "nm_linear_residual": lambda w: raw.nm_linear(torch.ones(16, 16), C.values, C.indices, 2, 4, 16, None, "", w),
    "nm_linear_dgrad": lambda w: raw.nm_linear_dgrad(w, C.values, C.indices, 2, 4, 16),
    "nm_linear_wgrad": lambda w: raw.nm_linear_wgrad(C.values, C.indices, 2, 4, 16, w),
    "nm_quantize": lambda w: raw.nm_quantize(w, torch.ones(()), torch.float8_e5m2, False).float(),
    "nm_quantize_pack": lambda w: raw.nm_quantize_pack(w.repeat(4, 8), torch.ones(()), torch.float8_e5m2)[0].float(),
    "nm_linear_quantized": lambda w: raw.nm_linear_quantized(*E, w.flatten()[:64], torch.float32, False, False),
    "nm_quantize_values": lambda w: raw.nm_quantize_values(w, 8, 1)[1].float(),
    "nm_dequantize_values": lambda w: raw.nm_dequantize_values(Q.values, w[:, :1].bfloat16(), 8, torch.float32),
    "nm_linear_integers": lambda w: raw.nm_linear_integers(w, Q.values, Q.indices, Q.step, 2, 4, 16),
}
EVERY = PUBLIC | RAW

WORDS = r"no gradient.*(SparseLinear.*detach|CompressedLinear.*SparseLinear.*no_grad)"


def test_every_op_is_here() -> None:
    without = {"nm_mask", "nm_transposable_mask", "nm_metadata", "nm_masked_adamw_", "nm_masked_adamw_pack_", "nm_pack_forms_"}
    defined = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nmkernels::nm_")}
    assert {name for name in defined if not name.endswith("_out")} - without <= set(RAW)


def weight() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, 16)


w = pytest.fixture(weight, name="w")


@pytest.mark.filterwarnings("error::UserWarning")
class TestRefusal:
    """The gradient of a sum with another way to it: a zero there would be a wrong gradient that nobody sees."""

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @for_each("name", EVERY)
    def test_backward(self, name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A backend in plain torch must not be differentiable where one in C++ is not."""
        if backend == "cpu" and name in NOT_ON_CPU:
            return
        monkeypatch.setenv(dispatch.ENV, backend)
        w = weight()
        EVERY[name](w)  # what is remembered of this call is not for the next
        w.requires_grad_()
        y = EVERY[name](w)
        assert y.requires_grad
        with pytest.raises(NMError, match=WORDS):
            (y.sum() + w.sum()).backward()
        with torch.no_grad():
            assert not EVERY[name](w).requires_grad
        assert not EVERY[name](w.detach()).requires_grad

    @for_each("name", EVERY)
    def test_forward_mode(self, name: str) -> None:
        w = weight()
        EVERY[name](w)
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode), forward_ad.dual_level(), pytest.raises(NMError, match=WORDS):
                EVERY[name](forward_ad.make_dual(w, w))
            with torch.set_grad_enabled(grad_mode), pytest.raises(NMError, match=WORDS):
                jvp(EVERY[name], (w,), (w,))
        with forward_ad.dual_level():
            assert_equal_bits(EVERY[name](w), EVERY[name](w))  # no tangent, nothing to refuse

    @for_each("name", EVERY)
    def test_torch_func(self, name: str) -> None:
        w = weight()

        def loss(w: Tensor) -> Tensor:
            return EVERY[name](w).sum() + w.sum()

        def aside(v: Tensor) -> Tensor:
            return grad(lambda u: ((u * v).sum(), EVERY[name](u)), has_aux=True)(v)[1].sum()

        for differentiate in (
            lambda: grad(loss)(w),
            lambda: vjp(loss, w)[1](torch.ones(())),
            lambda: vmap(grad(loss))(torch.stack([w, w])),
            lambda: grad(lambda v: grad(lambda u: (loss(v) * u).sum())(v).sum())(w),  # of the outer one only
            lambda: grad(aside)(w),  # recorded at two levels, differentiated at the outer one
        ):
            with pytest.raises(NMError, match=WORDS):
                differentiate()
        torch.testing.assert_close(grad(lambda v: loss(v.detach()) + (2 * v).sum())(w), torch.full((16, 16), 2.0))

    @pytest.mark.slow
    @for_each("name", EVERY)
    def test_compiled(self, name: str) -> None:
        w = weight()
        torch._dynamo.reset()
        y = torch.compile(EVERY[name], fullgraph=True, backend="aot_eager")(w.requires_grad_())
        assert_equal_bits(y.detach(), EVERY[name](w.detach()))  # to look at it is no error
        with pytest.raises(NMError, match=WORDS):
            (y.sum() + w.sum()).backward()
        w = weight()
        for transform in (lambda w: jvp(EVERY[name], (w,), (w,))[1], grad(lambda w: EVERY[name](w).sum() + w.sum())):
            with pytest.raises(Exception, match=WORDS):
                torch.compile(transform, backend="aot_eager")(w)


GEMMS: dict[str, tuple[Any, str]] = {
    "linear": (lambda w: ops.linear(w, C), r"nm_linear: x requires grad.*CompressedLinear.*SparseLinear"),
    "linear_bias": (lambda w: ops.linear(torch.ones(1, 16), C, w[0]), "bias requires grad"),
    "linear_dgrad": (lambda w: ops.linear_dgrad(w, C), "nm_linear_dgrad: g requires grad"),
    "linear_wgrad": (lambda w: ops.linear_wgrad(C, w), "nm_linear_wgrad: x requires grad"),
    "decompress": (lambda w: ops.decompress(held(w[:, :8])), "nm_decompress has no gradient"),
    "relayout": (lambda w: ops.relayout(Compressed(w.bfloat16().view(32, 8), B.indices, "1:8", (32, 64)), "mma.sp").values, "no gradient"),
}


@for_each("name", GEMMS)
def test_public_gemms_and_forms(name: str, w: Tensor) -> None:
    call, text = GEMMS[name]
    for refused in (lambda: call(w.clone().requires_grad_()).sum().backward(), lambda: grad(lambda w: call(w).sum())(w)):
        with pytest.raises(NMError, match=text):
            refused()
    with torch.no_grad():
        assert_equal_bits(call(w.clone().requires_grad_()), call(w))
        with pytest.raises(NMError, match="no gradient in forward mode"):
            jvp(call, (w,), (w,))


def test_masks_have_no_derivative_to_refuse(w: Tensor) -> None:
    for fn in (ops.mask, ops.transposable_mask):
        expected = fn(w, "2:4")
        assert not fn(w.clone().requires_grad_(), "2:4").requires_grad
        torch.testing.assert_close(grad(lambda w, fn=fn: (w * fn(w, "2:4")).sum())(w), expected.float())
        torch.testing.assert_close(jvp(lambda w, fn=fn: w * fn(w, "2:4"), (w,), (w,))[1], w * expected)


@for_each("op", ["prune", "soft_threshold", "compress", "decompress", "mvue"])
def test_a_write_that_autograd_cannot_see_raises(op: str, w: Tensor) -> None:
    def write(w: Tensor) -> None:
        if op == "compress":
            ops.compress(w, "2:4", out=ops.compress(torch.zeros(16, 16), "2:4"))
        elif op == "decompress":
            ops.decompress(held(w[:, :8]), out=torch.empty(16, 16))
        else:
            getattr(ops, op)(w, "2:4", out=torch.empty(16, 16))

    write(w)
    w = w.clone().requires_grad_()
    with pytest.raises(NMError, match=rf"nm_{op}.*requires grad.*no_grad"):
        write(w)
    with pytest.raises(NMError, match="requires grad"):
        ops.prune(torch.ones(4), "2:4", out=torch.ones(4, requires_grad=True))
    with torch.no_grad():
        write(w)
        with forward_ad.dual_level(), pytest.raises(NMError, match="forward mode"):
            write(forward_ad.make_dual(w, w))
    with pytest.raises(RuntimeError, match="out="):
        vmap(lambda x, y: ops.prune(x, "2:4", out=y))(torch.ones(2, 4), torch.ones(2, 4))


def test_a_step_that_autograd_cannot_see_raises() -> None:
    args = adamw()
    args[0][0].requires_grad_()
    with pytest.raises(NMError, match=r"nm_masked_adamw_.*requires grad.*no_grad"):
        raw.nm_masked_adamw_(*args)
    with torch.no_grad():
        raw.nm_masked_adamw_(*args)


# ---- vmap


def looped(fn: Any, *args: Any, dims: tuple[int | None, ...]) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    each = [fn(*(a if d is None else a.select(d, k) for a, d in zip(args, dims, strict=True))) for k in range(size)]
    return torch.stack(each) if isinstance(each[0], Tensor) else tuple(map(torch.stack, zip(*each, strict=True)))


def batched_cases() -> dict[str, tuple[Any, tuple[Tensor, ...], tuple[int | None, ...]]]:
    w, keep = torch.randn(5, 16, 16), torch.zeros(16, 4, 4).bool()
    keep[..., 1:3] = True
    many = ops.compress(w, "2:4")
    x, g = torch.randn(16, 5, 3), torch.randn(5, 3, 16)
    pair, one = (many.values, many.indices), (C.values, C.indices)
    linear = lambda x, v, i, b, r: raw.nm_linear(x, v, i, 2, 4, 16, b, "gelu", r)  # noqa: E731
    bias, rest = torch.randn(5, 16), torch.randn(3, 5, 16)
    return {
        **{name: (fn, (w,), (0,)) for name, fn in RAW.items() if "linear" not in name and "decompress" not in name},
        "mask": (lambda w: raw.nm_mask(w, 2, 4), (w,), (0,)),
        "mask_inner_dim": (lambda w: raw.nm_mask(w, 2, 4), (w.movedim(0, 2),), (2,)),
        "transposable": (lambda w: raw.nm_transposable_mask(w, 2, 4), (w,), (0,)),
        "compress": (lambda w: raw.nm_compress(w, 2, 4), (w,), (0,)),
        "compress_one_mask": (lambda w, m: raw.nm_compress(w, 2, 4, m), (w, keep.reshape(16, 16)), (0, None)),
        "compress_masks": (lambda w, m: raw.nm_compress(w, 2, 4, m), (w[0], ops.mask(w, "2:4")), (None, 0)),
        "decompress": (lambda v, i: raw.nm_decompress(v, i, 2, 4, 16), pair, (0, 0)),
        "decompress_values": (lambda v, i: raw.nm_decompress(v, i, 2, 4, 16), (many.values, C.indices), (0, None)),
        "metadata": (lambda i: raw.nm_metadata(i, 64, "mma.sp"), (ops.compress(torch.randn(2, 16, 64), "2:4").indices,), (0,)),
        "mvue_seeds": (lambda g, s: raw.nm_mvue(g, 2, 4, 0, s, "exact"), (w[0], torch.randint(99, (5, 2))), (None, 0)),
        "linear_x": (linear, (x.movedim(0, 2), *one, bias[0], rest[:, 0]), (0, None, None, None, None)),
        "linear_residual": (linear, (torch.randn(3, 16), *one, bias[0], rest), (None, None, None, None, 1)),
        "linear_bias": (linear, (torch.randn(3, 16), *one, bias, rest[:, 0]), (None, None, None, 0, None)),
        "linear_weights": (linear, (torch.randn(3, 16), *pair, bias, rest), (None, 0, 0, 0, 1)),
        "linear_all": (linear, (x.movedim(0, 2), *pair, bias, rest), (0, 0, 0, 0, 1)),
        "dgrad": (lambda g, v, i: raw.nm_linear_dgrad(g, v, i, 2, 4, 16), (g, *one), (0, None, None)),
        "dgrad_weights": (lambda g, v, i: raw.nm_linear_dgrad(g, v, i, 2, 4, 16), (g[0], *pair), (None, 0, 0)),
        "wgrad": (lambda v, i, x: raw.nm_linear_wgrad(v, i, 2, 4, 16, x), (*pair, torch.randn(5, 16, 3)), (0, 0, 0)),
    }


@for_each("name", batched_cases())
@pytest.mark.filterwarnings("error::UserWarning")
def test_vmap_is_a_loop(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    fn, args, dims = batched_cases()[name]
    expected = looped(fn, *args, dims=dims)
    torch.testing.assert_close(vmap(fn, dims)(*args), expected)
    twice = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), expected)
    torch.testing.assert_close(vmap(vmap(fn, tuple(dims)), 0)(*[torch.stack([a, a]) for a in args]), twice)
    assert "performance drop" not in capfd.readouterr().err


def test_a_compressed_tensor_of_vmap_knows_its_shape() -> None:
    w = torch.randn(5, 6, 16)
    c = vmap(lambda w: ops.compress(w, "2:4"))(w)
    assert c.shape == (5, 6, 16)
    assert_equal_bits(c.dense(), ops.prune(w, "2:4"))


def test_a_step_cannot_be_batched() -> None:
    args = adamw()
    with pytest.raises((NMError, RuntimeError), match="vmap"):
        vmap(lambda x: raw.nm_masked_adamw_(args[0], [x], *args[2:]), 0)(torch.stack([args[1][0]] * 2))
