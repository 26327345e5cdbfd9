// mvue and mvue_compress of 2:4, the pattern of every method that samples gradients: a thread processes strips of consecutive
// elements, see mvue_strip.h. mvue_any.cu has the other patterns.
#include "mvue.h"

#include "../core/bitpack.h"
#include "../core/dispatch.h"
#include "launch.h"
#include "memory.h"
#include "mvue_strip.h"
#include "ptx.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kManyTiles = 1024;  // of 16 KB: several for each block that runs concurrently on an H200

// The words of a strip of which its memory has sizeof(T) * 16 bytes, estimated: element(i) is its element i.
template <class T, class F>
NM_DEVICE Strip<T> strip_of(const uint32_t (&raw)[Strip<T>::words], const uint32_t (&words)[4], const F& element) {
    Strip<T> strip;
    if (!estimate(raw, words, strip)) estimate_exactly(words, strip, element);
    return strip;
}

// Groups along memory. A thread processes a strip, which may end with its row.
template <class T>
__global__ void __launch_bounds__(kThreads) mvue_rows_kernel(Mvue call, bool wide) {
    using S = Strip<T>;
    const int64_t strips = (call.per_row + S::groups - 1) / S::groups, number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (number >= call.outer * strips) return;
    const int64_t row = call.outer == 1 ? 0 : number / strips, group = (number - row * strips) * S::groups;
    const int64_t j = row * call.per_row + group, at = row * call.length + group * S::m, left = call.length - group * S::m;
    const T* g = static_cast<const T*>(call.g) + at;
    T x[S::elements];
    load_some<S::elements>(g, x, left, wide);
    uint32_t words[S::groups], raw[S::words];
    strip_words<false>(uint64_t(call.seed[0]), uint64_t(call.seed[1]), j, words);
    memcpy(raw, x, sizeof x);
    const S strip = strip_of<T>(raw, words, [&](int i) { return i < left ? g[i] : T{}; });
    if (call.dense) {
        NM_UNROLL
        for (int i = 0; i < S::elements; ++i) {
            const uint32_t bits = strip.dense(i);
            memcpy(&x[i], &bits, sizeof(T));
        }
        store_some<S::elements>(static_cast<T*>(call.dense) + at, x, left, wide);
    } else {
        T v[S::groups * S::n];
        uint8_t code[S::code_bytes];
        memcpy(v, strip.values, sizeof v);
        const uint32_t packed = strip.code & S::code_mask(call.per_row - group);
        memcpy(code, &packed, sizeof code);
        const int64_t first_byte = group * S::n * 2 / 8;
        store_some<S::groups * S::n>(static_cast<T*>(call.values) + j * S::n, v, (call.per_row - group) * S::n, wide);
        store_some<S::code_bytes>(call.indices + row * call.row_bytes + first_byte, code, call.row_bytes - first_byte, wide);
    }
}

// The same, packed, for one row of whole strips at 16-byte aligned addresses, the case of training.
template <class T>
__global__ void __launch_bounds__(kThreads) mvue_strips_kernel(const T* g, uint32_t strips, const int64_t* seed, T* values, uint8_t* indices) {
    using S = Strip<T>;
    const uint32_t number = blockIdx.x * kThreads + threadIdx.x;
    if (number >= strips) return;
    const T* from = g + uint64_t(number) * S::elements;
    uint32_t raw[S::words];
    load_wide<S::words>(reinterpret_cast<const uint32_t*>(from), raw);
    const Words words = philox_block(uint64_t(seed[0]), uint64_t(seed[1]), number);
    const S strip = strip_of<T>(raw, words.w, [&](int i) { return from[i]; });
    store_global<S::value_words>(reinterpret_cast<uint32_t*>(values + uint64_t(number) * (S::groups * S::n)), strip.values);
    const auto code = uint16_t(strip.code);
    static_assert(sizeof code == S::code_bytes);
    store_global<1>(reinterpret_cast<uint16_t*>(indices) + number, &code);
}

// Groups down the columns of a matrix [length, inner], packed as rows. A block reads tiles of 128 tokens, rows of 128 bytes, into
// shared memory. A warp takes strips of 8 columns, four down each: lane l strip l % 4 of column l / 4, so that what it writes of a
// packed row are 64 bytes.
//
// 16 bytes at u of token k lie at u ^ (k % 2 + 2 (k / 16 % 4)): the lanes of a warp that read at once, at tokens 16 apart, meet other
// banks, and so do the 8 rows of a matrix of ldmatrix, which are tokens 0, 1, 16, 17, 32, 33, 48, 49.
template <class T>
struct Columns {
    using S = Strip<T>;
    static constexpr int tokens = 128, columns = 128 / int(sizeof(T)), threads = 256;
    static constexpr int unit = 16 / int(sizeof(T)), units = columns / unit, lines = threads / units;  // of 16 bytes
    static constexpr int warps = threads / 32, across = columns / 8, down = tokens / (4 * S::elements), tasks = across * down / warps;
    static_assert(warps % across == 0 || across % warps == 0);

