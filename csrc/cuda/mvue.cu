// mvue and mvue_compress of 2:4, the pattern of every method that samples gradients: a thread works on strips of consecutive
// elements, see mvue_strip.h. Other patterns are mvue_any.cu's.
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
constexpr int64_t kManyTiles = 1024;  // of 16 KB: some for each block that an H200 runs at once

// Groups along memory. A thread takes a strip; a strip ends where its row does.
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
    strip_words(uint64_t(call.seed[0]), uint64_t(call.seed[1]), j, words);
    memcpy(raw, x, sizeof x);
    S strip;
    if (!estimate(raw, words, strip)) {
        estimate_exactly(words, strip, [&](int i) { return i < left ? g[i] : T{}; });
    }
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

// Groups down the columns of a matrix [length, inner], packed as rows. A block takes 8 strips of 128 bytes of columns: it
// reads rows of 128 bytes into shared memory, each thread a strip of every column of one 4-byte word out of it, and the
// packed rows leave through shared memory again, 8 strips at once. Neighbouring blocks take neighbouring columns.
template <class T>
struct Columns {
    using S = Strip<T>;
    static constexpr int tokens = 128, strips = tokens / S::elements, lanes = 32, per_word = 4 / int(sizeof(T)), columns = lanes * per_word;
    static constexpr int threads = strips * lanes;
    static constexpr int unit = 16 / int(sizeof(T)), units = columns / unit, lines = threads / units;  // of 16 bytes

    using Words = uint32_t[tokens][lanes];
    struct alignas(16) Tile {
        Words words[2];
        uint32_t values[columns][strips][S::value_words];
        uint8_t codes[columns][strips][S::code_bytes];
    };

    // Where a strip of a column lies in Tile::values: lanes that store at once meet other banks.
    static NM_DEVICE int slot(int column, int strip) { return strip ^ (column / per_word & (strips - 1)); }
};

// A thread's part of a tile in memory, [tokens][columns] with `pitch` elements a row: 16 bytes in every `lines`-th row.
template <class T>
struct Corner {
    using C = Columns<T>;
    static NM_DEVICE int unit() { return int(threadIdx.x % C::units) * C::unit; }
    static NM_DEVICE int line() { return int(threadIdx.x / C::units); }
    static NM_DEVICE T* inside(typename C::Words& words, int t) { return reinterpret_cast<T*>(words[line() + t]) + unit(); }

    // Starts to bring a tile, zeros where it ends; `wide`: addresses are multiples of 16.
    static NM_DEVICE void start(const T* g, int64_t pitch, int64_t tokens, int columns, bool wide, typename C::Words& words) {
        if (wide && tokens >= C::tokens && columns == C::columns) {
            NM_UNROLL
            for (int t = 0; t < C::tokens; t += C::lines) cp_async<16>(inside(words, t), g + t * pitch);
        } else if (wide) {
            const int there = (columns - unit() < C::unit ? columns - unit() : C::unit) * int(sizeof(T));
#pragma unroll 1
            for (int t = 0; t < C::tokens; t += C::lines) {
                const bool in = line() + t < tokens && there > 0;
                cp_async<16>(inside(words, t), in ? g + t * pitch : g, in ? there : 0);
            }
        } else {
#pragma unroll 1
            for (int t = 0; t < C::tokens; t += C::lines) {
#pragma unroll 1
                for (int i = 0; i < C::unit; ++i) inside(words, t)[i] = line() + t < tokens && unit() + i < columns ? g[t * pitch + i] : T{};
            }
        }
        cp_async_commit();
    }

    static NM_DEVICE void write(T* dense, int64_t pitch, int64_t tokens, int columns, bool wide, typename C::Words& words) {
        NM_UNROLL
        for (int t = 0; t < C::tokens; t += C::lines) {
            T x[C::unit];
            load_wide<C::unit>(inside(words, t), x);
            store_some<C::unit>(dense + t * pitch, x, line() + t < tokens ? columns - unit() : 0, wide);
        }
    }
};

// Packed rows leave: 16 bytes a thread, or what a strip has of a row. A thread stays at its place of the row and goes down
// the columns.
template <class T>
struct Packed {
    using C = Columns<T>;
    using S = Strip<T>;
    static constexpr int bytes = S::value_words * 4, piece = bytes < 16 ? bytes : 16, parts = bytes / piece, pieces = C::strips * parts;
    static constexpr int count = piece / int(sizeof(T)), slots = pieces * count, code = C::strips * S::code_bytes, step = C::threads / pieces;
    static_assert(C::threads % pieces == 0 && C::threads >= C::columns && step % (C::strips * C::per_word) == 0);

