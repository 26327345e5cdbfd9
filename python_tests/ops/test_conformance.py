"""Every op, listed once, passes the generic suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import dispatch, reference, testing
from python_tests.conformance import Conformance, Sample, for_each_sample
from python_tests.ops.samples import adamw, adamw_pack, ordered, pack_forms, packed, seed

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

DENSE = {
    "2:4": lambda: (torch.randn(6, 8), 2, 4),
    "bf16_1:8_3d": lambda: (torch.randn(2, 3, 16, dtype=BF16), 1, 8),
    "f64_3:5": lambda: (torch.randn(4, 15, dtype=F64), 3, 5),
    "1d": lambda: (torch.randn(32), 4, 32),
    "empty": lambda: (torch.randn(0, 8), 2, 4),
}


class TestMask(Conformance):
    op, samples, out = "nm_mask", DENSE, ("out",)


class TestPrune(Conformance):
    op, samples, out = "nm_prune", DENSE, ("out",)


class TestSoftThreshold(Conformance):
    op, samples, out = "nm_soft_threshold", DENSE, ("out",)


class TestSoftThresholdScale(Conformance):
    op, samples, rtol = "nm_soft_threshold_scale", DENSE, 1e-6


class TestTransposableMask(Conformance):
    op, out = "nm_transposable_mask", ("out",)
    samples = {
        "2:4": lambda: (torch.randn(8, 12), 2, 4),
        "bf16_3d": lambda: (torch.randn(2, 4, 8, dtype=BF16), 2, 4),
        "1:3": lambda: (torch.randn(6, 9), 1, 3),
        "empty": lambda: (torch.randn(0, 8), 2, 4),
    }


class TestCompress(Conformance):
    op, out = "nm_compress", ("out_values", "out_indices")
    samples = {"with_mask": lambda: (torch.randn(6, 8), 2, 4, torch.rand(6, 2, 4).argsort(-1).flatten(1) < 2), **DENSE}


class TestDecompress(Conformance):
    op, out = "nm_decompress", ("out",)
    samples = {
        "2:4": lambda: (*packed(6, 8, 2, 4), 2, 4, 8),
        "bf16_partial_group": lambda: (*packed(5, 27, 1, 8, BF16), 1, 8, 27),
        "f64_m_32": lambda: (*packed(3, 64, 4, 32, F64), 4, 32, 64),
        "empty": lambda: (*packed(0, 8, 2, 4), 2, 4, 8),
    }


def _short_mask(rows: int, cols: int) -> Tensor:
    """At most 2:4 along rows and columns, many groups short."""
    return reference.transposable_mask(torch.randn(rows, cols), 2, 4) & (torch.rand(rows, cols) < 0.7)


def _mask(rows: int, cols: int) -> Tensor:
    return reference.mask(torch.randn(rows, cols), 1, 8)


class TestPack(Conformance):
    op = "nm_pack"
    samples = {
        "rows": lambda: (torch.randn(6, 8), 2, 4, "magnitude", None, None, None, True, False, "canonical"),
        "columns_to_bf16": lambda: (torch.randn(16, 6), 1, 8, "magnitude", None, None, BF16, False, True, "canonical"),
        "transposable_mma": lambda: (torch.randn(64, 128), 2, 4, "transposable", None, None, F16, True, True, "mma.sp"),
        "transposable_wgmma": lambda: (torch.randn(128, 64, dtype=BF16), 2, 4, "transposable", None, None, None, True, True, "wgmma.sp"),
        "transposable_1:3": lambda: (torch.randn(6, 9), 1, 3, "transposable", None, None, BF16, True, True, "canonical"),
        "given": lambda: (torch.randn(8, 12), 2, 4, "given", _short_mask(8, 12), None, BF16, True, True, "canonical"),
        "given_columns_mma": lambda: (torch.randn(64, 16), 2, 4, "given", _short_mask(64, 16), None, BF16, False, True, "mma.sp"),
        "threshold": lambda: (torch.randn(6, 8), 2, 4, "threshold", None, torch.tensor(1.37), BF16, True, False, "canonical"),
        "threshold_bf16_columns": lambda: (torch.randn(16, 6, dtype=BF16), 1, 8, "threshold", None, None, None, False, True, "canonical"),
        "f64": lambda: (torch.randn(5, 10).to(F64), 3, 5, "threshold", None, torch.tensor(0.7).to(F64), F64, True, False, "canonical"),
        "to_f64": lambda: (torch.randn(5, 10), 3, 5, "magnitude", None, None, F64, True, False, "canonical"),
        "empty": lambda: (torch.randn(0, 8), 2, 4, "transposable", None, None, BF16, True, True, "canonical"),
        "rows_and_dense": lambda: (torch.randn(64, 64), 2, 4, "magnitude", None, None, BF16, True, False, "mma.sp", True),
        "dense_threshold": lambda: (torch.randn(6, 8), 2, 4, "threshold", None, torch.tensor(-1.37), BF16, False, False, "canonical", True),
        "dense_held": lambda: (torch.randn(8, 12), 2, 4, "held", _short_mask(8, 12), None, BF16, False, True, "canonical", True),
        "dense_transposable": lambda: (torch.randn(8, 12), 2, 4, "transposable", None, None, BF16, False, False, "canonical", True),
        "dense_given": lambda: (torch.randn(8, 24), 1, 8, "given", _mask(8, 24), None, None, False, False, "canonical", True),
    }


class TestLinear(Conformance):
    op, exact = "nm_linear", False
    samples = {
        "batch_1": lambda: (torch.randn(1, 32), *packed(24, 32, 2, 4), 2, 4, 32),
        "bias_3d": lambda: (torch.randn(2, 3, 32), *packed(10, 32, 1, 8), 1, 8, 32, torch.randn(10)),
        "bf16": lambda: (torch.randn(5, 64, dtype=BF16), *packed(7, 64, 2, 4, BF16), 2, 4, 64),
        "f64_1d": lambda: (torch.randn(8, dtype=F64), *packed(7, 8, 2, 4, F64), 2, 4, 8),
        "gelu": lambda: (torch.randn(3, 32), *packed(10, 32, 2, 4), 2, 4, 32, torch.randn(10), "gelu"),
        "silu_bf16": lambda: (torch.randn(6, 64, dtype=BF16), *packed(7, 64, 1, 4, BF16), 1, 4, 64, None, "silu"),
        "relu2_f64": lambda: (torch.randn(2, 16, dtype=F64), *packed(7, 16, 2, 8, F64), 2, 8, 16, None, "relu2"),
        "residual": lambda: (torch.randn(2, 3, 32), *packed(10, 32, 2, 4), 2, 4, 32, torch.randn(10), "gelu", torch.randn(2, 3, 10)),
        "added_bf16": lambda: (torch.randn(9, 64).to(BF16), *packed(7, 64, 2, 4, BF16), 2, 4, 64, None, "", torch.randn(9, 7).to(BF16)),
        "mma": lambda: (torch.randn(9, 128, dtype=BF16), *ordered(32, 128, "mma.sp"), 2, 4, 128, torch.randn(32).bfloat16(), "silu"),
        "mma_f16": lambda: (torch.randn(40, 64, dtype=torch.float16), *ordered(16, 64, "mma.sp", torch.float16), 2, 4, 64),
        "wgmma": lambda: (torch.randn(3, 64, dtype=BF16), *ordered(64, 64, "wgmma.sp"), 2, 4, 64),
        "empty": lambda: (torch.randn(0, 8), *packed(7, 8, 2, 4), 2, 4, 8),
    }


class TestMetadata(Conformance):
    op = "nm_metadata"
    samples = {
        "mma": lambda: (packed(48, 192, 2, 4)[1], 192, "mma.sp"),
        "wgmma": lambda: (packed(128, 64, 2, 4)[1], 64, "wgmma.sp"),
        "8bit": lambda: (packed(128, 256, 2, 4)[1], 256, "wgmma.sp.8bit"),
        "empty": lambda: (packed(0, 64, 2, 4)[1], 64, "mma.sp"),
    }


def _eight(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A packed weight of whole numbers in 8 bits."""
    return reference.quantize_pack(torch.randn(rows, cols), torch.tensor(9.0), dtype)


