// Tensor maps, the descriptors of TMA copies of a matrix, made on the host by the driver.
#pragma once

#include <cuda.h>

#include "../queue.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

// Whether this driver supports them.
bool can_encode();

// `dtype` is that of 16-bit elements. The driver needs a context; the queue guarantees one.
CUtensorMap encoded(const Map& map, int dtype, const Queue& queue);

}  // namespace nm::cuda::gemm
