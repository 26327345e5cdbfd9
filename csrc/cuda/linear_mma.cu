// y = x Wᵀ + b for up to 16 tokens in 16 bits, W packed, on tensor cores: W is the 16-row operand, tokens are the columns.
//
// The order of k is free if both operands have the same one. It is chosen so that the columns that the instruction needs from a
// thread are those of the packed bytes that the thread has read: 16 bytes of values of two rows and their indices. So W goes from
// memory through registers into the tensor core, without shared memory, where expanding it would cost a write and a read of every
// dense element. A byte permutation, looked up by the index (`Selectors`), puts a value into its place.
//
// A block fills a multiprocessor. It keeps the x of its columns in shared memory, in an order without bank conflicts, for all rounds of
// rows that it takes: nothing but the next round's weight is then read, ahead of its use, and no warp waits for another except to add
// sums. (On an H100 that took 0.62 to 1.09 of the time of slices of x with a barrier for each.) In a round `sharing`
// warps take the steps of the same 16 rows in turn. Sums are added in a fixed order: steps, warps, parts.
#include <algorithm>

#include "linear.h"
#include "ptx.h"

namespace nm::cuda {

namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kPadding = 64;     // bytes after the columns of a token, so that two tokens use all the banks
constexpr int kPartCols = 2048;  // the fewest columns of a part, if all fit in shared memory

template <int N, int M>
struct Step {
    static constexpr int kBits = M <= 4 ? 2 : 4;
    static constexpr int kIndexBytes = kBits;            // of 8 values
    static constexpr int kSpan = 8 / N * M;              // columns of 8 values
    static constexpr int kCols = 4 * kSpan;              // of a step of a warp: 4 threads share a row
    static constexpr int kAhead = M > 8 ? 2 : N * M > 8 ? 3 : 4;  // steps of a warp in flight
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

// A warp's sums, by row and token; rows lie 17 apart so that threads of different rows use different banks. Those of a round are added
// during the next one.
template <int Tiles>
using Partial = float[2][kWarps][8 * Tiles][17];

template <int N, int M, int Tiles>
struct Memory {
    static constexpr int kOwn = int(sizeof(Partial<Tiles>) + sizeof(Selectors<N, M>)) + 64;  // and what alignment takes

    // Bytes of the x of some steps.
    static constexpr int64_t staged(int64_t steps) { return 8 * Tiles * (steps * (2 * Step<N, M>::kCols) + kPadding); }
};

struct Plan {
    int steps, part;  // of a row, and of a part of the columns
    int sharing;      // warps of a row; a round has kWarps / sharing tiles of 16 rows
    int64_t rounds;
    int64_t blocks;   // of a part

