// Tensor maps: what copies of boxes read of a matrix, made on the host by the driver.
#pragma once

#include <cuda.h>

#include "../queue.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

// Whether this driver makes them.
bool can_encode();

// Elements of 16 bits are of this dtype. The driver asks for a context, of which the queue is the proof.
CUtensorMap encoded(const Map& map, int dtype, const Queue& queue);

}  // namespace nm::cuda::gemm
