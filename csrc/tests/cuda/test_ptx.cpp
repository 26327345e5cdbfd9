// The emulated PTX instructions against the manual's tables, read another way than the emulator does: whole matrices are
// scattered to fragments element by element by the formulas for ai, bi and ci, multiplied by plain loops, and gathered.
#include <array>
#include <cmath>
#include <random>
#include <stdexcept>

#include "../../cuda/launch.h"
#include "../../cuda/ptx_bytes.h"
#include "emulated.h"

using namespace nm_test;
using nm::cuda::launch;

namespace {

constexpr int kLanes = 32;

// Operands of every lane, as registers.
struct Registers {
    uint32_t a[kLanes][4] = {}, b[kLanes][4] = {}, metadata[kLanes] = {};
    float d[kLanes][4] = {};
};

template <class T>
void put(uint32_t& word, int half, float x) {
    const uint32_t bits = nm::from_float<T>(x).bits;
    word = half ? (word & 0xffffu) | bits << 16 : (word & 0xffff0000u) | bits;
}

// Small whole numbers: every sum is exact.
struct Matrices {
    explicit Matrices(unsigned seed) {
        std::mt19937 random(seed);
        for (auto* of : {&a[0][0], &b[0][0], &c[0][0]}) {
            const int count = of == &a[0][0] ? 16 * 32 : of == &b[0][0] ? 32 * 8 : 16 * 8;
            for (int i = 0; i < count; ++i) of[i] = float(int(random() % 17) - 8);
        }
    }
    // c[row][col] + the product over k < depth
    float result(int row, int col, int depth) const {
        float sum = c[row][col];
        for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][col];
        return sum;
    }
    float a[16][32], b[32][8], c[16][8];
};

// "Matrix Fragments for mma.m16n8k16 with floating point type": a0..a7, b0..b3, c0..c3; k8 has a0..a3 and b0, b1.
int row_of_a(int lane, int i) { return (i < 2 || (i >= 4 && i < 6)) ? lane >> 2 : (lane >> 2) + 8; }
int col_of_a(int lane, int i) { return lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0); }
int row_of_b(int lane, int i) { return lane % 4 * 2 + (i & 1) + i / 2 * 8; }
int col_of_b(int lane, int) { return lane >> 2; }
int row_of_c(int lane, int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
int col_of_c(int lane, int i) { return lane % 4 * 2 + (i & 1); }

template <class T>
void scatter_b_and_c(const Matrices& m, int depth, Registers& to) {
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < depth / 4; ++i) put<T>(to.b[lane][i / 2], i % 2, m.b[row_of_b(lane, i)][col_of_b(lane, i)]);
        for (int i = 0; i < 4; ++i) to.d[lane][i] = m.c[row_of_c(lane, i)][col_of_c(lane, i)];
    }
}

void check_result(const Matrices& m, int depth, const Registers& got, const char* what) {
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const float expected = m.result(row_of_c(lane, i), col_of_c(lane, i), depth);
            CHECK(got.d[lane][i] == expected) << what << ", lane " << lane << ", c" << i << ": " << got.d[lane][i] << ", not " << expected;
        }
    }
}

template <class T>
__global__ void mma_k16_kernel(Registers* r) {
    const int lane = int(threadIdx.x);
    const uint32_t b[2] = {r->b[lane][0], r->b[lane][1]};
    nm::cuda::mma_m16n8k16<T>(r->d[lane], r->a[lane], b);
}

template <class T>
__global__ void mma_k8_kernel(Registers* r) {
    const int lane = int(threadIdx.x);
    const uint32_t a[2] = {r->a[lane][0], r->a[lane][1]}, b[1] = {r->b[lane][0]};
    nm::cuda::mma_m16n8k8<T>(r->d[lane], a, b);
}

