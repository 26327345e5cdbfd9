// Packing that also gives the dense form of the same groups.
#pragma once

#include "packing.h"

namespace nm::cuda {

// A quad in dense layout too: its sixteen elements rounded, +0 where not kept. `mask` is a given one, and becomes that of what is stored.
template <class In, class Out, int kSelect>
NM_DEVICE uint32_t spread_quad(uint32_t* words, uint32_t& mask, float scale, uint32_t* spread, uint32_t* values, bool& overfull) {
    static_assert(sizeof(Out) == 2);
    if constexpr (kSelect == kGiven) {
        if (!two_each(mask)) {
            overfull = overfull || more_than_two(mask);
            clear_unkept<In>(words, mask);
            mask = filled_up(mask);
        }
    }
    if constexpr (kSelect == kThreshold) {
        const LargestTwo<In> largest(words);
        mask = largest.mask;
        constexpr int kHalf = kGroupWords<In> / 2;
        NM_UNROLL
        for (int half = 0; half < 2; ++half) {  // of each group
            uint32_t pairs[4 * kHalf], shrunk[4];
            NM_UNROLL
            for (int i = 0; i < 4 * kHalf; ++i) pairs[i] = words[(i / kHalf * 2 + half) * kHalf + i % kHalf];
            shrink_quad<In, Out>(pairs, largest.third, scale, shrunk);
            NM_UNROLL
            for (int g = 0; g < 4; ++g) spread[2 * g + half] = shrunk[g];
        }
    } else {
        if constexpr (kSelect == kMagnitude) mask = LargestTwo<In>(words).mask;
        if constexpr (std::is_same_v<In, Out>) {
            memcpy(spread, words, 16 * sizeof(Out));
        } else {
            round_quad<Out>(words, spread);
        }
    }
    pick_two<Out>(spread, mask, values);
    clear_unkept<Out>(spread, mask);
    return index_bytes_of(mask);
}

}  // namespace nm::cuda
