// y = x Wᵀ + b for up to 16 tokens in 16 bits, W packed, on tensor cores: W is the 16-row operand, tokens are the columns.
//
// The order of k is free if both operands have the same one. It is chosen so that the columns that the instruction needs from a
// thread are those of the packed bytes that the thread has read: 16 bytes of values of two rows and their indices. So W goes from
// memory through registers into the tensor core, without shared memory, where expanding it would cost a write and a read of every
// dense element. A byte permutation, looked up by the index (`Selectors`), puts a value into its place. x is kept in shared memory,
// kSlice columns at a time, prefetched, in an order without bank conflicts.
//
// A block has 8 warps, RT of them on different 16 rows and 8 / RT on different columns of the same; sums are added in a
// fixed order: steps, warps, parts.
#include <algorithm>

#include "linear.h"
#include "ptx.h"

namespace nm::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocks = 2;     // of a multiprocessor
constexpr int kSlice = 1024;   // the most columns of x in shared memory at a time
constexpr int kPadding = 64;   // bytes after the columns of a token, so that two tokens use all the banks
constexpr int kPartCols = 2048;  // the fewest columns of a part

template <int N, int M>
struct Step {
    static constexpr int kBits = M <= 4 ? 2 : 4;
    static constexpr int kIndexBytes = kBits;            // of 8 values
    static constexpr int kSpan = 8 / N * M;              // columns of 8 values
    static constexpr int kCols = 4 * kSpan;              // of a step of a warp: 4 threads share a row
    static constexpr int kAhead = M > 8 ? 2 : 4;         // steps of a warp in a slice, all in flight
    static constexpr int kShortest = kAhead * kCols;     // slice, if no warps share a row
    static_assert(kShortest <= kSlice);
    static constexpr int kUnit = std::max(M, 8);         // columns that are expanded at once
    static constexpr int kSelectors = kBits == 2 ? (N == 2 ? 2 : 4) : M / 2;  // for each 4 bits of indices
    static constexpr int kTables = kBits == 2 ? 1 : 2;   // the value in the low half of its word or in the high half
};

// How bytes of a word of two values (0 to 3) replace bytes of a word of two columns (4 to 7), for each 4 bits of indices.
template <int N, int M>
struct Selectors {
    alignas(16) uint16_t of[Step<N, M>::kTables][16][Step<N, M>::kSelectors];

    static NM_DEVICE uint32_t half(int value, int high) { return uint32_t(value < 0 ? (high ? 0x76 : 0x54) : value ? 0x32 : 0x10); }

    // The selector of columns 2 r and 2 r + 1, for `index` of the value in half `value` of its word.
    static NM_DEVICE uint32_t one(int index, int value, int r) {
        return half(index == 2 * r ? value : -1, 0) | half(index == 2 * r + 1 ? value : -1, 1) << 8;
    }

    NM_DEVICE void fill(int thread) {
        using S = Step<N, M>;
        if (thread >= 16 * S::kTables) return;
        const int bits = thread % 16, table = thread / 16;
        NM_UNROLL
        for (int r = 0; r < S::kSelectors; ++r) {
            uint32_t selector;
            if constexpr (M == 4 && N == 2) {  // both values of a group; the later one wins
                const int lower = bits & 3, upper = bits >> 2;
                const int even = upper == 2 * r ? 1 : lower == 2 * r ? 0 : -1, odd = upper == 2 * r + 1 ? 1 : lower == 2 * r + 1 ? 0 : -1;
                selector = half(even, 0) | half(odd, 1) << 8;
            } else if constexpr (M == 4) {  // a value each of two groups
                selector = one(bits >> (r / 2 * 2) & 3, r / 2, r % 2);
            } else {
                selector = one(bits, table, r);
            }
            of[table][bits][r] = uint16_t(selector);
        }
    }
};

// Puts the value or values of 4 bits of indices into words of two columns.
template <int Count>
NM_DEVICE void permute(const uint16_t* selectors, uint32_t values, uint32_t* columns) {
    uint32_t pairs[Count / 2];
    load_wide<Count / 2>(reinterpret_cast<const uint32_t*>(selectors), pairs);
    NM_UNROLL
    for (int r = 0; r < Count; ++r) columns[r] = permute_bytes(values, columns[r], r % 2 ? pairs[r / 2] >> 16 : pairs[r / 2]);
}

