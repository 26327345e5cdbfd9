// The table of the instruction set that this file is compiled for.
#include "../isa.h"

namespace nm {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kBf16Dots = true;
#else
constexpr bool kBf16Dots = false;
#endif

}  // namespace

namespace NM_ISA {

extern const Kernels kernels{
    mask,      prune,        soft_threshold, soft_threshold_scale, transposable_mask, compress, decompress, linear, spmm, spmm_transposed,
    bf16_spmm, bf16_spmm_transposed, kBf16Dots, mvue, mvue_compress, masked_adamw, fingerprint,
    linear_integers, dequantize_values, quantize_values,
};

}  // namespace NM_ISA
}  // namespace nm
