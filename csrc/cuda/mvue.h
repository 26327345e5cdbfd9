// Shared by mvue.cu (2:4) and mvue_any.cu (all other patterns).
#pragma once

#include "../core/types.h"
#include "kernels.h"

namespace nm::cuda {

// A call: g is [outer, length, inner], groups lie along `length`, rows of the packed form are [outer, inner].
struct Mvue {
    const void* g;
    int64_t outer, length, inner;
    const int64_t* seed;  // (seed, offset), read on the device
    // dense, in the layout of g, or null and the packed form
    void *dense, *values;
    uint8_t* indices;
    int64_t per_row, row_bytes;  // groups and bytes of indices of a packed row
};

// mvue_any.cu
void mvue_any(const Mvue& call, int dtype, int n, int m, bool approx, const Queue& queue);

}  // namespace nm::cuda