    static NM_DEVICE int first() { return int(threadIdx.x / pieces); }
    static NM_DEVICE int slot() { return int(threadIdx.x % pieces) * count; }

    // to: where this thread's first piece goes; rows have `pitch` slots, `left` of them from this tile on
    static NM_DEVICE void write_values(T* to, int64_t pitch, int64_t left, int columns, bool wide, const typename C::Tile& tile) {
        const int strip = int(threadIdx.x) % pieces / parts, part = int(threadIdx.x) % parts;
        const T* from = reinterpret_cast<const T*>(tile.values[first()][C::slot(first(), strip)]) + part * count;
        if (wide && left >= slots && columns == C::columns) {
            NM_UNROLL
            for (int column = 0; column < C::columns; column += step) {
                T v[count];
                load_wide<count>(from + column * C::strips * bytes / int(sizeof(T)), v);
                store_global<count>(to + column * pitch, v);
            }
        } else {
#pragma unroll 1
            for (int column = 0; column + first() < columns; column += step) {
                T v[count];
                load_wide<count>(from + column * C::strips * bytes / int(sizeof(T)), v);
                store_some<count>(to + column * pitch, v, left - slot(), false);
            }
        }
    }

    // to: this thread's row; `left` bytes of it from this tile on
    static NM_DEVICE void write_code(uint8_t* to, int64_t left, int columns, bool wide, const typename C::Tile& tile) {
        const int column = int(threadIdx.x);
        if (column >= columns) return;
        uint8_t c[code];
        load_wide<code>(tile.codes[column][0], c);
        store_some<code>(to, c, left, wide);
    }
};

// A block takes `rounds` tiles, one after the other along the tokens.
template <class T>
__global__ void __launch_bounds__(Columns<T>::threads, 2) mvue_columns_kernel(Mvue call, Divider across, Divider down, int rounds, bool wide, bool wide_out) {
    using C = Columns<T>;
    using S = Strip<T>;
    using K = Corner<T>;
    using P = Packed<T>;
    NM_SHARED(typename C::Tile, tile);
    const uint32_t turn = across.quotient(blockIdx.x), plane = down.quotient(turn);
    const int64_t column = int64_t(blockIdx.x - turn * across.divisor) * C::columns, pitch = call.inner, columns_left = pitch - column;
    const int64_t row = plane * pitch + column;
    const int columns = columns_left < C::columns ? int(columns_left) : C::columns;
    const int lane = int(threadIdx.x % C::lanes), strip = int(threadIdx.x / C::lanes);
    const uint64_t seed = uint64_t(call.seed[0]), offset = uint64_t(call.seed[1]);
    const int64_t first = int64_t(turn - plane * down.divisor) * rounds * C::tokens;
    const int64_t corner = (plane * call.length + first + K::line()) * pitch + column + K::unit();
    K::start(static_cast<const T*>(call.g) + corner, pitch, call.length - first, columns, wide, tile.words[0]);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const int64_t past = int64_t(round) * C::tokens, left = call.length - first - past, group = (first + past) / S::m, groups_left = call.per_row - group;
        if (left <= 0) break;
        cp_async_wait<0>();
        // after this barrier the tile is there, and what the last round left in the other and in the outputs has been read
        __syncthreads();
        typename C::Words& now = tile.words[round & 1];
        if (round + 1 < rounds && left > C::tokens) {
            K::start(static_cast<const T*>(call.g) + corner + (past + C::tokens) * pitch, pitch, left - C::tokens, columns, wide, tile.words[~round & 1]);
        }
        {
            uint32_t both[S::elements], all[C::per_word][S::groups];
            NM_UNROLL
            for (int i = 0; i < S::elements; ++i) both[i] = now[strip * S::elements + i][lane];
            NM_UNROLL
            for (int c = 0; c < C::per_word; ++c) {
                strip_words(seed, offset, (row + lane * C::per_word + c) * call.per_row + group + strip * S::groups, all[c]);
            }
#pragma unroll 1
            for (int c = 0; c < C::per_word; ++c) {
                const int here = lane * C::per_word + c;
                uint32_t words[S::groups], raw[S::words];
                NM_UNROLL
                for (int i = 0; i < S::groups; ++i) words[i] = c ? all[C::per_word - 1][i] : all[0][i];
                NM_UNROLL
                for (int i = 0; i < S::words; ++i) {
                    raw[i] = sizeof(T) == 4 ? both[i] : permute_bytes(both[i * C::per_word], both[i * C::per_word + C::per_word - 1], c ? 0x7632 : 0x5410);
                }
                S found;
                const auto element = [&](int i) { return reinterpret_cast<const T*>(now[strip * S::elements + i])[here]; };
                if (!estimate(raw, words, found)) estimate_exactly(words, found, element);
                if (call.dense) {
                    NM_UNROLL
                    for (int i = 0; i < S::elements; ++i) {
                        const uint32_t bits = found.dense(i);
                        memcpy(reinterpret_cast<T*>(now[strip * S::elements + i]) + here, &bits, sizeof(T));
                    }
                } else {
                    store_wide<S::value_words>(tile.values[here][C::slot(lane * C::per_word, strip)], found.values);
                    if (groups_left < C::strips * S::groups) found.code &= S::code_mask(groups_left - strip * S::groups);
                    memcpy(tile.codes[here][strip], &found.code, S::code_bytes);
                }
            }
        }
        __syncthreads();
        if (call.dense) {
            K::write(static_cast<T*>(call.dense) + corner + past * pitch, pitch, left, columns, wide, now);
        } else {
            const int64_t value = ((row + P::first()) * call.per_row + group) * S::n + P::slot(), byte = group * S::n * 2 / 8;
            P::write_values(static_cast<T*>(call.values) + value, call.per_row * S::n, groups_left * S::n, columns, wide_out, tile);
            P::write_code(call.indices + (row + threadIdx.x) * call.row_bytes + byte, call.row_bytes - byte, columns, wide_out, tile);
        }
    }
}