// 16 bytes of values of one row and their indices.
template <int N, int M>
struct Packed {
    using S = Step<N, M>;
    uint32_t values[4];
    Word<S::kIndexBytes> indices;

    NM_DEVICE void load(const uint8_t* values_at, const uint8_t* indices_at, bool there) {
        load_some<4>(reinterpret_cast<const uint32_t*>(values_at), values, there ? 4 : 0, true);
        indices = there ? load_word<S::kIndexBytes>(indices_at) : Word<S::kIndexBytes>(0);
    }

    // Columns u kUnit to (u + 1) kUnit, two in a word.
    NM_DEVICE void expand(const Selectors<N, M>& selectors, int u, uint32_t* columns) const {
        const auto bits = [&](int i) { return uint32_t(indices) >> (4 * i) & 15u; };
        NM_UNROLL
        for (int r = 0; r < S::kUnit / 2; ++r) columns[r] = 0;
        if constexpr (M == 4 && N == 2) {
            NM_UNROLL
            for (int group = 0; group < 2; ++group) permute<2>(selectors.of[0][bits(2 * u + group)], values[2 * u + group], columns + 2 * group);
        } else if constexpr (M == 4) {
            permute<4>(selectors.of[0][bits(u)], values[u], columns);
        } else {
            NM_UNROLL
            for (int i = u * N; i < (u + 1) * N; ++i) permute<M / 2>(selectors.of[i % 2][bits(i)], values[i / 2], columns);
        }
    }
};

struct Plan {
    int sharing;     // warps of a row; a block has 8 / sharing tiles of 16 rows
    int slice;       // log2 of the columns of x that a block takes at a time
    int splits;      // parts of the columns
    int part;        // slices of a part
    int64_t blocks;  // of a part

    NM_HD int rows() const { return 16 * kWarps / sharing; }
};

template <int N, int M>
Plan plan(const LinearCall& call) {
    Plan p{1, 0, 1, 1, 0};
    int cols = Step<N, M>::kShortest;
    // fewer rows per block mean more reads of x, but three quarters of the GPU should have work
    while (p.sharing < kWarps && 2 * cols <= kSlice && 4 * cdiv(call.rows, p.rows()) < 3 * call.processors) {
        p.sharing *= 2;
        cols *= 2;
    }
    while (1 << p.slice < cols) ++p.slice;
    const int64_t slices = std::max<int64_t>(1, cdiv(call.cols, cols));
    p.part = int(slices);
    p.blocks = cdiv(call.rows, p.rows());
    if (2 * p.blocks <= call.processors && call.cols >= 2 * kPartCols) {
        p.part = int(cdiv(slices, std::min<int64_t>(call.processors / p.blocks, call.cols / kPartCols)));
        p.splits = int(cdiv(slices, p.part));
    }
    return p;
}

template <class T>
struct Mma {
    const T* x;
    const T* values;
    const uint8_t* indices;
    Sums<T> sums;
    int64_t cols, kept, index_row;
    Plan plan;
};

// Of x in shared memory: [buffer][token][step][piece of a thread][thread] of 8 columns, tokens kPadding apart. Each thread copies
// one piece of every few tokens.
template <class T, int N, int M, int Tiles>
struct Staged {
    using S = Step<N, M>;
    static constexpr int kTokens = 8 * Tiles;
    static constexpr int kToken = 2 * kSlice + kPadding;  // bytes
    static constexpr int kBuffer = kTokens * kToken;

    uint8_t* to;
    const T* from;
    int64_t cols;
    int token, tokens, together, column, slice;