    NM_HD int rows() const { return 16 * kWarps / sharing; }
};

int64_t steps_of(const LinearCall& call, int cols) { return std::max<int64_t>(1, cdiv(call.cols, cols)); }

// Parts of the columns: as few as have their x in shared memory, or so many that half of the GPU has rows.
template <int N, int M, int Tiles>
int splits_of(const LinearCall& call, int shared) {
    using S = Step<N, M>;
    const int64_t steps = steps_of(call, S::kCols);
    int64_t room = 1;
    while (Memory<N, M, Tiles>::kOwn + Memory<N, M, Tiles>::staged(room + 1) <= shared) ++room;
    int64_t splits = cdiv(steps, room);
    const int64_t rounds = cdiv(call.rows, 16);
    if (2 * rounds * splits <= call.processors) {
        splits = std::max(splits, std::min<int64_t>(call.processors / rounds, call.cols / kPartCols));
    }
    return int(cdiv(steps, cdiv(steps, splits)));
}

template <int N, int M>
Plan plan(const LinearCall& call) {
    using S = Step<N, M>;
    Plan p{int(steps_of(call, S::kCols)), 0, 1, 0, 0};
    p.part = int(cdiv(p.steps, call.splits));
    const auto rounds = [&] { return cdiv(call.rows, p.rows()); };
    const int64_t most = std::max(1, call.processors / call.splits);
    // every warp has as many steps as it can read ahead, or fewer if the GPU would otherwise idle
    while (p.sharing < kWarps && (p.part >= 2 * p.sharing * S::kAhead || (p.part >= 2 * p.sharing && rounds() < most))) p.sharing *= 2;
    p.rounds = rounds();
    p.blocks = cdiv(p.rounds, cdiv(p.rounds, most));
    return p;
}

template <class T>
struct Mma {
    const T* x;
    const T* values;
    const uint8_t* indices;
    Sums<T> sums;
    int64_t cols, chunks;  // of a row, 8 values each
    Plan plan;
};

// Copies the x of some steps from `first` on: [token][step][piece of a thread][thread] of 8 columns, tokens kPadding apart; zeros past the
// last column and the last token.
template <class T, int N, int M, int Tiles>
NM_DEVICE void stage(const Mma<T>& f, int64_t first, int steps, uint8_t* x) {
    using S = Step<N, M>;
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, token_bytes = steps * (2 * S::kCols) + kPadding;
    for (int token = warp; token < 8 * Tiles; token += kWarps) {
        const bool there = token < f.sums.tokens;
        const T* from = f.x + (there ? token : 0) * f.cols + first;
        const int count = there ? int(f.cols - first < int64_t(steps) * S::kCols ? f.cols - first : int64_t(steps) * S::kCols) : 0;
        for (int piece = lane; piece < steps * (S::kCols / 8); piece += 32) {
            const int step = piece / (S::kCols / 8), thread = piece / (S::kSpan / 8) % 4, own = piece % (S::kSpan / 8);
            const bool filled = 8 * piece < count;
            cp_async<16>(x + token * token_bytes + step * (2 * S::kCols) + own * 64 + thread * 16, filled ? from + 8 * piece : f.x, filled ? 16 : 0);
        }
    }
    cp_async_commit();
}

// Adds the products of a step. `from` is the x of the thread's first columns and, as a column of 8, its token.
template <class T, int N, int M, int Tiles>
NM_DEVICE void add_step(const Packed<N, M>* rows, const Selectors<N, M>& selectors, const uint8_t* from, int token_bytes, float (&sums)[Tiles][4]) {
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
                const uint8_t* at = from + tile * (8 * token_bytes) + (u * (S::kUnit / 8) + piece) * 64;
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

template <class T, int N, int M, int Tiles>
__global__ void __launch_bounds__(kThreads, 1) mma_kernel(Mma<T> f) {
    using S = Step<N, M>;
    using Table = Selectors<N, M>;
    using Sum = Partial<Tiles>;
    NM_DYNAMIC_SHARED(uint8_t, x);
    NM_SHARED(Table, selectors);
    NM_SHARED(Sum, partial);
    const int thread = int(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int part = int(blockIdx.x / f.plan.blocks), first = part * f.plan.part;
    const int steps = f.plan.steps - first < f.plan.part ? f.plan.steps - first : f.plan.part;

    // the warps of a row take its steps in turn
    const int sharing = f.plan.sharing, turn = warp % sharing;
    const int64_t in_row = (int64_t(first) + turn) * 4 + t;
    const int64_t whole = (int64_t(first) + steps) * 4, end = whole < f.chunks ? whole : f.chunks;
    const uint8_t *values, *indices;  // of the chunk that the thread loads next, in the upper of its two rows
    int64_t lower;                    // chunks to the other one
    int left;                         // chunks of the row
    const auto seek = [&](int64_t round) {
        const int64_t row = round * f.plan.rows() + warp / sharing * 16 + g, last = f.sums.rows - 1, at = (row < last ? row : last) * f.chunks + in_row;
        values = reinterpret_cast<const uint8_t*>(f.values) + at * 16;
        indices = f.indices + at * S::kIndexBytes;
        lower = row + 8 <= last ? 8 * f.chunks : 0;
        left = round < f.plan.rounds ? int(end - in_row) : 0;
    };
    const auto load = [&](Packed<N, M>* two) {
        two[0].load(values, indices, left > 0);
        two[1].load(values + lower * 16, indices + lower * S::kIndexBytes, left > 0);
        values += 4 * sharing * 16;
        indices += 4 * sharing * S::kIndexBytes;
        left -= 4 * sharing;
    };

    int64_t round = blockIdx.x % f.plan.blocks;
    Packed<N, M> packed[S::kAhead][2];
    seek(round);
    NM_UNROLL
    for (int a = 0; a < S::kAhead; ++a) load(packed[a]);
    stage<T, N, M, Tiles>(f, int64_t(first) * S::kCols, steps, x);
    selectors.fill(thread);
    cp_async_wait<0>();
    __syncthreads();

    const int token_bytes = steps * (2 * S::kCols) + kPadding;
    const uint8_t* const own = x + g * token_bytes + t * 16;
    for (int buffer = 0; round < f.plan.rounds; round += f.plan.blocks, buffer ^= 1) {
        float sums[Tiles][4] = {};
        for (int step = turn;;) {
            const bool last = step + S::kAhead * sharing >= steps;
            if (last) seek(round + f.plan.blocks);
            NM_UNROLL
            for (int a = 0; a < S::kAhead; ++a, step += sharing) {
                if (step < steps) add_step<T>(packed[a], selectors, own + step * (2 * S::kCols), token_bytes, sums);
                load(packed[a]);
            }
            if (last) break;
        }
        NM_UNROLL
        for (int tile = 0; tile < Tiles; ++tile) {
            NM_UNROLL
            for (int i = 0; i < 4; ++i) partial[buffer][warp][tile * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sums[tile][i];
        }
        __syncthreads();
        store_shared(f.sums, partial[buffer], sharing, round, part);
    }
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

int linear_mma_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors, int shared) {
    const LinearCall call = sizes_of(dtype, tokens, rows, cols, n, m, processors);
    int splits = 0;
    by_call(call, [&](auto, auto pattern, auto count) {
        splits = splits_of<decltype(pattern)::n, decltype(pattern)::m, decltype(count)::value>(call, shared);
    });
    return splits;
}

void linear_mma(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    by_call(call, [&](auto element, auto pattern, auto count) {
        using T = decltype(element);
        using P = decltype(pattern);
        constexpr int tiles = decltype(count)::value;
        const Plan p = plan<P::n, P::m>(call);
        const Mma<T> f{static_cast<const T*>(call.x), static_cast<const T*>(call.values), call.indices, sums_of<T>(call),
                       call.cols, call.cols / P::m * P::n / 8, p};
        const Grid grid{p.blocks * call.splits, kThreads, size_t(Memory<P::n, P::m, tiles>::staged(p.part))};
        launch("linear_mma_kernel", mma_kernel<T, P::n, P::m, tiles>, grid, queue, f);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