template <class T>
void run(const Mvue& call, Queue queue) {
    using S = Strip<T>;
    const bool aligned = multiples_of_16(call.g, call.dense, call.values, call.indices);
    const bool wide_rows = multiples_of_16(call.per_row * S::n * int64_t(sizeof(T)), call.row_bytes);
    if (call.inner == 1) {
        Mvue flat = call;
        const bool one = call.length % (S::groups * S::m) == 0;
        if (one) {
            for (int64_t* all : {&flat.length, &flat.per_row, &flat.row_bytes}) *all *= call.outer;
            flat.outer = 1;
        }
        const bool wide = aligned && (one || (wide_rows && call.length * int64_t(sizeof(T)) % 16 == 0));
        const int64_t strips = flat.outer * cdiv(flat.per_row, S::groups);
        return launch("mvue_rows_kernel", mvue_rows_kernel<T>, {cdiv(strips, kThreads), kThreads}, queue, flat, wide);
    }
    using C = Columns<T>;
    // some rounds for each block save it some arithmetic, where enough blocks remain
    const int64_t across = cdiv(call.inner, C::columns), tiles = cdiv(call.length, C::tokens), all = call.outer * across * tiles;
    const int64_t rounds = all >= 4 * kManyTiles ? 4 : all >= kManyTiles ? 2 : 1;
    const int64_t down = cdiv(tiles, rounds);
    const bool wide = multiples_of_16(call.g, call.dense, call.inner * int64_t(sizeof(T)));
    launch("mvue_columns_kernel", mvue_columns_kernel<T>, {call.outer * across * down, C::threads}, queue, call, Divider(across), Divider(down),
           int(rounds), wide, aligned && wide_rows);
}

void any_length(Mvue call, int dtype, int n, int m, bool approx, Queue queue) {
    check_pattern(n, m);
    call.per_row = (call.length + m - 1) / m;
    call.row_bytes = index_bytes(call.per_row * n, index_bits(m));
    if (call.outer * call.length * call.inner == 0) return;
    if (approx || n != 2 || m != 4) return mvue_any(call, dtype, n, m, approx, queue);
    by_dtype(dtype, [&](auto element) { run<decltype(element)>(call, queue); });
}

}  // namespace

void mvue(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx, void* out, Queue queue) {
    any_length({g, outer, length, inner, seed, out, nullptr, nullptr, 0, 0}, dtype, n, m, approx, queue);
}

void mvue_compress(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx, void* values,
                   uint8_t* indices, Queue queue) {
    any_length({g, outer, length, inner, seed, nullptr, values, indices, 0, 0}, dtype, n, m, approx, queue);
}

}  // namespace nm::cuda
