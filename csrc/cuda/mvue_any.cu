// mvue and mvue_compress for all other patterns and the approximate method, in shared memory: a single lane processes a group
// sampled by level (up to 16 elements), otherwise a team of lanes with 8 elements each. A block processes a tile of lines and
// groups; a line is a row of memory or a column of a matrix. Optimised for generality (M up to 256), not for bandwidth.
#include "../core/bitpack.h"
#include "../core/dispatch.h"
#include "../core/philox.h"
#include "launch.h"
#include "mvue.h"
#include "mvue_group.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256, kEach = 8, kWhole = 16;

struct Shape {
    int n, m, bits;
    int lines, groups;  // of a tile
    int width;          // lanes of a team
    bool approx;
    bool by_level;
};

Shape shape_of(int n, int m, bool approx) {
    Shape s{n, m, index_bits(m), m > 64 ? 16 : 32, m > 64 ? 1 : 64 / m, 1, approx, !approx && has_level_rule(n, m)};
    if (m <= 16) s.groups = s.groups / 4 * 4;  // tiles begin on a byte of the packed indices
    while (!s.by_level && s.width * kEach < m) s.width *= 2;
    return s;
}

// The shared memory of a tile: T x[lines][stride], T values[lines][kept], uint8 indices[lines][kept].
struct Parts {
    int stride, kept;
    explicit NM_HD Parts(const Shape& s) : stride(s.groups * s.m + 1), kept(s.groups * s.n) {}
    NM_HD size_t bytes(const Shape& s, size_t element) const { return size_t(s.lines) * (size_t(stride + kept) * element + size_t(kept)); }
};

template <class T>
struct Tile {
    T *x, *values;
    uint8_t* indices;
};

// The stored elements of a group, in order of index: the non-zeros and, up to n, zeros at the lowest indices.
template <int K, class T>
NM_DEVICE void pack(const Team& team, uint32_t inside, const T (&result)[K], int n, T* values, uint8_t* indices) {
    uint32_t kept = 0;
    NM_UNROLL
    for (int i = 0; i < K; ++i) kept |= uint32_t(!is_zero(result[i])) << i;
    const uint32_t free = inside & ~kept;
    const uint32_t missing = uint32_t(n) - team.sum(uint32_t(__popc(kept)));
    uint32_t earlier_free = team.before(uint32_t(__popc(free))), slot = team.before(uint32_t(__popc(kept)));
    slot += earlier_free < missing ? earlier_free : missing;
    NM_UNROLL
    for (int i = 0; i < K; ++i) {
        const bool keep = kept >> i & 1u, padding = (free >> i & 1u) && earlier_free < missing;
        if (keep || padding) {
            values[slot] = keep ? result[i] : T{};
            indices[slot] = uint8_t(team.lane() * K + i);
            ++slot;
        }
        earlier_free += free >> i & 1u;
    }
}

// Estimates group `group` of line `line` of a tile in place, or packed. All lanes of the warp must call it; j < 0: no group.
template <bool ByLevel, class T>
NM_DEVICE void estimate_group(const Mvue& call, const Shape& s, const Tile<T>& tile, int64_t j, int line, int group) {
    constexpr int K = ByLevel ? kWhole : kEach;
    const Parts parts(s);
    const Team team{s.width};
    const int first = team.lane() * K;
    T* x = tile.x + line * parts.stride + group * s.m;
    T g[K], result[K];
    Shared<K, Team> shared;
    shared.lanes = team;
    uint32_t inside = 0;
    NM_UNROLL
    for (int i = 0; i < K; ++i) {
        const bool in = j >= 0 && first + i < s.m;
        inside |= uint32_t(in) << i;
        g[i] = in ? x[first + i] : T{};
        shared.a[i] = magnitude(to_float(g[i]));
    }
    const uint64_t seed = uint64_t(call.seed[0]), offset = uint64_t(call.seed[1]);
    Fates fates;
    if (!ByLevel && s.approx) {
        const Words words = philox_block(seed, offset, uint64_t(j));
        fates = shared.approx(s.m, words.w[0] >> 8, words.w[1] >> 8);
    } else {
        const Words words = philox_block(seed, offset, uint64_t(j) >> 2);
        const uint32_t low = j & 1 ? words.w[1] : words.w[0], high = j & 1 ? words.w[3] : words.w[2];
        const uint32_t word = j & 2 ? high : low;
        if constexpr (ByLevel) {
            fates = shared.template by_level<T>(s.n, s.m, word);
        } else {
            fates = shared.in_integers(s.n, word >> 8);
        }
    }
    NM_UNROLL
    for (int i = 0; i < K; ++i) result[i] = shared.template result<T>(fates, i, g[i]);
    if (call.dense) {
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            if (inside >> i & 1u) x[first + i] = result[i];
        }
    } else {
        const int at = line * parts.kept + group * s.n;
        pack(team, inside, result, j >= 0 ? s.n : 0, tile.values + at, tile.indices + at);
    }
}

