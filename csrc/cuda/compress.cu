// Packing along rows, in the canonical form: a stream of whole groups, each thread packs a chunk of them in registers.
#include "launch.h"
#include "pack.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// A thread's chunk of consecutive memory: 32 or 64 bytes that give at least a byte of indices. This is also the distance of lanes;
// with more, every load of a lane would touch its own cache line. It writes at most 16 bytes of values, next to those of the next
// lane: smaller writes would send a sector twice.
template <class In, class Out, class P>
struct Chunk {
    static constexpr bool kQuad = P::n == 2 && P::m == 4;
    static constexpr int kElements = kQuad && sizeof(Out) == 4 ? 8 : kQuad || (sizeof(In) == 4 && P::m < 16) ? 16 : 32;
    static constexpr int kGroups = kElements / P::m, kValues = kGroups * P::n;
    static constexpr int kIndexBytes = kValues * (P::m <= 4 ? 2 : 4) / 8;
    static constexpr int kWords = kElements * int(sizeof(In)) / 4;
    static constexpr int kSteps = kWords <= 8 ? 2 : 1;  // chunks that a thread loads before it packs them
    // two groups are packed as a quad with two zero groups, which the compiler removes
    static constexpr int kWordRoom = kQuad ? 4 * int(sizeof(In)) : kWords, kFlagRoom = kQuad ? 4 : kElements / 4;
};

template <class In, class Out, class P>
NM_DEVICE uint32_t pack_small(const uint32_t* words, const uint32_t* flags, uint32_t* values, bool given, bool& overfull) {
    using Each = SmallGroup<In, P>;
    constexpr int kGroups = Chunk<In, Out, P>::kGroups, kGroupOf = P::m * int(sizeof(In)) / 4;
    uint32_t bits[kGroups * P::n], indices = 0;
    NM_UNROLL
    for (int g = 0; g < kGroups; ++g) {
        uint32_t mask = 0;
        if (given) {
            NM_UNROLL
            for (int i = 0; i < P::m / 4; ++i) mask |= four_flags(flags[g * P::m / 4 + i]) << (4 * i);
            overfull = overfull || __popc(mask) > P::n;
        }
        const Each group = given ? Each(words + g * kGroupOf, mask) : Each(words + g * kGroupOf);
        indices |= group.code << (g * Each::kWidth);
        NM_UNROLL
        for (int k = 0; k < P::n; ++k) bits[g * P::n + k] = bits_of(converted<In, Out>(of_bits<In>(group.kept[k])));
    }
    if constexpr (sizeof(Out) == 4) {
        NM_UNROLL
        for (int i = 0; i < kGroups * P::n; ++i) values[i] = bits[i];
    } else {
        NM_UNROLL
        for (int i = 0; i < kGroups * P::n / 2; ++i) values[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x5410);
    }
    return indices;
}

template <class In, class Out, int kSelect>
NM_DEVICE uint32_t pack_quad(uint32_t* words, const uint32_t* flags, float scale, uint32_t* values, bool& overfull) {
    if constexpr (kSelect == kGiven) {
        uint32_t mask = 0;
        NM_UNROLL
        for (int g = 0; g < 4; ++g) mask |= four_flags(flags[g]) << (4 * g);
        return joined_nibbles(pack_given_quad<In, Out>(words, mask, values, overfull));
    } else {
        return joined_nibbles(pack_largest_quad<In, Out, kSelect>(words, scale, values));
    }
}

template <class In, class Out, class P, int kSelect>
__global__ void __launch_bounds__(kThreads)
    pack_rows_kernel(const In* w, const uint8_t* mask, const float* scale, Out* values, uint8_t* indices, int* overfull, int64_t chunks) {
    using C = Chunk<In, Out, P>;
    uint32_t words[C::kSteps][C::kWordRoom] = {}, flags[C::kSteps][C::kFlagRoom];  // of a given mask
    const int64_t first = int64_t(blockIdx.x) * C::kSteps * kThreads + threadIdx.x;
    const float factor = kSelect == kThreshold ? scale_at(scale) : 1.0f;
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        NM_UNROLL
        for (int i = 0; i < C::kFlagRoom; ++i) flags[s][i] = 0x0101u;
        const int64_t chunk = first + s * kThreads;
        if (chunk >= chunks) continue;
        load_wide<C::kWords>(reinterpret_cast<const uint32_t*>(w) + chunk * C::kWords, words[s]);
        if constexpr (kSelect == kGiven) {
            load_wide<C::kElements / 4>(reinterpret_cast<const uint32_t*>(mask) + chunk * (C::kElements / 4), flags[s]);
        }
    }
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        const int64_t chunk = first + s * kThreads;
        if (chunk >= chunks) continue;
        constexpr int kValueWords = C::kValues * int(sizeof(Out)) / 4;
        uint32_t packed[C::kQuad ? 2 * int(sizeof(Out)) : kValueWords], code;
        bool many = false;
        if constexpr (C::kQuad) {
            code = pack_quad<In, Out, kSelect>(words[s], flags[s], factor, packed, many);
        } else {
            code = pack_small<In, Out, P>(words[s], flags[s], packed, kSelect == kGiven, many);
        }
        store_global<kValueWords>(reinterpret_cast<uint32_t*>(values) + chunk * kValueWords, packed);
        st_global(indices + chunk * C::kIndexBytes, Word<C::kIndexBytes>(code));
        if (kSelect == kGiven && many) *overfull = 1;
    }
}

template <class In, class Out, class P, int kSelect>
int64_t run(const char* name, const Pack& call, const Queue& queue) {
    using C = Chunk<In, Out, P>;
    const int64_t chunks = call.rows * call.cols / C::kElements;
    const Grid grid{cdiv(chunks, C::kSteps * kThreads), kThreads};
    launch(name, pack_rows_kernel<In, Out, P, kSelect>, grid, queue, static_cast<const In*>(call.w), call.mask, call.scale,
           static_cast<Out*>(call.by_row.values), static_cast<uint8_t*>(call.by_row.indices), call.overfull, chunks);
    return chunks * C::kElements;
}

}  // namespace

int64_t pack_rows(const Pack& call, const Queue& queue) {
    int64_t done = 0;
    if (!multiples_of_16(call.w, call.mask, call.by_row.values, call.by_row.indices)) return done;
    by_usual_dtypes(call.dtype, call.out_dtype, [&](auto in, auto out) {
        using In = decltype(in);
        using Out = decltype(out);
        by_pattern(call.n, call.m, [&](auto pattern) {
            using P = decltype(pattern);
            if constexpr (P::capacity != kMaxM) {
                if (call.select == kMagnitude) done = run<In, Out, P, kMagnitude>("pack_rows_kernel", call, queue);
                if (call.select == kGiven) done = run<In, Out, P, kGiven>("pack_rows_given_kernel", call, queue);
                if constexpr (P::m == 4 && P::n == 2) {
                    if (call.select == kThreshold) done = run<In, Out, P, kThreshold>("pack_rows_threshold_kernel", call, queue);
                }
            }
        });
    });
    return done;
}

}  // namespace nm::cuda