    struct alignas(16) Tile {
        T x[tokens][columns];
    };

    static NM_DEVICE int swizzle(int token) { return (token & 1) | (token >> 4 & 3) << 1; }
    static NM_DEVICE T* at(Tile& tile, int token, int column) { return tile.x[token] + ((column / unit ^ swizzle(token)) * unit + column % unit); }

    // This lane's strip starting at `token` of the tile, as stored.
    static NM_DEVICE void read(Tile& tile, int token, int column, uint32_t (&raw)[S::words]) {
        const int lane = int(threadIdx.x) % 32;
        if constexpr (sizeof(T) == 2) {
            const int row = lane % 8;
            const T* from = at(tile, token - lane % 4 * S::elements + row / 2 * S::elements + lane / 8 * 2 + row % 2, column - lane / 4);
            NM_UNROLL
            for (int i = 0; i < 2; ++i) {
                uint32_t part[4];
                ldmatrix_trans<4>(part, from + i * 8 * columns);
                NM_UNROLL
                for (int k = 0; k < 4; ++k) raw[i * 4 + k] = part[k];
            }
        } else {
            const T* pair[2] = {at(tile, token, column), at(tile, token + 1, column)};
            NM_UNROLL
            for (int i = 0; i < S::elements; ++i) memcpy(&raw[i], pair[i % 2] + i / 2 * 2 * columns, sizeof(T));
        }
    }
};

// A thread's part of a tile in memory, [tokens][columns] with `pitch` elements a row: 16 bytes in every `lines`-th row.
template <class T>
struct Corner {
    using C = Columns<T>;
    static NM_DEVICE int unit() { return int(threadIdx.x % C::units) * C::unit; }
    static NM_DEVICE int line() { return int(threadIdx.x / C::units); }
    static NM_DEVICE T* inside(typename C::Tile& tile, int t) { return C::at(tile, line() + t, unit()); }

    // Starts loading a tile, with zeros past the end; `wide`: 16-byte aligned; Whole: aligned and full.
    template <bool Whole>
    static NM_DEVICE void start(const T* g, int64_t pitch, int tokens, int columns, bool wide, typename C::Tile& tile) {
        if (Whole || (wide && tokens >= C::tokens && columns == C::columns)) {
            const int64_t step = C::lines * pitch;
            NM_UNROLL
            for (int t = 0; t < C::tokens; t += C::lines, g += step) cp_async<16>(inside(tile, t), g);
        } else if (wide) {
            const int there = (columns - unit() < C::unit ? columns - unit() : C::unit) * int(sizeof(T));
#pragma unroll 1
            for (int t = 0; t < C::tokens; t += C::lines) {
                const bool in = line() + t < tokens && there > 0;
                cp_async<16>(inside(tile, t), in ? g + t * pitch : g, in ? there : 0);
            }
        } else {
#pragma unroll 1
            for (int t = 0; t < C::tokens; t += C::lines) {
#pragma unroll 1
                for (int i = 0; i < C::unit; ++i) inside(tile, t)[i] = line() + t < tokens && unit() + i < columns ? g[t * pitch + i] : T{};
            }
        }
        cp_async_commit();
    }

    static NM_DEVICE void write(T* dense, int64_t pitch, int tokens, int columns, bool wide, typename C::Tile& tile) {
        NM_UNROLL
        for (int t = 0; t < C::tokens; t += C::lines) {
            T x[C::unit];
            load_wide<C::unit>(inside(tile, t), x);
            store_some<C::unit>(dense + t * pitch, x, line() + t < tokens ? columns - unit() : 0, wide);
        }
    }
};

// The byte of metadata in the order of wgmma.sp (reference/layouts.py) that the indices of 16 columns of a row begin at: they are one of
// the 16-bit units that the order permutes. `strip` of 16 columns; `across` blocks of 64 columns.
NM_DEVICE int64_t ordered_byte(int64_t row, int64_t strip, int64_t across) {
    const int64_t tile = (row / 64 * across + strip / 4) * 4 + row / 16 % 4;
    return tile * 128 + row % 8 * 16 + strip % 4 * 4 + row / 8 % 2 * 2;
}