template <class T>
void dense(int depth) {
    const Matrices m(unsigned(depth) + unsigned(sizeof(T)));
    Registers r;
    scatter_b_and_c<T>(m, depth, r);
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < depth / 2; ++i) put<T>(r.a[lane][i / 2], i % 2, m.a[row_of_a(lane, i)][col_of_a(lane, i)]);
    }
    launch("mma", depth == 16 ? mma_k16_kernel<T> : mma_k8_kernel<T>, {1, kLanes}, kQueue, &r);
    check_result(m, depth, r, depth == 16 ? "k16" : "k8");
}

TEST(mma_is_the_product_of_its_fragments) {
    dense<nm::bf16>(16);
    dense<nm::fp16>(16);
    dense<nm::bf16>(8);
    dense<nm::fp16>(8);
}

template <class T, int Selector, bool Ordered>
__global__ void mma_sp_kernel(Registers* r) {
    const int lane = int(threadIdx.x);
    nm::cuda::mma_sp_m16n8k32<T, Selector, Ordered>(r->d[lane], r->a[lane], r->b[lane], r->metadata[lane]);
}

// Rows of A with two of every four, the packed fragments and the metadata of the pair of lanes that the selector names;
// the other lanes hold what must not matter. descending: the higher of two indices comes first.
template <class T>
Registers sparse_fragments(Matrices& m, int selector, bool descending) {
    Registers r;
    std::mt19937 random(unsigned(selector) + 7);
    int kept[16][8][2];
    for (int row = 0; row < 16; ++row) {
        for (int chunk = 0; chunk < 8; ++chunk) {
            int one = int(random() % 4), two = int(random() % 4);
            while (two == one) two = int(random() % 4);
            if ((one > two) != descending) std::swap(one, two);
            kept[row][chunk][0] = one;
            kept[row][chunk][1] = two;
            for (int i = 0; i < 4; ++i) {
                if (i != one && i != two) m.a[row][4 * chunk + i] = 0.0f;
            }
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        r.metadata[lane] = 0xffffffffu;
        for (int i = 0; i < 8; ++i) {
            // "firstcol = threadID_in_group * 4 (+ 16 for i >= 4), lastcol = firstcol + 3"
            const int row = row_of_a(lane, i), firstcol = lane % 4 * 4 + (i >= 4 ? 16 : 0);
            put<T>(r.a[lane][i / 2], i % 2, m.a[row][firstcol + kept[row][firstcol / 4][i & 1]]);
        }
    }
    // Figure "Sparse MMA .m16n8k32 metadata layout": bits 15..0 of the pair's first lane hold row g, columns 0 to 15, bits
    // 31..16 row g + 8; its second lane holds columns 16 to 31
    for (int row = 0; row < 16; ++row) {
        for (int chunk = 0; chunk < 8; ++chunk) {
            const int lane = row % 8 * 4 + selector * 2 + (chunk < 4 ? 0 : 1), bit = (row < 8 ? 0 : 16) + chunk % 4 * 4;
            r.metadata[lane] &= ~(15u << bit);
            r.metadata[lane] |= uint32_t(kept[row][chunk][0] | kept[row][chunk][1] << 2) << bit;
        }
    }
    return r;
}

template <class T, int Selector, bool Ordered>
std::string sparse(bool descending) {
    Matrices m(3 + Selector);
    Registers r = sparse_fragments<T>(m, Selector, descending);
    scatter_b_and_c<T>(m, 32, r);
    try {
        launch("mma_sp", mma_sp_kernel<T, Selector, Ordered>, {1, kLanes}, kQueue, &r);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    check_result(m, 32, r, "sparse");
    return "";
}

TEST(mma_sp_is_the_product_of_its_fragments) {
    CHECK((sparse<nm::bf16, 0, true>(false) == ""));
    CHECK((sparse<nm::bf16, 1, true>(false) == ""));
    CHECK((sparse<nm::fp16, 0, true>(false) == ""));
    CHECK((sparse<nm::fp16, 1, true>(false) == ""));
    CHECK((sparse<nm::bf16, 0, false>(false) == ""));
    CHECK((sparse<nm::fp16, 1, false>(false) == ""));
}

TEST(metadata_out_of_order_is_an_error_where_order_is_promised) {
    CHECK((sparse<nm::bf16, 0, true>(true) == "mma_sp: mma.sp: metadata that the instruction does not take"));
    CHECK((sparse<nm::bf16, 0, false>(true) == ""));
}

// As mma.sp's metadata, in other words: every nibble that is promised in order is one of the manual's six.
__global__ void mma_sp_nibble_kernel(const uint32_t* nibble) {
    float d[4] = {};
    const uint32_t a[4] = {}, b[4] = {}, lane = threadIdx.x;
    nm::cuda::mma_sp_m16n8k32<nm::bf16, 0>(d, a, b, lane == 9 ? (*nibble << 12 | 0x44440444u) : 0x44444444u);
}

TEST(six_nibbles_are_metadata) {
    for (uint32_t nibble = 0; nibble < 16; ++nibble) {
        bool taken = true;
        try {
            launch("mma_sp", mma_sp_nibble_kernel, {1, kLanes}, kQueue, &nibble);
        } catch (const std::runtime_error&) {
            taken = false;
        }
        const bool meaningful = nibble == 4 || nibble == 8 || nibble == 9 || nibble == 12 || nibble == 13 || nibble == 14;
        CHECK(taken == meaningful) << nibble;
    }
}

// A of int8, B of bytes with a sign or without.
struct Bytes {
    uint32_t a[kLanes][4] = {}, b[kLanes][4] = {}, metadata[kLanes] = {};
    int32_t d[kLanes][4] = {};
};

template <bool Signed>
__global__ void mma_sp_bytes_kernel(Bytes* r) {
    const int lane = int(threadIdx.x);
    nm::cuda::mma_sp_m16n8k64<Signed>(r->d[lane], r->a[lane], r->b[lane], r->metadata[lane]);
}

// "Matrix Fragments for sparse mma.m16n8k64": a0..a15 of row groupID for i in 0..3 and 8..11, of the next eight otherwise, non-zero elements
// of columns 8 t to 8 t + 7, and 32 more for i >= 8; b0..b15 at row 4 t + i % 4 + 16 (i / 4). Figure "metadata layout": each lane of four
// supplies 32 columns of a row: T0 those of row 0 from 0, T1 of row 8 from 0, T2 of row 0 from 32, T3 of row 8 from 32.
template <bool Signed>
std::string sparse_bytes(bool descending) {
    std::mt19937 random(5);
    int a[16][64] = {}, b[64][8], c[16][8];
    uint8_t kept[16][16][2];
    Bytes r;
    for (auto& row : b) {
        for (int& x : row) x = int(random() % 256) - (Signed ? 128 : 0);
    }
    for (int row = 0; row < 16; ++row) {
        for (int& x : c[row]) x = int(random() % 2001) - 1000;
        for (int chunk = 0; chunk < 16; ++chunk) {
            int one = int(random() % 4), two = int(random() % 4);
            while (two == one) two = int(random() % 4);
            if ((one > two) != descending) std::swap(one, two);
            kept[row][chunk][0] = uint8_t(one);
            kept[row][chunk][1] = uint8_t(two);
            for (int place : {one, two}) a[row][4 * chunk + place] = int(random() % 256) - 128;
            const int lane = row % 8 * 4 + row / 8 + chunk / 8 * 2;
            r.metadata[lane] |= uint32_t(one | two << 2) << (chunk % 8 * 4);
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        const int group = lane / 4, t = lane % 4;
        for (int i = 0; i < 16; ++i) {
            const int row = i / 4 % 2 ? group + 8 : group, chunk = (8 * t + (i < 8 ? 0 : 32)) / 4 + i % 4 / 2;
            r.a[lane][i / 4] |= uint32_t(uint8_t(a[row][4 * chunk + kept[row][chunk][i % 2]])) << (8 * (i % 4));
            r.b[lane][i / 4] |= uint32_t(uint8_t(b[4 * t + i % 4 + 16 * (i / 4)][group])) << (8 * (i % 4));
        }
        for (int i = 0; i < 4; ++i) r.d[lane][i] = c[row_of_c(lane, i)][col_of_c(lane, i)];
    }
    try {
        launch("mma_sp", mma_sp_bytes_kernel<Signed>, {1, kLanes}, kQueue, &r);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = row_of_c(lane, i), col = col_of_c(lane, i);
            int expected = c[row][col];
            for (int k = 0; k < 64; ++k) expected += a[row][k] * b[k][col];
            CHECK(r.d[lane][i] == expected) << "lane " << lane << ", c" << i << ": " << r.d[lane][i] << ", not " << expected;
        }
    }
    return "";
}

TEST(mma_sp_of_bytes_is_the_product_of_its_fragments) {
    CHECK(sparse_bytes<true>(false) == "");
    CHECK(sparse_bytes<false>(false) == "");
    CHECK(sparse_bytes<true>(true) == "mma_sp: mma.sp: metadata that the instruction does not take");
}

struct Loaded {
    uint32_t one[kLanes][1], two[kLanes][2], four[kLanes][4], transposed[kLanes][4];
};

// Rows of a tile, spread over shared memory: row j of matrix i lies at kPlace[8 i + j].
int place_of(int row) { return row * 13 % 32; }

__global__ void ldmatrix_kernel(Loaded* out) {
    struct alignas(16) Tile {
        uint16_t half[32][8];
    };
    NM_SHARED(Tile, tile);
    const int lane = int(threadIdx.x);
    for (int i = 0; i < 8; ++i) tile.half[place_of(lane)][i] = uint16_t(100 * lane + i);
    __syncthreads();
    const void* row = tile.half[place_of(lane)];
    nm::cuda::ldmatrix(out->four[lane], row);
    nm::cuda::ldmatrix_trans(out->transposed[lane], row);
    nm::cuda::ldmatrix(out->one[lane], lane < 8 ? row : nullptr);
    nm::cuda::ldmatrix(out->two[lane], lane < 16 ? row : nullptr);
}

TEST(ldmatrix_hands_out_rows) {
    Loaded out;
    launch("ldmatrix", ldmatrix_kernel, {1, kLanes}, kQueue, &out);
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const auto at = [&](int row, int col) { return uint32_t(100 * (8 * i + row) + col); };
            // "each thread receives a fragment of the row in a single register": thread 4 j holds elements 0, 1 of row j, ...
            const uint32_t straight = at(lane / 4, lane % 4 * 2) | at(lane / 4, lane % 4 * 2 + 1) << 16;
            const uint32_t transposed = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
            CHECK(out.four[lane][i] == straight) << lane << " " << i;
            CHECK(out.transposed[lane][i] == transposed) << lane << " " << i;
            if (i < 1) CHECK(out.one[lane][i] == straight) << lane;
            if (i < 2) CHECK(out.two[lane][i] == straight) << lane;
        }
    }
}

