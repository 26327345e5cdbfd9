// The tiles of a block of MaskedAdamW: which they are, and the param that they belong to.
#pragma once

#include "adamw_chunk.h"

namespace nm::cuda {

// The block's param becomes row i of the table. Every thread must come here.
NM_DEVICE void open_param(const AdamWTables& tables, int32_t i, AdamWCurrent& current) {
    __syncthreads();  // some threads may still read the last one
    const int thread = int(threadIdx.x);
    const auto* words = reinterpret_cast<const int64_t*>(tables.params + i);
    if (thread < kParamWords) reinterpret_cast<int64_t*>(&current.param)[thread] = words[thread];
    const int scalar = thread - 32;
    if (scalar >= 0 && scalar < int(sizeof(AdamW)) / 4) {
        reinterpret_cast<uint32_t*>(&current.scalars)[scalar] = tables.scalars[int64_t(i) * kScalarWords + scalar];
    }
    if (thread == 64) current.gradient = tables.gradients[tables.params[i].index];
    __syncthreads();
}

// f(tile) for the block's tiles, numbered within their param, which is `current`.
template <class F>
NM_DEVICE void each_tile(const AdamWTables& tables, const AdamWPart& part, AdamWCurrent& current, const F& f) {
    int64_t tile = part.tile(blockIdx.x);
    const int64_t end = part.tile(int64_t(blockIdx.x) + 1);
    for (int32_t i = tables.owners[part.first_block + blockIdx.x]; tile < end; ++i) {
        open_param(tables, i, current);
        const int64_t first = current.param.first, last = first + current.param.tiles;
        for (; tile < end && tile < last; ++tile) f(tile - first);
    }
}

template <int kThreads>
NM_DEVICE void put_stats(const AdamWTables& tables, const AdamWPart& part, const AdamWOptions& o, const Tally& tally) {
    reduce_block<kThreads>(tally, o.geometric, tables.partials + (part.first_block + blockIdx.x), tables.blocks);
}

// a / b and the rest, in 32 bits where they suffice.
NM_DEVICE int64_t divided(int64_t a, int64_t b, int64_t& rest) {
    if (uint64_t(a | b) >> 32) {
        rest = a % b;
        return a / b;
    }
    rest = uint32_t(a) % uint32_t(b);
    return uint32_t(a) / uint32_t(b);
}

}  // namespace nm::cuda
