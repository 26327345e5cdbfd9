// A call of pack, and its kernels.
#pragma once

#include "../core/dispatch.h"
#include "kernels.h"
#include "packing.h"

namespace nm::cuda {

// Rows, canonical: whole chunks of a thread in registers. Returns how many of the rows * cols elements it has done.
int64_t pack_rows(const Pack& call, const Queue& queue);

// Columns, both ways, or a device layout: tiles of 2:4 and other small patterns. Returns false if unsupported.
bool pack_tiles(const Pack& call, const Queue& queue);

// Any pattern, one way, canonical; from element `first` on, which starts a row or, if rows end on whole bytes, a byte.
void pack_any(const Pack& call, int64_t first, const Queue& queue);

// f(In{}, Out{}) for the pairs with their own kernels; otherwise false.
template <class F>
bool by_usual_dtypes(int in, int out, const F& f) {
    if (in == kFloat32 && out == kFloat32) return f(float{}, float{}), true;
    if (in == kFloat32 && out == kBFloat16) return f(float{}, bf16{}), true;
    if (in == kFloat32 && out == kFloat16) return f(float{}, fp16{}), true;
    if (in == kBFloat16 && out == kBFloat16) return f(bf16{}, bf16{}), true;
    if (in == kFloat16 && out == kFloat16) return f(fp16{}, fp16{}), true;
    return false;
}

}  // namespace nm::cuda