__global__ void mma_in_a_short_warp_kernel() {
    float d[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    nm::cuda::mma_m16n8k16<nm::bf16>(d, a, b);
}

TEST(an_incomplete_warp_cannot_multiply) {
    std::string said;
    try {
        launch("short", mma_in_a_short_warp_kernel, {1, 40}, kQueue);
    } catch (const std::runtime_error& error) {
        said = error.what();
    }
    CHECK(said == "short: mma: the last warp of the block has less than 32 lanes") << said;
}

// Two groups of copies and one that is never committed; what is seen of each after waiting until `Pending` are under way.
template <int Pending>
__global__ void cp_async_kernel(const float* from, float* seen, const int* filled) {
    struct alignas(16) Tile {
        float x[kLanes][12];
    };
    NM_SHARED(Tile, tile);
    const int lane = int(threadIdx.x);
    for (float& x : tile.x[lane]) x = -1.0f;
    nm::cuda::cp_async<16>(&tile.x[lane][0], from + 8 * lane, *filled);
    nm::cuda::cp_async_commit();
    nm::cuda::cp_async<8>(&tile.x[lane][4], from + 8 * lane + 4);
    nm::cuda::cp_async<4>(&tile.x[lane][6], from + 8 * lane + 6, 0);
    nm::cuda::cp_async_commit();
    nm::cuda::cp_async<16, true>(&tile.x[lane][8], from + 8 * lane);
    nm::cuda::cp_async_wait<Pending>();
    __syncthreads();
    const int other = kLanes - 1 - lane;
    for (int i = 0; i < 12; ++i) seen[12 * lane + i] = tile.x[other][i];
}

template <int Pending>
void check_copies(int filled) {
    // 16 bytes before the end of the tensor only `filled` of them are there for the last lane
    Buffer from = place(kLanes * 8, 4, true), seen = place(kLanes * 12, 4, true);
    for (int i = 0; i < kLanes * 8; ++i) from.as<float>()[i] = float(i);
    launch("copies", cp_async_kernel<Pending>, {1, kLanes}, kQueue, from.as<float>(), seen.as<float>(), &filled);
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 12; ++i) {
            const float x = seen.as<float>()[12 * lane + i], source = float(8 * (kLanes - 1 - lane) + i);
            const bool there = i < 4 ? Pending < 2 : i < 7 ? Pending < 1 : false;
            const std::string what = "element " + std::to_string(i) + " with " + std::to_string(Pending) + " pending: " + std::to_string(x);
            if (i == 7) {
                CHECK(x == -1.0f) << what;
            } else if (!there) {
                CHECK(std::isnan(x)) << what;
            } else {
                CHECK(x == ((i < 4 && 4 * i >= filled) || i == 6 ? 0.0f : source)) << what;
            }
        }
    }
}