    NM_DEVICE Staged(const Mma<T>& f, uint8_t* x, int thread) : cols(f.cols), tokens(int(f.sums.tokens)), slice(f.plan.slice) {
        const int pieces = 1 << (slice - 3), piece = thread & (pieces - 1);
        const int step = piece / (S::kCols / 8), lane = piece / (S::kSpan / 8) % 4, own = piece % (S::kSpan / 8);
        token = thread >> (slice - 3);
        together = kThreads >> (slice - 3);
        to = x + token * kToken + step * (2 * S::kCols) + own * 64 + lane * 16;
        column = 8 * piece;
        from = f.x + token * cols + column;
    }

    // Starts copying a slice into a buffer; zeros past the last column.
    NM_DEVICE void start(int number, int buffer) const {
        const int64_t first = int64_t(number) << slice;
        const bool there = first + column < cols;
        const T* at = there ? from + first : from - column;
        uint8_t* into = to + buffer * kBuffer;
        for (int i = token; i < tokens; i += together, at += together * cols, into += together * kToken) cp_async<16>(into, at, there ? 16 : 0);
        cp_async_commit();
    }
};

// Adds the products of a step. `from` is the x of the thread's first columns and, as a column of 8, its token.
template <class T, int N, int M, int Tiles>
NM_DEVICE void add_step(const Packed<N, M>* rows, const Selectors<N, M>& selectors, const uint8_t* from, float (&sums)[Tiles][4]) {
    using S = Step<N, M>;
    NM_UNROLL
    for (int u = 0; u < S::kSpan / S::kUnit; ++u) {
        uint32_t above[S::kUnit / 2], below[S::kUnit / 2];
        rows[0].expand(selectors, u, above);
        rows[1].expand(selectors, u, below);
        NM_UNROLL
        for (int piece = 0; piece < S::kUnit / 8; ++piece) {
            NM_UNROLL
            for (int tile = 0; tile < Tiles; ++tile) {
                uint32_t tokens[4];
                const uint8_t* at = from + tile * (8 * Staged<T, N, M, Tiles>::kToken) + (u * (S::kUnit / 8) + piece) * 64;
                load_wide<4>(reinterpret_cast<const uint32_t*>(at), tokens);
                NM_UNROLL
                for (int four = 0; four < 2; ++four) {
                    const int c = 4 * piece + 2 * four;
                    mma_m16n8k16<T>(sums[tile], {above[c], below[c], above[c + 1], below[c + 1]}, {tokens[2 * four], tokens[2 * four + 1]});
                }
            }
        }
    }
}

// A warp's sums, by row and token; rows lie 17 apart so that threads of different rows use different banks.
template <int Tiles>
using Partial = float[kWarps][8 * Tiles][17];

