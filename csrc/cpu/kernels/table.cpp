// The table of the instruction set that this file is compiled for.
#include "../isa.h"

namespace nm {
namespace NM_ISA {

extern const Kernels kernels{
    mask,   prune, soft_threshold,  soft_threshold_scale, transposable_mask, compress,     decompress,
    linear, spmm,  spmm_transposed, mvue,                 mvue_compress,     masked_adamw, fingerprint,
};

}  // namespace NM_ISA
}  // namespace nm