// A block processes `rounds` consecutive tiles along the tokens. Whole: packed result, full tiles, 16-byte aligned addresses and
// result rows, the case of training. Ordered: whole, and indices become metadata of wgmma.sp.
template <class T, bool Whole, bool Ordered = false>
__global__ void __launch_bounds__(Columns<T>::threads, 2) mvue_columns_kernel(Mvue call, Divider across, Divider down, int rounds, bool wide, bool wide_out) {
    using C = Columns<T>;
    using S = Strip<T>;
    using K = Corner<T>;
    using Tiles = typename C::Tile[2];
    NM_SHARED(Tiles, tiles);
    const uint32_t turn = across.quotient(blockIdx.x), plane = down.quotient(turn);
    const int64_t column = int64_t(blockIdx.x - turn * across.divisor) * C::columns, pitch = call.inner, columns_left = pitch - column;
    const int columns = Whole || columns_left >= C::columns ? C::columns : int(columns_left);
    const uint64_t seed = uint64_t(call.seed[0]), offset = uint64_t(call.seed[1]);
    const int64_t first = int64_t(turn - plane * down.divisor) * rounds * C::tokens;
    const int64_t corner = (plane * call.length + first + K::line()) * pitch + column + K::unit();
    // this thread's first strip in a tile; the next is `step` columns on
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    constexpr int step = C::across / C::tasks * 8;
    const int here = warp % (C::across / C::tasks) * 8 + lane / 4, token = (warp / (C::across / C::tasks) * 4 + lane % 4) * S::elements;
    const int64_t row = plane * pitch + column + here, strip = first / S::m + token / S::m;
    uint64_t j[C::tasks];
    NM_UNROLL
    for (int k = 0; k < C::tasks; ++k) j[k] = uint64_t((row + k * step) * call.per_row + strip);
    const T* g = static_cast<const T*>(call.g) + corner;
    T* values = static_cast<T*>(call.values) + (row * call.per_row + strip) * S::n;
    // in metadata `step` rows on is a constant distance, as a tile has the 64 columns of a block of its rows
    static_assert(!Ordered || (Whole && C::columns == 64 && step % 16 == 0));
    uint8_t* indices = call.indices + (Ordered ? ordered_byte(row, strip / S::groups, call.per_row / 16) : row * call.row_bytes + strip * S::n * 2 / 8);
    const int64_t value_step = step * call.per_row * S::n, index_step = Ordered ? step / 16 * 128 : step * call.row_bytes, most = int64_t(rounds) * C::tokens;
    // remaining tokens of this block, and groups from this thread's strips on
    int left = call.length - first < most ? int(call.length - first) : int(most);
    int groups_left = call.per_row - strip < most ? int(call.per_row - strip) : int(most);
    const bool dense = !Whole && call.dense, whole_columns = wide_out && columns == C::columns;
    K::template start<Whole>(g, pitch, left, columns, wide, tiles[0]);
#pragma unroll 1
    for (int round = 0; left > 0; ++round, left -= C::tokens, groups_left -= C::tokens / S::m) {
        cp_async_wait<0>();
        // after this barrier the tile has arrived and the other has been read
        __syncthreads();
        typename C::Tile& now = tiles[round & 1];
        const T* next = g + C::tokens * pitch;
        if (left > C::tokens) K::template start<Whole>(next, pitch, left - C::tokens, columns, wide, tiles[~round & 1]);
        const bool whole = Whole || (whole_columns && left >= C::tokens);
        uint32_t words[C::tasks][S::groups];
        NM_UNROLL
        for (int k = 0; k < C::tasks; ++k) {
            strip_words<Whole>(seed, offset, int64_t(j[k]), words[k]);
            j[k] += C::tokens / S::m;
        }
        NM_UNROLL
        for (int k = 0; k < C::tasks; ++k) {
            uint32_t raw[S::words];
            C::read(now, token, here + k * step, raw);
            const S found = strip_of<T>(raw, words[k], [&](int i) { return *C::at(now, token + i, here + k * step); });
            if (dense) {
                NM_UNROLL
                for (int i = 0; i < S::elements; ++i) {
                    const uint32_t bits = found.dense(i);
                    memcpy(C::at(now, token + i, here + k * step), &bits, sizeof(T));
                }
            } else {
                T v[S::groups * S::n];
                memcpy(v, found.values, sizeof v);
                const auto code = uint16_t(found.code);
                static_assert(sizeof code == S::code_bytes);
                if (whole) {
                    store_global<S::groups * S::n>(values + k * value_step, v);
                    store_global<1>(reinterpret_cast<uint16_t*>(indices + k * index_step), &code);
                } else if (here + k * step < columns && groups_left > 0) {
                    const uint32_t there = found.code & S::code_mask(groups_left);
                    uint8_t bytes[S::code_bytes];
                    memcpy(bytes, &there, sizeof bytes);
                    store_some<S::groups * S::n>(values + k * value_step, v, groups_left * S::n, false);
                    store_some<S::code_bytes>(indices + k * index_step, bytes, (groups_left + 1) / 2, false);
                }
            }
        }
        if (dense) {
            __syncthreads();
            K::write(static_cast<T*>(call.dense) + (g - static_cast<const T*>(call.g)), pitch, left, columns, wide, now);
        }
        g = next;
        values += C::tokens / S::m * S::n;
        indices += Ordered ? C::tokens / 64 * 512 : C::tokens / S::m * S::n * 2 / 8;
    }
}

