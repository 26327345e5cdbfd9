// Every kernel of the CPU core. Tensors are contiguous, row-major, given by pointer, dtype code and sizes;
// groups are m consecutive elements of a row, and m divides the row length unless said otherwise.
#pragma once

#include <cstdint>

#include "dispatch.h"
#include "pool.h"

namespace nm {

// mask[i] = 1 where w[i] is among the n largest magnitudes of its group.
void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, int threads);

// out = w where kept, +0.0 elsewhere; out may be w.
void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads);

}  // namespace nm
