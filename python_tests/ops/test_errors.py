"""Wrong calls raise the right class and say what is wrong, with what value, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nmkernels import DtypeError, NMError, PatternError, ShapeError, ops
from nmkernels.ops import OptionError
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw, seed

raw = torch.ops.nmkernels
W = torch.arange(24.0).reshape(3, 8) + 1
C = ops.compress(W, "2:4")
WIDE = torch.ones(16, 64)
ORDERED = ops.relayout(ops.compress(WIDE.half(), "2:4"), "mma.sp")
SEED = torch.zeros(2, dtype=torch.int64)
D = torch.ones(16, 32).half(), torch.zeros(1, 1, 32, dtype=torch.int32)
DENSE_OPS = [ops.mask, ops.prune, ops.soft_threshold, ops.soft_threshold_scale, ops.transposable_mask, ops.compress]
DENSE_OPS += [ops.pack, ops.mvue, ops.mvue_compress]


@for_each("op", DENSE_OPS)
@for_each("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtype(op: Callable, dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=rf"nm_{op.__name__}: .*{dtype}.*float32.*\.") as error:
        op(torch.ones(4, 8).to(dtype), "2:4")
    assert isinstance(error.value, TypeError)


@for_each("op", DENSE_OPS)
def test_indivisible(op: Callable) -> None:
    with pytest.raises(ShapeError, match=rf"nm_{op.__name__}: .*10.*multiple of M=4.*Pad it to 12"):
        op(torch.ones(4, 10), "2:4")
    with pytest.raises(ShapeError, match="nm_"):
        op(torch.tensor(1.0), "2:4")


@for_each("op", DENSE_OPS)
@for_each("pattern", ["4:2", "0:4", "x", "2:512", 2.4, None, ["2:4"], (2, 4)])
def test_pattern(op: Callable, pattern: object) -> None:
    with pytest.raises(PatternError, match="N:M"):
        op(W, pattern)


WRONG = {
    "raw_pattern": (lambda: raw.nm_mask(W, 3, 2), PatternError, "3:2"),
    "tile_rows": (lambda: ops.transposable_mask(W, "2:4"), ShapeError, "second-to-last.*3.*multiple of M=4"),
    "tile_1d": (lambda: ops.transposable_mask(torch.ones(8), "2:4"), ShapeError, "two dimensions"),
    "mask_dtype": (lambda: ops.compress(W, "2:4", mask=torch.ones(3, 8)), DtypeError, "float32.*must be bool"),
    "mask_shape": (lambda: ops.compress(W, "2:4", mask=torch.ones(8, dtype=torch.bool)), ShapeError, r"\(8,\).*\(3, 8\)"),
    "mask_too_full": (lambda: ops.compress(W, "2:4", mask=torch.ones(3, 8, dtype=torch.bool)), ShapeError, "4"),
    "mask_device": (lambda: ops.compress(W, "2:4", mask=torch.ones(3, 8, dtype=torch.bool, device="meta")), ShapeError, "cpu.*meta"),
    "out_shape": (lambda: ops.prune(W, "2:4", out=torch.empty(3, 4)), ShapeError, r"nm_prune: out has shape \(3, 4\).*\(3, 8\)"),
    "out_dtype": (lambda: ops.mask(W, "2:4", out=torch.empty(3, 8)), DtypeError, "nm_mask: out has dtype torch.float32.*torch.bool"),
    "out_compressed": (lambda: ops.compress(W, "1:4", out=C), ShapeError, "1:4 of shape"),
    "out_compressed_dtype": (lambda: ops.compress(W.half(), "2:4", out=C), DtypeError, "out_values"),
    "indices_size": (lambda: ops.Compressed(C.values, C.indices[:, :0], "2:4", (3, 8)), ShapeError, r"\(3, 0\).*need \(3, 1\)"),
    "indices_dtype": (lambda: ops.Compressed(C.values, C.indices.int(), "2:4", (3, 8)), DtypeError, "int32.*uint8"),
    "values_size": (lambda: ops.Compressed(C.values, C.indices, "1:4", (3, 8)), ShapeError, r"1:4 need \(3, 2\)"),
    "rows": (lambda: ops.Compressed(C.values, C.indices, "2:4", (4, 8)), ShapeError, "all dimensions but the last"),
    "negative_cols": (lambda: raw.nm_decompress(C.values, C.indices, 2, 4, -8), ShapeError, "-8"),
    "activation": (lambda: ops.linear(torch.ones(2, 8), C, None, "tanh"), OptionError, r"nm_linear: activation .tanh. .*gelu.*silu.*relu2"),
    "pack_rows": (lambda: ops.pack(W, "2:4", "transposable"), ShapeError, "nm_pack: the number of rows is 3.*multiple of M=4"),
    "pack_1d": (lambda: ops.pack(W[0], "2:4"), ShapeError, r"nm_pack: .*\(8,\).*matrix"),
    "pack_dtype": (lambda: ops.pack(W, "2:4", dtype=torch.int8), DtypeError, "nm_pack: .*int8.*bfloat16"),
    "pack_mask": (lambda: ops.pack(W, "2:4", "best"), OptionError, "nm_pack: .*'best'.*'transposable'"),
    "pack_mask_too_full": (lambda: ops.pack(W, "2:4", torch.ones(3, 8, dtype=torch.bool)), ShapeError, "2:4"),
    "pack_both": (lambda: ops.pack(W, "2:4", columns=True), PatternError, "nm_pack: .*rows and columns at once.*transposable mask"),
    "pack_neither": (lambda: ops.pack(W, "2:4", rows=False), OptionError, "nm_pack: neither"),
    "pack_scale": (lambda: ops.pack(W, "2:4", scale=torch.tensor(1.0)), OptionError, "nm_pack: .*scale"),
    "pack_scale_shape": (lambda: ops.pack(W, "2:4", "threshold", scale=torch.ones(3)), ShapeError, r"nm_pack: scale.*\(3,\)"),
    "pack_layout": (lambda: ops.pack(W, "2:4", layout="coo"), OptionError, "nm_pack: layout 'coo'"),
    "pack_layout_tile": (lambda: ops.pack(W.half(), "2:4", layout="mma.sp"), ShapeError, r"nm_pack: .*16 rows.*\(3, 8\)"),
    "pack_layout_dtype": (lambda: ops.pack(torch.ones(16, 64), "2:4", layout="mma.sp"), DtypeError, "nm_pack: .*16-bit"),
    "device_layout": (lambda: ops.DeviceCompressed(*D, "canonical", "2:4", (16, 64)), ShapeError, "device layout"),
    "device_shape": (lambda: ops.DeviceCompressed(*D, "mma.sp", "2:4", (32, 64)), ShapeError, r"\(16, 32\).*\(32, 32\)"),
    "device_meta": (lambda: ops.DeviceCompressed(D[0], D[1].long(), "mma.sp", "2:4", (16, 64)), DtypeError, "int64.*int32"),
    "device_device": (lambda: ops.DeviceCompressed(D[0], D[1].to("meta"), "mma.sp", "2:4", (16, 64)), ShapeError, "cpu.*meta"),
    "x_size": (lambda: ops.linear(torch.ones(2, 9), C), ShapeError, r"nm_linear: x has shape \(2, 9\).*must be 8"),
    "x_dtype": (lambda: ops.linear(torch.ones(2, 8).bfloat16(), C), DtypeError, "bfloat16.*float32"),
    "x_device": (lambda: ops.linear(torch.ones(2, 8, device="meta"), C), ShapeError, "meta.*cpu"),
    "bias_shape": (lambda: ops.linear(torch.ones(2, 8), C, torch.ones(8)), ShapeError, r"\(8,\).*\(3,\)"),
    "bias_dtype": (lambda: ops.linear(torch.ones(2, 8), C, torch.ones(3).half()), DtypeError, "float16"),
    "g_size": (lambda: ops.linear_dgrad(torch.ones(2, 8), C), ShapeError, r"nm_linear_dgrad: g.*must be 3"),
    "tokens": (lambda: ops.linear_wgrad(C, torch.ones(7, 5)), ShapeError, "7 rows.*8 tokens"),
    "wgrad_dtype": (lambda: ops.linear_wgrad(C, torch.ones(8, 5), torch.half), DtypeError, "nm_linear_wgrad: .*float32.*not .*float16"),
    "mvue_layout": (lambda: raw.nm_mvue_compress(W[None], 2, 4, 2, SEED, "exact", "mma.sp"), ShapeError, r"matrices.*\(1, 3, 8\)"),
    "mvue_tiles": (lambda: raw.nm_mvue_compress(D[0].t(), 2, 4, 1, SEED, "exact", "wgmma.sp"), ShapeError, r"64 rows.*\(32, 16\)"),
    "not_matrix": (lambda: ops.linear(torch.ones(2, 8), ops.compress(torch.ones(1, 3, 8), "2:4")), ShapeError, "matrix"),
    "method": (lambda: ops.mvue(W, "2:4", method="best"), ops.OptionError, "'best'.*exact.*approx"),
    "approx_n": (lambda: ops.mvue(W, "1:4", method="approx"), PatternError, '1:4.*method="exact"'),
    "dim": (lambda: ops.mvue(W, "2:4", dim=2), ShapeError, "dim=2"),
    "dim_low": (lambda: ops.mvue_compress(W, "2:4", dim=-3), ShapeError, "dim=-3"),
    "seed_dtype": (lambda: ops.mvue(W, "2:4", seed=torch.tensor([1.0, 2.0])), DtypeError, "float32.*int64"),
    "seed_shape": (lambda: ops.mvue(W, "2:4", seed=torch.tensor([1])), ShapeError, r"\(1,\)"),
    "seed_device": (lambda: ops.mvue(W, "2:4", seed=seed().to("meta")), ShapeError, "meta"),
    "seed_large": (lambda: ops.mvue(W, "2:4", seed=2**64), ops.OptionError, "64 bits"),
    "seed_type": (lambda: ops.mvue(W, "2:4", seed=1.5), ops.OptionError, "1.5"),
    "offset_with_tensor": (lambda: ops.mvue(W, "2:4", seed=seed(), offset=1), ops.OptionError, "offset=1"),
    "adamw_seed": (lambda: ops.masked_adamw_([], [], [], [], [], torch.zeros(9).double(), seed=2**63), ops.OptionError, "int64"),
    "relayout_pattern": (lambda: ops.relayout(ops.compress(WIDE.half(), "3:8"), "mma.sp"), PatternError, "3:8.*at most 2 of every M"),
    "relayout_dtype": (lambda: ops.relayout(ops.compress(WIDE, "2:4"), "mma.sp"), DtypeError, "16-bit"),
    "relayout_layout": (lambda: ops.relayout(ops.compress(WIDE.half(), "2:4"), "coo"), ops.OptionError, "'coo'.*'mma.sp'"),
    "relayout_batch": (lambda: ops.relayout(ops.compress(torch.ones(2, 16, 64).half(), "2:4"), "mma.sp"), ShapeError, "matrix"),
    "relayout_dgrad": (lambda: ops.linear_dgrad(torch.ones(1, 16).half(), ORDERED), ops.OptionError, "packed.columns"),
    "relayout_shape": (lambda: raw.nm_linear(WIDE.half(), ORDERED.values, ORDERED.meta, 2, 4, 128), ShapeError, "128"),
    "relayout_raw": (lambda: raw.nm_metadata(torch.zeros(16, 8).byte(), 64, "canonical"), ShapeError, "in that order already"),
    "relayout_residual": (lambda: ops.linear(WIDE.half(), ORDERED, residual=W.half()), ShapeError, r"residual.*\(16, 16\)"),
    "residual_dtype": (lambda: ops.linear(WIDE.half(), ORDERED, residual=torch.ones(16, 16)), DtypeError, "residual"),
    "offset_without_seed": (lambda: ops.mvue(W, "2:4", offset=1), ops.OptionError, "offset=1"),
}


@for_each("name", WRONG)
def test_wrong_call(name: str) -> None:
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()
    assert issubclass(kind, NMError)


def _adamw_with(**changes: object) -> None:
    names = [argument.name for argument in raw.nm_masked_adamw_.default._schema.arguments]
    raw.nm_masked_adamw_(*{**dict(zip(names, adamw(((2, 8),)), strict=True)), **changes}.values())


PLAIN = {"n": 0, "m": 0}
SHORT = {name: [torch.ones(3, 8).bfloat16()] for name in ("exp_avgs", "exp_avg_sqs")} | {"grads": [torch.ones(3, 8)]}
EXPANDED = {
    f"{name}_expanded_{dim}": ({name: [torch.ones(shape).expand(2, 8)]}, ShapeError, r"\[0\] is expanded")
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    for dim, shape in enumerate(((1, 8), (2, 1)))
}
ADAMW = {
    "grads": ({"grads": [torch.ones(2, 4)]}, ShapeError, r"grads\[0\].*\(2, 4\).*\(2, 8\)"),
    "exp_avgs": ({"exp_avgs": [torch.ones(2, 8).double()]}, DtypeError, r"exp_avgs\[0\].*float64.*float32"),
    "exp_avg_sqs": ({"exp_avg_sqs": []}, ShapeError, "1 params and 0 exp_avg_sqs"),
    "max": ({"max_exp_avg_sqs": [torch.ones(2, 8)] * 2}, ShapeError, "1 params and 2 max_exp_avg_sqs; .* or none"),
    "steps": ({"steps": [torch.tensor(1)]}, DtypeError, r"steps\[0\].*int64"),
    "hyper": ({"hyper": torch.ones(9)}, ShapeError, "hyper.*float32.*lr, beta1"),
    "m": ({"m": 3}, ShapeError, r"params\[0\] is 8.*M=3"),
    "n": ({"n": 5}, PatternError, "5:4"),
    "no n": ({"n": 0}, PatternError, "0:4"),
    "no m": ({"m": 0}, PatternError, "2:0"),
    "found_inf": ({"found_inf": torch.ones(1).double()}, ShapeError, "found_inf.*float64"),
    "masks and a pattern": ({"masks": [torch.ones(2, 1).byte()]}, ops.OptionError, "masks and the pattern 2:4.*pattern=None"),
    "masks": ({"masks": [torch.ones(2, 1).byte()] * 2, **PLAIN}, ShapeError, "1 params and 2 masks; .* or none"),
    "bool masks": ({"masks": [torch.ones(2, 8).bool()], **PLAIN}, DtypeError, r"masks\[0\].*bool.*mask_bits"),
    "bytes of masks": ({"masks": [torch.ones(2, 2).byte()], **PLAIN}, ShapeError, r"masks\[0\].*\(2, 2\).*\(2, 1\)"),
    "states": ({"exp_avgs": [torch.ones(2, 8).bfloat16()]}, DtypeError, "some states are bfloat16"),
    "states of float64": (
        {"params": [torch.ones(3, 8).double()], **SHORT},
        DtypeError,
        r"exp_avgs.* a .*float64 param.*float64\.",
    ),
    "stochastic": ({"stochastic": True}, ops.OptionError, "stochastic=True.*float32.*bfloat16"),
    "fixed": ({"fixed": True}, ops.OptionError, "fixed=True.*masks"),
    "params": ({"params": [torch.ones(2, 8, dtype=torch.int64)]}, DtypeError, r"params\[0\].*int64"),
    **EXPANDED,
}


@for_each("name", ADAMW)
def test_wrong_adamw_changes_nothing(name: str) -> None:
    changes, kind, text = ADAMW[name]
    given = {"params": [torch.ones(2, 8)], "steps": [torch.tensor(4.0)], **changes}
    with pytest.raises(kind, match=text):
        _adamw_with(**given)
    assert (given["params"][0] == 1).all() and (name == "steps" or given["steps"][0] == 4)


def test_adamw_accepts_tensors_that_only_look_expanded() -> None:
    """A gradient is only read; a stride of 0 over one element, or none, shares nothing."""
    _adamw_with(grads=[torch.ones(()).expand(2, 8)])
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    for shape in ((1, 8), (0, 8)):
        _adamw_with(**{name: [torch.ones(8).as_strided(shape, (0, 1))] for name in names})


def test_errors_under_compile() -> None:
    """The contract also speaks while tracing, with its own message."""
    compiled = torch.compile(lambda w: ops.prune(w, "2:4"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="multiple of M=4"):
        compiled(torch.ones(2, 10))