def _rounded(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return reference.quantize(torch.randn(rows, cols), torch.tensor(9.0), dtype)


class TestQuantize(Conformance):
    op = "nm_quantize"
    samples = {
        "e4m3": lambda: (torch.randn(6, 20), torch.tensor(3.7), E4M3, False),
        "int8_rows_transposed": lambda: (torch.randn(5, 9, dtype=BF16), torch.rand(9) * 50, torch.int8, True),
        "e5m2_f64": lambda: (torch.randn(5, 9, dtype=F64), torch.rand(5, dtype=F64), E5M2, False),
        "empty": lambda: (torch.randn(0, 8), torch.tensor(1.0), E4M3, True),
    }


class TestQuantizePack(Conformance):
    op = "nm_quantize_pack"
    samples = {
        "e4m3": lambda: (torch.randn(64, 128), torch.tensor(3.7), E4M3),
        "int8_rows": lambda: (torch.randn(128, 128, dtype=BF16), torch.rand(128) * 50, torch.int8),
        "empty": lambda: (torch.randn(0, 128), torch.tensor(1.0), E5M2),
    }


class TestLinearQuantized(Conformance):
    op, exact = "nm_linear_quantized", False
    samples = {
        "e4m3": lambda: (_rounded(5, 128, E4M3), torch.rand(5), *_eight(64, 128, E4M3), torch.rand(64), None, BF16, False, False),
        "int8": lambda: (
            _rounded(3, 128, torch.int8), torch.rand(1), *_eight(64, 128, torch.int8), torch.rand(1), torch.randn(64), torch.float32,
            False, True,
        ),
        "transposed_e5m2": lambda: (_rounded(24, 256, E4M3), torch.rand(1), *_eight(64, 256, E5M2), torch.rand(1), None, F16, True, False),
        "empty": lambda: (_rounded(0, 128, E4M3), torch.rand(1), *_eight(64, 128, E4M3), torch.rand(1), None, BF16, False, False),
    }  # fmt: skip

    @for_each_sample
    def test_opcheck(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch's check of the schema multiplies the arguments, which it has no kernel for in float8."""
        args = self.args(sample)
        torch.library.opcheck(self.raw(), args, **({} if args[0].dtype == torch.int8 else {"test_utils": "test_faketensor"}))


def _integers(rows: int, cols: int, n: int, m: int, bits: int, steps: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, positions and steps of a random weight."""
    values, indices = packed(rows, cols, n, m)
    integers, step = reference.quantize_values(values, bits, steps)
    return integers, indices, step


def _edges() -> Tensor:
    """Rows of kept values that are hard to round."""
    tiny, half = 2.0**-149, torch.arange(-4, 4).float() + 0.5
    rows = [
        torch.zeros(8), -torch.zeros(8), torch.full((8,), tiny), half, half * 127 / 3.5,
        torch.tensor([-8.0, 7, 1, 0.5, -0.5, 1.5, 2.5, -8]), torch.tensor([8.0, -7, 1, 0.5, -0.5, 1.5, 2.5, 8]),
        torch.tensor([3e38, -3e38, 1, 0, 0, 0, 0, 0]), torch.tensor([1e-42, -1e-40, 0, 0, 0, 0, 0, 0]),
    ]  # fmt: skip
    return torch.stack(rows)


class TestQuantizeValues(Conformance):
    op = "nm_quantize_values"
    samples = {
        "8": lambda: (torch.randn(6, 20), 8, 1),
        "8_groups_bf16": lambda: (torch.randn(2, 3, 24, dtype=BF16), 8, 3),
        "4": lambda: (torch.randn(6, 15), 4, 1),
        "4_groups": lambda: (torch.randn(6, 64), 4, 4),
        "4_groups_f16": lambda: (torch.randn(5, 32, dtype=F16), 4, 2),
        "8_edges": lambda: (_edges(), 8, 1),
        "4_edges": lambda: (_edges(), 4, 2),
        "empty": lambda: (torch.randn(0, 8), 4, 2),
    }


class TestDequantizeValues(Conformance):
    op, out = "nm_dequantize_values", ("out",)
    samples = {
        "8": lambda: (*reference.quantize_values(torch.randn(6, 20), 8, 1), 20, torch.float32),
        "4_bf16": lambda: (*reference.quantize_values(torch.randn(6, 64), 4, 4), 64, BF16),
        "4_odd_f16": lambda: (*reference.quantize_values(torch.randn(6, 15), 4, 1), 15, F16),
        "8_3d_f64": lambda: (*reference.quantize_values(torch.randn(2, 3, 24), 8, 3), 24, F64),
        "empty": lambda: (*reference.quantize_values(torch.randn(0, 8), 8, 2), 8, BF16),
    }


class TestLinearIntegers(Conformance):
    op, exact = "nm_linear_integers", False
    samples = {
        "int8_batch_1": lambda: (torch.randn(1, 128), *_integers(24, 128, 2, 4, 8), 2, 4, 128),
        "int8_bf16": lambda: (torch.randn(5, 64, dtype=BF16), *_integers(7, 64, 2, 4, 8), 2, 4, 64),
        "int4_groups_bf16": lambda: (torch.randn(2, 256, dtype=BF16), *_integers(24, 256, 2, 4, 4, 2), 2, 4, 256),
        "int4_bias_3d": lambda: (torch.randn(2, 3, 32), *_integers(10, 32, 1, 8, 4), 1, 8, 32, torch.randn(10)),
        "int8_1:4_silu_bf16": lambda: (torch.randn(16, 64, dtype=BF16), *_integers(7, 64, 1, 4, 8, 2), 1, 4, 64, None, "silu"),
        "int4_residual_f16": lambda: (
            torch.randn(3, 64, dtype=F16), *_integers(10, 64, 4, 8, 4, 2), 4, 8, 64, torch.randn(10, dtype=F16), "gelu",
            torch.randn(3, 10, dtype=F16),
        ),
        "int4_partial_group": lambda: (torch.randn(4, 27), *_integers(5, 27, 1, 8, 4), 1, 8, 27),
        "int8_f64": lambda: (torch.randn(8, dtype=F64), *_integers(7, 8, 2, 4, 8), 2, 4, 8),
        "empty": lambda: (torch.randn(0, 8), *_integers(7, 8, 2, 4, 8), 2, 4, 8),
    }  # fmt: skip


class TestLinearDgrad(Conformance):
    op, exact = "nm_linear_dgrad", False
    samples = {
        "2:4": lambda: (torch.randn(5, 24), *packed(24, 32, 2, 4), 2, 4, 32),
        "bf16_3d": lambda: (torch.randn(2, 3, 10, dtype=BF16), *packed(10, 32, 1, 16, BF16), 1, 16, 32),
        "empty": lambda: (torch.randn(0, 7), *packed(7, 8, 2, 4), 2, 4, 8),
    }


class TestLinearWgrad(Conformance):
    op, exact = "nm_linear_wgrad", False
    samples = {
        "2:4": lambda: (*packed(10, 32, 2, 4), 2, 4, 32, torch.randn(32, 12)),
        "mma": lambda: (*ordered(16, 128, "mma.sp"), 2, 4, 128, torch.randn(128, 24, dtype=BF16)),
        "mma_f32": lambda: (*ordered(16, 128, "mma.sp"), 2, 4, 128, torch.randn(128, 24, dtype=BF16), torch.float32),
        "bf16_padded_tokens": lambda: (*packed(6, 21, 2, 4, BF16), 2, 4, 21, torch.randn(21, 9, dtype=BF16)),
        "bf16_padded_f32": lambda: (*packed(6, 21, 2, 4, BF16), 2, 4, 21, torch.randn(21, 9, dtype=BF16), torch.float32),
        "f16_f32": lambda: (*packed(10, 32, 1, 8, F16), 1, 8, 32, torch.randn(32, 12, dtype=F16), torch.float32),
        "empty": lambda: (*packed(10, 0, 2, 4), 2, 4, 0, torch.randn(0, 12)),
    }


MVUE = {
    "2:4": lambda: (torch.randn(6, 8), 2, 4, -1, seed(7, 9), "exact"),
    "padded_dim_0": lambda: (torch.randn(11, 6), 2, 4, 0, seed(-1, 2**40), "exact"),
    "bf16_1:8_3d": lambda: (torch.randn(2, 9, 16, dtype=BF16), 1, 8, 1, seed(), "exact"),
    "approx": lambda: (torch.randn(6, 8), 2, 4, -1, seed(7, 9), "approx"),
    "f64": lambda: (torch.randn(3, 10, dtype=F64), 3, 5, 1, seed(), "exact"),
    "empty": lambda: (torch.randn(0, 8), 2, 4, -1, seed(), "exact"),
}


class TestMvue(Conformance):
    op, samples, out = "nm_mvue", MVUE, ("out",)


class TestMvueCompress(Conformance):
    op, out = "nm_mvue_compress", ("out_values", "out_indices")
    samples = MVUE | {
        "wgmma": lambda: (torch.randn(128, 64, dtype=BF16), 2, 4, 0, seed(3), "exact", "wgmma.sp"),
        "mma_rows": lambda: (torch.randn(16, 64, dtype=F16), 2, 4, 1, seed(3), "approx", "mma.sp"),
    }


class TestMaskedAdamW(Conformance):
    op, mutates = "nm_masked_adamw_", True
    samples = {
        "2:4": lambda: adamw(),
        "unmasked": lambda: adamw(n=0, m=0),
        "bf16_amsgrad": lambda: adamw(dtype=BF16, amsgrad=True),
        "1:8_f16": lambda: adamw(((6, 16), (3, 8)), 1, 8, F16, geometric=True),
        "frozen_scaled": lambda: adamw(frozen=True, eps_inside=True, maximize=True, scaled=True, clamp=0.5),
        "skipped": lambda: adamw(scaled=True, inf=True),
        "f64": lambda: adamw(dtype=F64),
        "held": lambda: adamw(((6, 8), (3, 13)), 0, 0, held=True, geometric=True, scaled=True),
        "held_fixed_bf16": lambda: adamw(((6, 16), (9,)), 0, 0, BF16, held=True, fixed=True, amsgrad=True),
        "bf16_states": lambda: adamw(amsgrad=True, states=BF16, geometric=True),
        "stochastic": lambda: adamw(((6, 16), (3, 8)), 1, 8, F16, states=BF16, stochastic=True),
        "held_fixed_f64": lambda: adamw(n=0, m=0, dtype=F64, held=True, fixed=True, frozen=True),
    }

    def check_backend(self, sample: Sample, result: Any, expected: Any, backend: str) -> None:
        # the statistics are sums over the tensors, so they agree to rounding; the tensors agree to the bit
        torch.testing.assert_close(result[0], expected[0], rtol=1e-6, atol=0, equal_nan=True)
        testing.assert_equal_bits(result[1], expected[1], backend)


class TestMaskedAdamWPack(TestMaskedAdamW):
    op = "nm_masked_adamw_pack_"
    samples = {
        "magnitude_dense": lambda: adamw_pack("magnitude", "wgmma.sp", dense=True),
        "threshold_scaled": lambda: adamw_pack("threshold", "canonical", scaled=True, eps_inside=True, clamp=0.5),
        "rows_by_magnitude": lambda: adamw_pack("magnitude", "canonical", maximize=True),
        "skipped": lambda: adamw_pack("threshold", "wgmma.sp", dense=True, scaled=True, inf=True),
        "any_shape": lambda: adamw_pack("magnitude", "canonical", ((6, 8), (3, 4)), dense=True),
    }


def _positions_kept(columns: bool) -> tuple[Any, ...]:
    args = list(pack_forms("held", "wgmma.sp", columns=columns))
    args[6], args[8] = [], []
    return tuple(args)


class TestPackForms(Conformance):
    op, mutates = "nm_pack_forms_", True
    samples = {
        "held_both": lambda: pack_forms("held", "wgmma.sp", columns=True),
        "magnitude_dense": lambda: pack_forms("magnitude", "canonical", dense=True),
        "threshold_dense": lambda: pack_forms("threshold", "mma.sp", dense=True),
        "held_positions_kept": lambda: _positions_kept(True),
        "any_shape": lambda: pack_forms("magnitude", "canonical", shapes=((6, 8), (3, 4)), dense=True),
    }


def test_every_op_is_listed() -> None:
    listed = {c.op for c in globals().values() if isinstance(c, type) and issubclass(c, Conformance) and c is not Conformance}
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nmkernels::")}
    functional = {name.split(".")[0] for name in defined if not name.endswith("_out")}
    assert listed == functional - {"refuse"} == set(dispatch._impls)  # that one has no backend: it only raises
