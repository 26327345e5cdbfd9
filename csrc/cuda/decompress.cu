// From the canonical form back to dense, copying bits. Values with a corrupt index outside their group are left out.
#include "any_groups.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"
#include "../core/bitpack.h"
#include "../core/dispatch.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// A thread writes 16 bytes, next to those of the next thread; smaller writes would send a sector twice. They may be a part of a
// group, or several groups whose indices share a byte. T is uint16_t or uint32_t.
template <class T, class P>
struct Chunk {
    static constexpr int kElements = 16 / int(sizeof(T)), kSteps = 4, kBits = P::m <= 4 ? 2 : 4;
    static constexpr int kParts = P::m > kElements ? P::m / kElements : 1;  // of a group
    static constexpr int kGroups = P::m > kElements ? 1 : kElements / P::m;
    static constexpr int kValues = kGroups * P::n, kIndexBits = kValues * kBits;
};

template <class T, class P>
__global__ void __launch_bounds__(kThreads) decompress_kernel(const T* values, const uint8_t* indices, T* out, int64_t chunks) {
    using C = Chunk<T, P>;
    T stored[C::kSteps][C::kValues];
    uint32_t places[C::kSteps];
    const int64_t first = int64_t(blockIdx.x) * C::kSteps * kThreads + threadIdx.x;
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        const int64_t chunk = first + s * kThreads, group = chunk / C::kParts;
        if (chunk >= chunks) continue;
        load_wide<C::kValues>(values + group * C::kValues, stored[s]);
        if constexpr (C::kIndexBits < 8) {
            constexpr int kPerByte = 8 / C::kIndexBits;
            places[s] = uint32_t(indices[group / kPerByte]) >> (int(group % kPerByte) * C::kIndexBits);
        } else {
            places[s] = load_word<C::kIndexBits / 8>(indices + group * (C::kIndexBits / 8));
        }
    }
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        const int64_t chunk = first + s * kThreads;
        if (chunk >= chunks) continue;
        const uint32_t before = uint32_t(chunk % C::kParts) * C::kElements;
        uint32_t dense[C::kElements], words[4];
        NM_UNROLL
        for (int i = 0; i < C::kElements; ++i) {
            dense[i] = 0;
            const int group = C::kParts > 1 ? 0 : i / P::m;
            NM_UNROLL
            for (int k = group * P::n; k < (group + 1) * P::n; ++k) {
                const uint32_t place = places[s] >> (k * C::kBits) & ((1u << C::kBits) - 1u);
                dense[i] = place == before + uint32_t(i - group * P::m) ? uint32_t(stored[s][k]) : dense[i];
            }
        }
        NM_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int e = 2 * i % C::kElements;
            words[i] = sizeof(T) == 4 ? dense[i] : __byte_perm(dense[e], dense[e + 1], 0x5410);
        }
        store_global<4>(reinterpret_cast<uint32_t*>(out) + chunk * 4, words);
    }
}

// Any N:M, partial last groups, any alignment. A block scatters a tile in shared memory.
struct Tiles {
    int64_t rows, per_row, cols;
    int tile_rows, tile_groups;
    int64_t across;
    int n, m, bits;
};

template <class T>
__global__ void __launch_bounds__(AnyTile::kThreads)
    decompress_any_kernel(Tiles tiles, const T* values, const uint8_t* indices, T* out) {
    using Dense = T[AnyTile::kElements];
    NM_SHARED(Dense, dense);
    const int64_t row = int64_t(blockIdx.x) / tiles.across * tiles.tile_rows;
    const int64_t group = int64_t(blockIdx.x) % tiles.across * tiles.tile_groups;
    const int rows = tiles.rows - row < tiles.tile_rows ? int(tiles.rows - row) : tiles.tile_rows;
    const int groups = tiles.per_row - group < tiles.tile_groups ? int(tiles.per_row - group) : tiles.tile_groups;
    const int n = tiles.n, m = tiles.m, width = groups * m, kept = groups * n;
    for (int i = int(threadIdx.x); i < rows * width; i += AnyTile::kThreads) dense[i] = 0;
    __syncthreads();
    const int64_t row_kept = tiles.per_row * n, row_bytes = index_bytes(row_kept, tiles.bits);
    for (int i = int(threadIdx.x); i < rows * kept; i += AnyTile::kThreads) {
        const int r = i / kept, k = i % kept;
        const int place = get_index(indices + (row + r) * row_bytes, group * n + k, tiles.bits);
        if (place < m) dense[r * width + k / n * m + place] = values[(row + r) * row_kept + group * n + k];
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < rows * width; i += AnyTile::kThreads) {
        const int64_t column = group * m + i % width;
        if (column < tiles.cols) out[(row + i / width) * tiles.cols + column] = dense[i];
    }
}

template <class T>
void run(const T* values, const uint8_t* indices, int64_t rows, int64_t cols, int n, int m, T* out, const Queue& queue) {
    const int bits = index_bits(m);
    int64_t done = 0;
    if (cols % m == 0 && cols / m * n * bits % 8 == 0) {  // one long row
        cols *= rows;
        rows = 1;
    }
    if (rows == 1 && cols % m == 0 && multiples_of_16(values, indices, out)) {
        by_pattern(n, m, [&](auto pattern) {
            using P = decltype(pattern);
            if constexpr (P::capacity != kMaxM) {
                using C = Chunk<T, P>;
                constexpr int kWhole = 32;  // elements: groups, and bytes of indices
                const int64_t chunks = cols / kWhole * (kWhole / C::kElements);
                const Grid grid{cdiv(chunks, C::kSteps * kThreads), kThreads};
                launch("decompress_kernel", decompress_kernel<T, P>, grid, queue, values, indices, out, chunks);
                done = chunks * C::kElements;
            }
        });
    }
    if (done == cols) return;
    const int64_t left = cols - done, stored = done / m * n;
    Tiles tiles{rows, cdiv(left, m), left, 0, 0, 0, n, m, bits};
    const int room = AnyTile::groups(m);
    tiles.tile_groups = tiles.per_row < room ? int(tiles.per_row) : room;
    tiles.tile_rows = rows < room / tiles.tile_groups ? int(rows) : room / tiles.tile_groups;
    tiles.across = cdiv(tiles.per_row, tiles.tile_groups);
    launch("decompress_any_kernel", decompress_any_kernel<T>, {cdiv(rows, tiles.tile_rows) * tiles.across, AnyTile::kThreads}, queue, tiles,
           values + stored, indices + stored * bits / 8, out + done);
}

}  // namespace

void decompress(const void* values, const void* indices, int dtype, int64_t rows, int64_t cols, int n, int m, void* out, const Queue& queue) {
    check_pattern(n, m);
    if (rows == 0 || cols == 0) return;
    const auto packed = static_cast<const uint8_t*>(indices);
    if (dtype == kFloat32) {
        run(static_cast<const uint32_t*>(values), packed, rows, cols, n, m, static_cast<uint32_t*>(out), queue);
    } else {
        run(static_cast<const uint16_t*>(values), packed, rows, cols, n, m, static_cast<uint16_t*>(out), queue);
    }
}

}  // namespace nm::cuda