// Calls f(line, i) for i < count in each of `lines` lines, with neighbouring threads along memory.
template <class F>
NM_DEVICE void sweep(int lines, int count, bool along, const F& f) {
    for (int at = int(threadIdx.x); at < lines * count; at += kThreads) {
        const int line = along ? at / count : at % lines;
        f(line, along ? at % count : at / lines);
    }
}

template <bool ByLevel, class T>
__global__ void __launch_bounds__(kThreads) mvue_any_kernel(Mvue call, Shape s, int64_t line_blocks, int64_t group_blocks) {
    NM_DYNAMIC_SHARED(T, memory);
    const Parts parts(s);
    Tile<T> tile{memory, memory + s.lines * parts.stride, nullptr};
    tile.indices = reinterpret_cast<uint8_t*>(tile.values + s.lines * parts.kept);
    // lines are rows of memory (inner = 1, line = outer) or columns
    const bool along = call.inner == 1;
    const int64_t block = blockIdx.x, outer = along ? 0 : block / line_blocks / group_blocks;
    const int64_t line = block % line_blocks * s.lines, group = block / line_blocks % group_blocks * s.groups;
    const int64_t lines_left = (along ? call.outer : call.inner) - line, groups_left = call.per_row - group;
    const int lines = lines_left < s.lines ? int(lines_left) : s.lines, groups = groups_left < s.groups ? int(groups_left) : s.groups;
    const int64_t line_step = along ? call.length : 1, step = call.inner, there = call.length - group * s.m;
    const int64_t corner = outer * call.length * call.inner + line * line_step + group * s.m * step;
    const int64_t row = outer * call.inner + line;

    sweep(lines, groups * s.m, along, [&](int l, int i) {
        tile.x[l * parts.stride + i] = i < there ? static_cast<const T*>(call.g)[corner + l * line_step + i * step] : T{};
    });
    __syncthreads();
    const int teams = kThreads / s.width, team = int(threadIdx.x) / s.width;
    for (int base = 0; base < lines * groups; base += teams) {
        const bool one = base + team < lines * groups;
        const int l = one ? (base + team) / groups : 0, g = one ? (base + team) % groups : 0;
        estimate_group<ByLevel>(call, s, tile, one ? (row + l) * call.per_row + group + g : -1, l, g);
    }
    __syncthreads();
    if (call.dense) {
        sweep(lines, groups * s.m, along, [&](int l, int i) {
            if (i < there) static_cast<T*>(call.dense)[corner + l * line_step + i * step] = tile.x[l * parts.stride + i];
        });
        return;
    }
    const int kept = groups * s.n, per_byte = 8 / s.bits;
    sweep(lines, kept, true, [&](int l, int i) {
        static_cast<T*>(call.values)[((row + l) * call.per_row + group) * s.n + i] = tile.values[l * parts.kept + i];
    });
    sweep(lines, (kept + per_byte - 1) / per_byte, true, [&](int l, int b) {
        uint32_t byte = 0;
        for (int k = 0; k < per_byte && b * per_byte + k < kept; ++k) byte |= uint32_t(tile.indices[l * parts.kept + b * per_byte + k]) << (k * s.bits);
        call.indices[(row + l) * call.row_bytes + group * s.n * s.bits / 8 + b] = uint8_t(byte);
    });
}

}  // namespace

void mvue_any(const Mvue& call, int dtype, int n, int m, bool approx, const Queue& queue) {
    const Shape s = shape_of(n, m, approx);
    const bool along = call.inner == 1;
    const int64_t line_blocks = cdiv(along ? call.outer : call.inner, s.lines), group_blocks = cdiv(call.per_row, s.groups);
    const int64_t blocks = line_blocks * group_blocks * (along ? 1 : call.outer);
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const size_t shared = Parts(s).bytes(s, sizeof(T));
        const auto kernel = s.by_level ? mvue_any_kernel<true, T> : mvue_any_kernel<false, T>;
        launch("mvue_any_kernel", kernel, {blocks, kThreads, shared}, queue, call, s, line_blocks, group_blocks);
    });
}

}  // namespace nm::cuda