template <class T, int N, int M, int Tiles>
__global__ void __launch_bounds__(kThreads, kBlocks) mma_kernel(Mma<T> f) {
    using S = Step<N, M>;
    using X = Staged<T, N, M, Tiles>;
    using Table = Selectors<N, M>;
    using Sum = Partial<Tiles>;
    NM_DYNAMIC_SHARED(uint8_t, x);
    NM_SHARED(Table, selectors);
    NM_SHARED(Sum, partial);
    const int thread = int(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int part = int(blockIdx.x / f.plan.blocks);
    const int64_t block = blockIdx.x % f.plan.blocks;
    const int slices = int((f.cols + (1 << f.plan.slice) - 1) >> f.plan.slice), first = part * f.plan.part;
    const int last = first + f.plan.part < slices ? first + f.plan.part : slices;

    // the warps of a row take its steps in turn
    const int sharing = f.plan.sharing, turn = warp % sharing;
    const int64_t row = block * f.plan.rows() + warp / sharing * 16 + g;
    const int64_t chunks = f.kept / 8, chunk_0 = (int64_t(first) * (S::kAhead * sharing) + turn) * 4 + t;
    const uint8_t* values[2];
    const uint8_t* indices[2];
    NM_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int64_t r = row + 8 * i, chunk = (r < f.sums.rows ? r : f.sums.rows - 1) * chunks + chunk_0;
        values[i] = reinterpret_cast<const uint8_t*>(f.values) + chunk * 16;
        indices[i] = f.indices + chunk * S::kIndexBytes;
    }
    const int64_t whole = int64_t(last) * (S::kAhead * sharing * 4), end = whole < chunks ? whole : chunks;
    const int left = int(end - chunk_0);  // chunks up to the end of the part
    int chunk = 0;
    Packed<N, M> packed[S::kAhead][2];
    const auto load = [&](Packed<N, M>* two) {
        NM_UNROLL
        for (int r = 0; r < 2; ++r) two[r].load(values[r] + uint32_t(chunk) * uint64_t(16), indices[r] + uint32_t(chunk) * uint64_t(S::kIndexBytes), chunk < left);
        chunk += 4 * sharing;
    };
    NM_UNROLL
    for (int a = 0; a < S::kAhead; ++a) load(packed[a]);

    const X staged(f, x, thread);
    if (first < last) staged.start(first, 0);
    selectors.fill(thread);
    // tokens past the end
    const int missing = X::kTokens - int(f.sums.tokens);
    for (int e = thread; e < 2 * missing * (X::kToken / 16); e += kThreads) {
        const int buffer = e / (missing * (X::kToken / 16)), at = e % (missing * (X::kToken / 16));
        store_word<16>(x + buffer * X::kBuffer + int(f.sums.tokens) * X::kToken + at * 16, Word<16>{});
    }

    float sums[Tiles][4] = {};
    int buffer = 0;
    for (int slice = first; slice < last; ++slice, buffer ^= 1) {
        // this slice has arrived, and the previous one is no longer read
        cp_async_wait<0>();
        __syncthreads();
        if (slice + 1 < last) staged.start(slice + 1, buffer ^ 1);
        const uint8_t* from = x + buffer * X::kBuffer + turn * (2 * S::kCols) + g * X::kToken + t * 16;
        NM_UNROLL
        for (int a = 0; a < S::kAhead; ++a, from += sharing * (2 * S::kCols)) {
            add_step<T>(packed[a], selectors, from, sums);
            load(packed[a]);
        }
    }

    NM_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
        NM_UNROLL
        for (int i = 0; i < 4; ++i) partial[warp][tile * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sums[tile][i];
    }
    __syncthreads();
    store_shared(f.sums, partial, f.plan.sharing, block, part);
}

// f(element, pattern, count of 8 tokens); the caller has checked with linear_mma_splits that there is a kernel.
template <class F>
bool by_call(const LinearCall& call, const F& f) {
    bool found = false;
    if (call.dtype != kBFloat16 && call.dtype != kFloat16) return false;
    by_dtype_and_pattern(call.dtype, call.n, call.m, [&](auto element, auto pattern) {
        using P = decltype(pattern);
        if constexpr (sizeof(element) == 2 && P::capacity != kMaxM) {
            if (call.cols % P::m != 0 || call.cols / P::m * P::n % 8 != 0 || call.tokens > 16) return;
            found = true;
            if (call.tokens <= 8) return f(element, pattern, std::integral_constant<int, 1>{});
            f(element, pattern, std::integral_constant<int, 2>{});
        }
    });
    return found;
}

}  // namespace

int linear_mma_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors) {
    const LinearCall call = sizes_of(dtype, tokens, rows, cols, n, m, processors);
    int splits = 0;
    by_call(call, [&](auto, auto pattern, auto) { splits = plan<decltype(pattern)::n, decltype(pattern)::m>(call).splits; });
    return splits;
}

void linear_mma(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    by_call(call, [&](auto element, auto pattern, auto count) {
        using T = decltype(element);
        using P = decltype(pattern);
        constexpr int tiles = decltype(count)::value;
        const Plan p = plan<P::n, P::m>(call);
        const int64_t kept = call.cols / P::m * P::n;
        const Mma<T> f{static_cast<const T*>(call.x), static_cast<const T*>(call.values), call.indices, sums_of<T>(call),
                       call.cols, kept, index_bytes(kept, index_bits(P::m)), p};
        const Grid grid{p.blocks * p.splits, kThreads, size_t(2 * Staged<T, P::n, P::m, tiles>::kBuffer)};
        launch("linear_mma_kernel", mma_kernel<T, P::n, P::m, tiles>, grid, queue, f);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