// Returns false if the indices should be metadata and are not whole tiles of a block.
template <class T>
bool run(const Mvue& call, bool ordered, const Queue& queue) {
    using S = Strip<T>;
    const bool aligned = multiples_of_16(call.g, call.dense, call.values, call.indices);
    const bool wide_rows = multiples_of_16(call.per_row * S::n * int64_t(sizeof(T)), call.row_bytes);
    if (call.inner == 1) {
        if (ordered) return false;
        Mvue flat = call;
        const bool one = call.length % (S::groups * S::m) == 0;
        if (one) {
            for (int64_t* all : {&flat.length, &flat.per_row, &flat.row_bytes}) *all *= call.outer;
            flat.outer = 1;
        }
        const bool wide = aligned && (one || (wide_rows && call.length * int64_t(sizeof(T)) % 16 == 0));
        const int64_t strips = flat.outer * cdiv(flat.per_row, S::groups);
        if (one && wide && !call.dense && strips < (int64_t(1) << 31)) {
            launch("mvue_strips_kernel", mvue_strips_kernel<T>, {cdiv(strips, kThreads), kThreads}, queue, static_cast<const T*>(call.g),
                   uint32_t(strips), call.seed, static_cast<T*>(call.values), call.indices);
        } else {
            launch("mvue_rows_kernel", mvue_rows_kernel<T>, {cdiv(strips, kThreads), kThreads}, queue, flat, wide);
        }
        return true;
    }
    using C = Columns<T>;
    // several rounds per block save some arithmetic, if enough blocks remain
    const int64_t across = cdiv(call.inner, C::columns), tiles = cdiv(call.length, C::tokens), all = call.outer * across * tiles;
    const int64_t rounds = all >= 8 * kManyTiles ? 8 : all >= 4 * kManyTiles ? 4 : all >= kManyTiles ? 2 : 1;
    const int64_t down = cdiv(tiles, rounds);
    const bool wide = multiples_of_16(call.g, call.dense, call.inner * int64_t(sizeof(T)));
    const bool whole = !call.dense && wide && aligned && wide_rows && call.length % C::tokens == 0 && call.inner % C::columns == 0;
    auto kernel = whole ? mvue_columns_kernel<T, true> : mvue_columns_kernel<T, false>;
    if (ordered) {
        if constexpr (sizeof(T) == 2) kernel = mvue_columns_kernel<T, true, true>;
        if (!whole || sizeof(T) != 2) return false;
    }
    launch("mvue_columns_kernel", kernel, {call.outer * across * down, C::threads}, queue, call, Divider(across), Divider(down),
           int(rounds), wide, aligned && wide_rows);
    return true;
}

bool any_length(Mvue call, int dtype, int n, int m, bool approx, bool ordered, const Queue& queue) {
    check_pattern(n, m);
    call.per_row = (call.length + m - 1) / m;
    call.row_bytes = index_bytes(call.per_row * n, index_bits(m));
    if (call.outer * call.length * call.inner == 0) return !ordered;
    if (approx || n != 2 || m != 4) {
        if (ordered) return false;
        mvue_any(call, dtype, n, m, approx, queue);
        return true;
    }
    bool done = false;
    by_dtype(dtype, [&](auto element) { done = run<decltype(element)>(call, ordered, queue); });
    return done;
}

}  // namespace

void mvue(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx, void* out,
          const Queue& queue) {
    any_length({g, outer, length, inner, seed, out, nullptr, nullptr, 0, 0}, dtype, n, m, approx, false, queue);
}

bool mvue_compress(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx, void* values,
                   uint8_t* indices, bool ordered, const Queue& queue) {
    return any_length({g, outer, length, inner, seed, nullptr, values, indices, 0, 0}, dtype, n, m, approx, ordered, queue);
}

}  // namespace nm::cuda
