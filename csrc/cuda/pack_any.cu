// Packs any N:M of any dtype, strides and alignment, one way: a block loads a tile of whole groups into shared memory, and a thread
// processes one element at a time. Slower than registers; also handles the remainders of common patterns. any_groups.h marks the n
// kept; their order in the group comes from bit counts.
#include "any_groups.h"
#include "launch.h"
#include "pack.h"

namespace nm::cuda {

namespace {

// A set of elements of a tile, one bit each.
struct Bits {
    static constexpr int kWords = AnyTile::kElements / 32;
    uint32_t words[kWords];

    // All 32 lanes must call it, with neighbouring elements.
    NM_DEVICE void set(int e, bool in) {
        const uint32_t bits = __ballot_sync(~0u, in);
        if (e % 32 == 0) words[e / 32] = bits;
    }

    NM_DEVICE bool has(int e) const { return words[e / 32] >> (e % 32) & 1u; }

    // Number of elements in [first, last).
    NM_DEVICE int count(int first, int last) const {
        int found = 0;
        for (int word = first / 32; 32 * word < last; ++word) {
            uint32_t bits = words[word];
            if (32 * word < first) bits &= ~0u << (first % 32);
            if (32 * word + 32 > last) bits &= ~(~0u << (last % 32));
            found += __popc(bits);
        }
        return found;
    }
};

struct Scratch {
    AnyTile groups;
    Bits kept, stored;
    uint8_t positions[AnyTile::kElements];
};

// Packed rows, `per_row` groups each; neighbours in a group are `step` elements apart, rows `row_step`.
struct Walk {
    int64_t rows, per_row, row_step, step;
    int tile_rows, tile_groups;  // of a block
    int64_t across;              // blocks beside each other
    int n, m, bits;
};

// A block's part of it, clipped to the matrix.
struct Here {
    int64_t row, group;  // the first
    int rows, groups;

