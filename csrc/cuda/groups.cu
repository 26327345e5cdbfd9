// mask, prune and soft_threshold: each result depends only on its group of m.
#include "../core/dispatch.h"
#include "../core/registers.h"
#include "../core/threshold.h"
#include "any_groups.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"
#include "threshold_pairs.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

struct Mask {
    template <class T>
    using Out = uint8_t;
    static constexpr bool kThreshold = false;
    template <class T>
    static NM_DEVICE uint8_t result(T, uint8_t keep, float) {
        return keep;
    }
};

struct Prune {
    template <class T>
    using Out = T;
    static constexpr bool kThreshold = false;
    template <class T>
    static NM_DEVICE T result(T w, uint8_t keep, float) {
        return kept_or_zero(w, keep);
    }
};

struct SoftThreshold {
    template <class T>
    using Out = T;
    static constexpr bool kThreshold = true;
    template <class T>
    static NM_DEVICE T result(T w, uint8_t, float t) {
        return shrink(w, t);
    }
};

template <class Op, int N, int M, class T>
NM_DEVICE void group_result(const T* w, typename Op::template Out<T>* out) {
    uint32_t keys[M];
    uint8_t keep[M] = {};
    float t = 0.0f;
    NM_UNROLL
    for (int i = 0; i < M; ++i) keys[i] = Key<T>::of(w[i]);
    if constexpr (Op::kThreshold) {
        t = Key<T>::value(threshold_key<N, M>(keys));
    } else {
        mask_group<N, M, Key<T>::bits>(keys, keep);
    }
    NM_UNROLL
    for (int i = 0; i < M; ++i) out[i] = Op::result(w[i], keep[i], t);
}

// Elements that a thread reads at once: whole groups, 16 bytes at least.
template <class T, class P>
constexpr int kPiece = P::m * int(sizeof(T)) > 16 ? P::m : 16 / int(sizeof(T));

// Pieces per thread: 64 bytes, four reads in flight.
template <class T, class P>
constexpr int kSteps = 64 / (kPiece<T, P> * int(sizeof(T)));

template <class Op, class T, class P>
NM_DEVICE void piece_result(const T* x, typename Op::template Out<T>* out) {
    if constexpr (Op::kThreshold && sizeof(T) == 2 && P::m == 4 && P::n <= 2) {
        uint32_t words[kPiece<T, P> / 2];
        memcpy(words, x, sizeof words);
        const LargestThree<T> largest(words);
        const uint32_t both = P::n == 1 ? largest.second : largest.third;
        NM_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = shrunk_pair<T>(words[i], __byte_perm(both, both, i < 2 ? 0x1010 : 0x3232));
        memcpy(out, words, sizeof words);
    } else {
        NM_UNROLL
        for (int g = 0; g < kPiece<T, P>; g += P::m) group_result<Op, P::n, P::m>(x + g, out + g);
    }
}

// Thread t of a block takes pieces t, t + kThreads, ... . Partial and unaligned pieces are processed element by element, to keep
// the code short.
template <class Op, class T, class P>
__global__ void __launch_bounds__(kThreads) groups_kernel(const T* w, typename Op::template Out<T>* out, int64_t numel, bool wide) {
    using Out = typename Op::template Out<T>;
    constexpr int piece = kPiece<T, P>, step = piece * kThreads, steps = kSteps<T, P>;
    const int64_t block = int64_t(blockIdx.x) * steps * step, first = block + int64_t(threadIdx.x) * piece;
    if (wide && numel - block >= steps * step) {
        T x[steps][piece];
        NM_UNROLL
        for (int s = 0; s < steps; ++s) load_wide<piece>(w + first + s * step, x[s]);
        NM_UNROLL
        for (int s = 0; s < steps; ++s) {
            Out result[piece];
            piece_result<Op, T, P>(x[s], result);
            store_global<piece>(out + first + s * step, result);
        }
        return;
    }
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        const int64_t at = first + s * step;
        T x[piece];
        Out result[piece];
        load_some<piece>(w + at, x, numel - at, false);
        piece_result<Op, T, P>(x, result);
        store_some<piece>(out + at, result, numel - at, false);
    }
}

template <class Op, class T>
__global__ void __launch_bounds__(AnyTile::kThreads) any_groups_kernel(const T* w, typename Op::template Out<T>* out, int64_t groups, int n, int m) {
    NM_SHARED(AnyTile, tile);
    const int here = tile.load(w, groups, m);
    w += tile.first_group(m) * m;
    out += tile.first_group(m) * m;
    if constexpr (Op::kThreshold) {
        if (n < m) tile.find_thresholds(here, n, m, Key<T>::bits);
    } else {
        tile.mark_kept(here, n, m, Key<T>::bits);
    }
    for (int e = int(threadIdx.x); e < here; e += AnyTile::kThreads) {
        if constexpr (Op::kThreshold) {
            out[e] = Op::result(w[e], 0, n < m ? Key<T>::value(tile.thresholds[e / m]) : 0.0f);
        } else {
            out[e] = Op::result(w[e], uint8_t(tile.keys[e] >> 31), 0.0f);
        }
    }
}

template <class Op>
void run(const char* name, const void* w, int dtype, int64_t numel, int n, int m, void* out, const Queue& queue) {
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto pattern) {
        using T = decltype(element);
        using P = decltype(pattern);
        const auto from = static_cast<const T*>(w);
        const auto to = static_cast<typename Op::template Out<T>*>(out);
        if constexpr (P::capacity == kMaxM) {
            const int64_t groups = numel / m;
            launch(name, any_groups_kernel<Op, T>, {cdiv(groups, AnyTile::groups(m)), AnyTile::kThreads}, queue, from, to, groups, n, m);
        } else {
            const int64_t blocks = cdiv(numel, int64_t(kPiece<T, P>) * kSteps<T, P> * kThreads);
            launch(name, groups_kernel<Op, T, P>, {blocks, kThreads}, queue, from, to, numel, multiples_of_16(from, to));
        }
    });
}

}  // namespace

void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, const Queue& queue) {
    run<Mask>("mask_kernel", w, dtype, numel, n, m, out, queue);
}

void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, const Queue& queue) {
    run<Prune>("prune_kernel", w, dtype, numel, n, m, out, queue);
}

void soft_threshold(const void* w, int dtype, int64_t numel, int n, int m, void* out, const Queue& queue) {
    run<SoftThreshold>("soft_threshold_kernel", w, dtype, numel, n, m, out, queue);
}

}  // namespace nm::cuda