TEST(copies_arrive_at_the_wait_for_their_group) {
    for (int filled : {16, 12, 4, 0}) {
        check_copies<0>(filled);
        check_copies<1>(filled);
        check_copies<2>(filled);
    }
}

// A word of every width, beside each other: 1 to 16 bytes from byte 16 on, each at a multiple of its own.
__global__ void st_global_kernel(uint8_t* to, int shift, bool shared) {
    struct alignas(16) Tile {
        uint8_t byte[32];
    };
    NM_SHARED(Tile, tile);
    if (shared) return nm::cuda::st_global(tile.byte, 0x01020304u);
    nm::cuda::st_global(to + 1 + shift, uint8_t(1));
    nm::cuda::st_global(to + 2 + shift, uint16_t(0x0302));
    nm::cuda::st_global(to + 4 + shift, 0x07060504u);
    nm::cuda::st_global(to + 8 + shift, make_uint2(0x0b0a0908u, 0x0f0e0d0cu));
    nm::cuda::st_global(to + 16 + shift, make_uint4(0x13121110u, 0x17161514u, 0x1b1a1918u, 0x1f1e1d1cu));
}

TEST(a_word_is_stored_whole) {
    const Buffer to = place(32, 1, true);
    to.as<uint8_t>()[0] = 0;
    launch("stores", st_global_kernel, {1, 1}, kQueue, to.as<uint8_t>(), 0, false);
    for (int i = 0; i < 32; ++i) CHECK(to.as<uint8_t>()[i] == i) << i;
    const auto said = [&](int shift, bool shared) {
        try {
            launch("stores", st_global_kernel, {1, 1}, kQueue, to.as<uint8_t>(), shift, shared);
        } catch (const std::runtime_error& error) {
            return std::string(error.what());
        }
        return std::string("nothing");
    };
    CHECK(said(-1, false) == "stores: misaligned address") << said(-1, false);
    CHECK(said(0, true) == "stores: st.global: an address in shared memory") << said(0, true);
}

}  // namespace