    NM_DEVICE explicit Here(const Walk& walk) {
        row = int64_t(blockIdx.x) / walk.across * walk.tile_rows;
        group = int64_t(blockIdx.x) % walk.across * walk.tile_groups;
        rows = walk.rows - row < walk.tile_rows ? int(walk.rows - row) : walk.tile_rows;
        groups = walk.per_row - group < walk.tile_groups ? int(walk.per_row - group) : walk.tile_groups;
    }
};

template <class In>
NM_DEVICE void store_value(In x, int select, float t, float scale, void* values, int64_t at, int out) {
    const float y = select == kThreshold ? to_float(shrink(x, t)) * scale : to_float(x);
    constexpr int in = std::is_same_v<In, float> ? kFloat32 : std::is_same_v<In, bf16> ? kBFloat16 : kFloat16;
    if (select != kThreshold && in == out) {
        static_cast<In*>(values)[at] = x;
    } else if (out == kFloat32) {
        static_cast<float*>(values)[at] = y;
    } else if (out == kBFloat16) {
        static_cast<bf16*>(values)[at] = from_float<bf16>(y);
    } else {
        static_cast<fp16*>(values)[at] = from_float<fp16>(y);
    }
}

template <class In>
__global__ void __launch_bounds__(AnyTile::kThreads)
    pack_any_kernel(Walk walk, int select, const In* w, const uint8_t* mask, const float* scale, void* values, int out, uint8_t* indices,
                    int* overfull) {
    NM_SHARED(Scratch, scratch);
    const Here here(walk);
    const int n = walk.n, m = walk.m, row_elements = walk.tile_groups * m, elements = walk.tile_rows * row_elements;
    const int64_t first = here.row * walk.row_step + here.group * m * walk.step;
    const auto within = [&](int e) { return e / row_elements < here.rows && e % row_elements < here.groups * m; };
    const auto address = [&](int e) { return first + e / row_elements * walk.row_step + e % row_elements * walk.step; };

    for (int i = int(threadIdx.x); i < elements; i += AnyTile::kThreads) {
        // neighbouring threads read neighbouring memory
        const int e = walk.step == 1 ? i : i % walk.tile_rows * row_elements + i / walk.tile_rows;
        uint32_t key = 0;
        if (within(e)) key = select != kGiven ? Key<In>::of(w[address(e)]) : mask[address(e)] ? AnyTile::kKept : 0u;
        scratch.groups.keys[e] = key;
    }
    __syncthreads();
    if (select == kThreshold && n < m) scratch.groups.find_thresholds(elements, n, m, Key<In>::bits);
    if (select != kGiven) scratch.groups.mark_kept(elements, n, m, Key<In>::bits);
    // whole warps, because lanes combine their bits
    for (int e = int(threadIdx.x); e < AnyTile::kElements; e += AnyTile::kThreads) {
        scratch.kept.set(e, e < elements && (scratch.groups.keys[e] & AnyTile::kKept) != 0);
    }
    __syncthreads();
    for (int e = int(threadIdx.x); e < AnyTile::kElements; e += AnyTile::kThreads) {
        bool stored = e < elements && scratch.kept.has(e);
        if (select == kGiven && e < elements) {
            const int begin = e / m * m, all = scratch.kept.count(begin, begin + m);
            stored = stored || e - begin - scratch.kept.count(begin, e) < n - all;
            if (all > n) *overfull = 1;
        }
        scratch.stored.set(e, stored);
    }
    __syncthreads();
    const float factor = select == kThreshold ? scale_at(scale) : 1.0f;
    for (int e = int(threadIdx.x); e < elements; e += AnyTile::kThreads) {
        if (!scratch.stored.has(e) || !within(e)) continue;
        const int begin = e / m * m, k = scratch.stored.count(begin, e);
        if (k >= n) continue;  // if the mask keeps too many
        scratch.positions[e / m * n + k] = uint8_t(e - begin);
        const int64_t at = ((here.row + e / row_elements) * walk.per_row + here.group + e % row_elements / m) * n + k;
        const float t = select == kThreshold && n < m ? Key<In>::value(scratch.groups.thresholds[e / m]) : 0.0f;
        store_value(scratch.kept.has(e) ? w[address(e)] : In{}, select, t, factor, values, at, out);
    }
    __syncthreads();
    const int count = here.groups * n, bytes = (count * walk.bits + 7) / 8;
    const int64_t row_bytes = index_bytes(walk.per_row * n, walk.bits), before = here.group * n * walk.bits / 8;
    for (int i = int(threadIdx.x); i < here.rows * bytes; i += AnyTile::kThreads) {
        const int row = i / bytes, byte = i % bytes, per_byte = 8 / walk.bits;
        uint32_t packed = 0;
        for (int j = 0; j < per_byte && byte * per_byte + j < count; ++j) {
            packed |= uint32_t(scratch.positions[row * walk.tile_groups * n + byte * per_byte + j]) << (j * walk.bits);
        }
        indices[(here.row + row) * row_bytes + before + byte] = uint8_t(packed);
    }
}

// Square tiles if a warp reads along the columns; whole bytes of indices.
void choose_tile(Walk& walk) {
    const int room = AnyTile::groups(walk.m), whole = walk.bits == 8 ? 1 : 8 / walk.bits;
    int groups = walk.step == 1 ? room : room / 32 < whole ? whole : room / 32;
    groups -= groups % whole;
    walk.tile_groups = groups < walk.per_row ? groups : int(walk.per_row);
    walk.tile_rows = room / walk.tile_groups;
    if (walk.tile_rows > walk.rows) walk.tile_rows = int(walk.rows);
    walk.across = cdiv(walk.per_row, walk.tile_groups);
}

}  // namespace

void pack_any(const Pack& call, int64_t first, const Queue& queue) {
    const bool columns = call.by_column.values != nullptr;
    const Packed& to = columns ? call.by_column : call.by_row;
    Walk walk{};
    walk.n = call.n;
    walk.m = call.m;
    walk.bits = index_bits(call.m);
    walk.rows = columns ? call.cols : call.rows;
    walk.per_row = (columns ? call.rows : call.cols) / call.m;
    walk.row_step = columns ? 1 : call.cols;
    walk.step = columns ? call.cols : 1;
    if (first > 0) {  // the end of one long row
        walk.rows = 1;
        walk.per_row = (call.rows * call.cols - first) / call.m;
    }
    if (walk.rows == 0 || walk.per_row == 0) return;
    choose_tile(walk);
    by_dtype(call.dtype, [&](auto element) {
        using In = decltype(element);
        const int64_t value = first / call.m * call.n, size = call.out_dtype == kFloat32 ? 4 : 2;
        launch("pack_any_kernel", pack_any_kernel<In>, {cdiv(walk.rows, walk.tile_rows) * walk.across, AnyTile::kThreads}, queue, walk,
               call.select, static_cast<const In*>(call.w) + first, call.mask ? call.mask + first : nullptr, call.scale,
               static_cast<char*>(to.values) + value * size, call.out_dtype, static_cast<uint8_t*>(to.indices) + value * walk.bits / 8,
               call.overfull);
    });
}

}  // namespace nm::cuda
