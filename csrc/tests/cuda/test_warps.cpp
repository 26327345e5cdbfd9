// Shuffles, votes and reductions of the emulator, against what the PTX ISA manual says of shfl.sync, vote and redux.
#include <stdexcept>

#include "../../cuda/launch.h"
#include "emulated.h"

using namespace nm_test;
using nm::cuda::launch;

namespace {

template <class... P>
std::string said(void (*kernel)(P...), int threads, typename nm::cuda::Same<P>::type... args) {
    try {
        launch("k", kernel, {1, threads}, kQueue, args...);
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

enum Kind { kIdx, kXor, kUp, kDown };

__global__ void shuffle_kernel(int kind, int by, int width, int* out) {
    const int lane = int(threadIdx.x), mine = 100 + lane;
    out[lane] = kind == kIdx  ? __shfl_sync(~0u, mine, by, width)
                : kind == kXor ? __shfl_xor_sync(~0u, mine, by, width)
                : kind == kUp  ? __shfl_up_sync(~0u, mine, unsigned(by), width)
                               : __shfl_down_sync(~0u, mine, unsigned(by), width);
}

// The manual's pseudocode: b and c as the CUDA functions hand them over.
int source_of(int kind, int lane, int by, int width) {
    const int bval = by & 31, segmask = 32 - width, cval = kind == kUp ? 0 : 31;
    const int max_lane = (lane & segmask) | (cval & ~segmask), min_lane = lane & segmask;
    int j = 0;
    bool p = false;
    switch (kind) {
        case kUp: j = lane - bval, p = j >= max_lane; break;
        case kDown: j = lane + bval, p = j <= max_lane; break;
        case kXor: j = lane ^ bval, p = j <= max_lane; break;
        default: j = min_lane | (bval & ~segmask), p = j <= max_lane;
    }
    return p ? j : lane;
}

TEST(shuffles_read_the_lane_that_the_manual_names) {
    for (int kind : {kIdx, kXor, kUp, kDown}) {
        for (int width : {1, 2, 4, 8, 16, 32}) {
            for (int by : {0, 1, 3, 7, 15, 16, 31, 33, -1}) {
                int out[32];
                CHECK(said(shuffle_kernel, 32, kind, by, width, out) == "");
                for (int lane = 0; lane < 32; ++lane) {
                    CHECK(out[lane] == 100 + source_of(kind, lane, by, width)) << "kind " << kind << ", width " << width << ", by " << by << ", lane " << lane;
                }
            }
        }
        int out[32];
        CHECK(said(shuffle_kernel, 32, kind, 1, 12, out) == "k: shuffle: the width is not a power of two");
        CHECK(said(shuffle_kernel, 32, kind, 1, 64, out) == "k: shuffle: the width is not a power of two");
    }
}

__global__ void outside_kernel(float* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, float(threadIdx.x), 1);
}

TEST(a_lane_that_the_mask_leaves_out_gives_nan) {
    float out[16];
    CHECK(said(outside_kernel, 32, out) == "");
    for (int lane = 0; lane < 15; ++lane) CHECK(out[lane] == float(lane + 1));
    CHECK(out[15] != out[15]) << out[15];
}

struct Reduced {
    uint32_t ballot, add, most, least, either, both, parity;
    int any, all, sum, low;
};

__global__ void reduce_kernel(uint32_t mask, Reduced* out) {
    const uint32_t lane = threadIdx.x % 32, x = lane * 2654435761u;
    if (!(mask >> lane & 1)) return;
    Reduced& r = out[threadIdx.x];
    r.ballot = __ballot_sync(mask, x & 8);
    r.any = __any_sync(mask, lane == 9);
    r.all = __all_sync(mask, lane != 9);
    r.add = __reduce_add_sync(mask, x);
    r.most = __reduce_max_sync(mask, x);
    r.least = __reduce_min_sync(mask, x);
    r.either = __reduce_or_sync(mask, 1u << lane);
    r.both = __reduce_and_sync(mask, ~(1u << lane));
    r.parity = __reduce_xor_sync(mask, x);
    r.sum = __reduce_add_sync(mask, -int(lane));
    r.low = __reduce_min_sync(mask, -int(lane));
}

TEST(votes_and_reductions_cover_the_lanes_of_the_mask) {
    for (uint32_t mask : {~0u, 0xffffu, 0xffff0000u, 1u << 9, 0x80000001u, 0x5a5a5a5au}) {
        for (int threads : {32, 64, 40}) {
            std::vector<Reduced> out(static_cast<size_t>(threads));
            CHECK(said(reduce_kernel, threads, mask, out.data()) == "");
            for (int t = 0; t < threads; ++t) {
                if (!(mask >> t % 32 & 1)) continue;
                Reduced e{0, 0, 0, ~0u, 0, ~0u, 0, 0, 1, 0, 0};
                for (int lane = 0; lane < 32 && t / 32 * 32 + lane < threads; ++lane) {
                    if (!(mask >> lane & 1)) continue;
                    const uint32_t x = uint32_t(lane) * 2654435761u;
                    e.ballot |= (x >> 3 & 1) << lane;
                    e.any |= lane == 9;
                    e.all &= lane != 9;
                    e.add += x;
                    e.most = x > e.most ? x : e.most;
                    e.least = x < e.least ? x : e.least;
                    e.either |= 1u << lane;
                    e.both &= ~(1u << lane);
                    e.parity ^= x;
                    e.sum -= lane;
                    e.low = -lane;
                }
                CHECK(std::memcmp(&e, &out[size_t(t)], sizeof e) == 0) << "mask " << mask << ", thread " << t << " of " << threads;
            }
        }
    }
}

// The halves of a warp go different ways, each with its own functions and its own number of turns.
__global__ void halves_kernel(int* out) {
    const int lane = int(threadIdx.x);
    int x = lane;
    if (lane < 16) {
        for (int turn = 0; turn < 5; ++turn) x += __shfl_xor_sync(0x0000ffffu, x, 1 << turn % 4);
    } else {
        for (int turn = 0; turn < 3; ++turn) x = __reduce_max_sync(0xffff0000u, x) - lane;
        __syncwarp(0xffff0000u);
    }
    __syncwarp();
    out[lane] = __shfl_sync(~0u, x, 31 - lane);
}

TEST(halves_of_a_warp_go_different_ways) {
    int out[32], x[32];
    CHECK(said(halves_kernel, 32, out) == "");
    for (int lane = 0; lane < 32; ++lane) x[lane] = lane;
    for (int turn = 0; turn < 5; ++turn) {
        int y[16];
        for (int lane = 0; lane < 16; ++lane) y[lane] = x[lane] + x[lane ^ 1 << turn % 4];
        std::memcpy(x, y, sizeof y);
    }
    for (int turn = 0; turn < 3; ++turn) {
        int most = x[16];
        for (int lane = 16; lane < 32; ++lane) most = x[lane] > most ? x[lane] : most;
        for (int lane = 16; lane < 32; ++lane) x[lane] = most - lane;
    }
    for (int lane = 0; lane < 32; ++lane) CHECK(out[lane] == x[31 - lane]) << lane;
}

__global__ void without_itself_kernel() { __syncwarp(threadIdx.x == 3 ? 0xfff7u : ~0u); }

__global__ void different_functions_kernel() {
    if (threadIdx.x < 16) {
        __ballot_sync(~0u, 1);
    } else {
        __shfl_sync(~0u, 1, 0);
    }
}

__global__ void different_masks_kernel() { __ballot_sync(threadIdx.x < 16 ? ~0u : 0xffff0000u, 1); }

TEST(lanes_that_do_not_meet_are_reported) {
    CHECK(said(without_itself_kernel, 32) == "k: __syncwarp: thread 3 of block 0 calls it with a mask that leaves it out");
    const std::string functions = said(different_functions_kernel, 32), masks = said(different_masks_kernel, 32);
    CHECK(functions.find("while other lanes of the same mask call") != std::string::npos) << functions;
    CHECK(masks.find("deadlock in block 0, 16 threads in __ballot_sync (the first is 0), the others have returned") != std::string::npos) << masks;
}

__global__ void words_kernel(uint32_t* out) {
    out[0] = __byte_perm(0x33221100u, 0x77665544u, 0x7350u);
    out[1] = __byte_perm(0x00008000u, 0u, 0x9999u);
    out[2] = uint32_t(__clz(1) + 100 * __clz(0) + 10000 * __ffs(8) + 1000000 * __popc(0xf0u));
    out[3] = __umulhi(0x80000000u, 6u);
    out[4] = __float_as_uint(__uint_as_float(0x7fa00001u));
}

TEST(functions_of_words) {
    uint32_t out[5];
    CHECK(said(words_kernel, 1, out) == "");
    CHECK(out[0] == 0x77335500u && out[1] == 0xffffffffu && out[2] == 4043231u && out[3] == 3u && out[4] == 0x7fa00001u);
}

}  // namespace
