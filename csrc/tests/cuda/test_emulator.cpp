// The emulator itself: blocks, barriers, shared memory, errors. What it must not let pass is asked of it here.
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "../../cuda/launch.h"
#include "../../cuda/memory.h"
#include "emulated.h"

using namespace nm_test;
using nm::cuda::launch;

namespace {

// What a launch says when it fails; nothing when it does not.
template <class... P>
std::string said(void (*kernel)(P...), nm::cuda::Grid grid, typename nm::cuda::Same<P>::type... args) {
    try {
        launch("k", kernel, grid, kQueue, args...);
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// As long as it lives the blocks of a grid run on so many CPU threads.
struct Workers {
    explicit Workers(const char* count) { setenv("NMKERNELS_EMULATOR_THREADS", count, 1); }
    ~Workers() { unsetenv("NMKERNELS_EMULATOR_THREADS"); }
};

__global__ void count_kernel(int* times) {
    CHECK(gridDim.x == 7 && blockDim.x == 40 && gridDim.y == 1 && blockDim.z == 1 && threadIdx.y == 0);
    atomicAdd(&times[blockIdx.x * blockDim.x + threadIdx.x], 1);
}

TEST(every_thread_of_every_block_runs_once) {
    for (const char* workers : {"1", "3"}) {
        const Workers set(workers);
        std::vector<int> times(7 * 40, 0);
        CHECK(said(count_kernel, {7, 40}, times.data()) == "");
        CHECK(times == std::vector<int>(7 * 40, 1));
    }
}

// Each thread hands its number to another through shared memory, `rounds` times.
template <bool BarrierBefore, bool BarrierAfter>
__global__ void exchange_kernel(float* out, int step, int rounds) {
    using Cells = float[256];
    NM_SHARED(Cells, cell);
    const int t = int(threadIdx.x), n = int(blockDim.x);
    float x = float(t);
    for (int round = 0; round < rounds; ++round) {
        cell[t] = x;
        if constexpr (BarrierBefore) __syncthreads();
        x = cell[(t + step + n) % n];
        if constexpr (BarrierAfter) __syncthreads();
    }
    out[int(blockIdx.x) * n + t] = x;
}

template <bool BarrierBefore, bool BarrierAfter>
bool exchanges(int blocks, int threads, int step, int rounds) {
    std::vector<float> out(size_t(blocks) * size_t(threads));
    CHECK((said(exchange_kernel<BarrierBefore, BarrierAfter>, {blocks, threads}, out.data(), step, rounds) == ""));
    for (int i = 0; i < blocks * threads; ++i) {
        if (out[size_t(i)] != float((i % threads + (step + threads) * rounds) % threads)) return false;
    }
    return true;
}

TEST(a_barrier_is_waited_for_and_a_missing_one_shows) {
    for (int threads : {32, 40, 256}) {
        for (int step : {1, -1, 2, 17}) {
            CHECK((exchanges<true, true>(3, threads, step, 5))) << threads << " threads, step " << step;
            // in one block already
            CHECK((!exchanges<false, true>(1, threads, step, 1))) << threads << " threads, step " << step;
            CHECK((!exchanges<true, false>(1, threads, step, 2))) << threads << " threads, step " << step;
        }
    }
}

__global__ void some_return_kernel(float* out) {
    using Cells = float[64];
    NM_SHARED(Cells, cell);
    const unsigned t = threadIdx.x;
    if (t % 3 == 0) return;
    cell[t] = float(t);
    __syncthreads();
    if (t % 3 == 1) return;
    __syncthreads();
    out[t] = cell[t - 1];
}

TEST(threads_that_have_returned_are_not_waited_for) {
    std::vector<float> out(64, -1.0f);
    CHECK(said(some_return_kernel, {1, 64}, out.data()) == "");
    for (unsigned t = 0; t < 64; ++t) CHECK(out[t] == (t % 3 == 2 ? float(t - 1) : -1.0f)) << t;
}

__global__ void one_returns_kernel(unsigned leaver, int* arrived) {
    if (threadIdx.x == leaver) return;
    __syncthreads();
    atomicAdd(arrived, 1);
}

TEST(the_last_to_move_may_return) {
    for (unsigned leaver = 0; leaver < 40; ++leaver) {
        int arrived = 0;
        CHECK(said(one_returns_kernel, {2, 40}, leaver, &arrived) == "");
        CHECK(arrived == 2 * 39) << leaver;
    }
}

__global__ void order_kernel(int* place) {
    const unsigned at = 2 * blockIdx.x * blockDim.x + threadIdx.x;
    place[at] = atomicAdd(&place[-1], 1);
    __syncthreads();
    place[at + blockDim.x] = atomicAdd(&place[-1], 1);
}

TEST(neighbours_come_in_either_order) {
    for (int threads : {32, 64, 100, 256, 1024}) {
        std::vector<int> place(size_t(1 + 4 * threads), 0);
        CHECK(said(order_kernel, {2, threads}, &place[1]) == "");
        // the first and the second turn of the first block, then of the second
        const auto later = [&](int turn, int t) { return place[size_t(1 + turn * threads + t + 1)] > place[size_t(1 + turn * threads + t)]; };
        int either_way = 0, in_the_first = 0;
        for (int t = 0; t + 1 < threads; ++t) {
            either_way += later(0, t) != later(1, t) && later(0, t) != later(2, t);
            in_the_first += later(0, t);
        }
        CHECK(either_way == threads - 1) << threads << ": " << either_way;
        CHECK(in_the_first > 0 && in_the_first < threads - 1) << threads << ": " << in_the_first;
    }
}

__global__ void two_barriers_kernel() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void returned_lane_kernel() {
    if (threadIdx.x == 5) return;
    __syncwarp();
}

__global__ void barrier_and_warp_kernel() {
    if (threadIdx.x < 16) __syncthreads();
    __shfl_sync(~0u, 1, 0);
}

TEST(what_cannot_go_on_is_reported) {
    CHECK(has(said(two_barriers_kernel, {1, 64}), "is at the barrier of line"));
    const std::string returned = said(returned_lane_kernel, {3, 32});
    CHECK(returned == "k: deadlock in block 0, 31 threads in __syncwarp (the first is 0), the others have returned") << returned;
    const std::string both = said(barrier_and_warp_kernel, {1, 32});
    CHECK(has(both, "16 threads in __shfl_sync (the first is 16), 16 threads in __syncthreads (the first is 0)")) << both;
    // and the next launch is none the wiser
    CHECK((exchanges<true, true>(2, 64, 1, 3)));
}

struct Alive {
    explicit Alive(int* count) : count(count) { atomicAdd(count, 1); }  // blocks run at the same time
    ~Alive() { atomicAdd(count, -1); }
    int* count;
};

__global__ void failing_kernel(int* alive, int* after) {
    const Alive here(alive);
    __syncthreads();
    if (blockIdx.x == 1 && threadIdx.x == 37) throw std::runtime_error("no");
    __syncthreads();
    atomicAdd(after, 1);
}

TEST(an_exception_ends_the_block_and_the_grid) {
    for (const char* workers : {"1", "2"}) {
        const Workers set(workers);
        int alive = 0, after = 0;
        CHECK(said(failing_kernel, {20000, 64}, &alive, &after) == "k: no");
        CHECK(alive == 0) << alive;
        CHECK(after % 64 == 0 && after <= (workers[0] == '1' ? 64 : 19998 * 64)) << after;
    }
}

__global__ void unwritten_kernel(int* nans) {
    struct Tile {
        float a;
        nm::bf16 b;
        nm::fp16 c;
    };
    NM_SHARED(Tile, tile);
    NM_DYNAMIC_SHARED(float, cells);
    const bool all = nm::is_nan(tile.a) && nm::is_nan(nm::to_float(tile.b)) && nm::is_nan(nm::to_float(tile.c)) && nm::is_nan(cells[9]);
    atomicAdd(nans, int(all));
    __syncthreads();
    if (threadIdx.x == 0) {
        tile = Tile{};
        cells[9] = 0.0f;
    }
}

TEST(unwritten_shared_memory_is_nan_in_every_block) {
    int nans = 0;
    CHECK(said(unwritten_kernel, {4, 32, 40}, &nans) == "");
    CHECK(nans == 4 * 32) << nans;
}

// Two declarations, one of them in a template, and the dynamic memory: all different, aligned as declared and no better.
template <int Part>
NM_DEVICE uint64_t* slot() {
    using Slot = uint64_t[3];
    NM_SHARED(Slot, slot);
    return slot;
}

__global__ void places_kernel(void** at) {
    using Words = uint32_t[5];
    NM_SHARED(Words, words);
    NM_DYNAMIC_SHARED(unsigned char, bytes);
    at[0] = words;
    at[1] = slot<0>();
    at[2] = slot<1>();
    at[3] = bytes;
}

TEST(shared_memory_is_one_for_all_and_aligned_as_declared) {
    void *at[4], *again[4];
    CHECK(said(places_kernel, {1, 1, 24}, at) == "");
    CHECK(at[0] != at[1] && at[1] != at[2] && at[2] != at[3]);
    CHECK(uintptr_t(at[0]) % 8 == 4 && uintptr_t(at[1]) % 16 == 8 && uintptr_t(at[3]) % 256 == 128);
    CHECK(said(places_kernel, {1, 64, 24}, again) == "");
}

__global__ void nothing_kernel() {}

__global__ void much_shared_kernel() {
    using Tile = char[40 << 10];
    NM_SHARED(Tile, tile);
    tile[0] = 1;
}

TEST(a_block_has_limits) {
    CHECK(said(nothing_kernel, {1, 1024}) == "");
    CHECK(has(said(nothing_kernel, {1, 1025}), "k: a block cannot have 1025 threads"));
    CHECK(has(said(nothing_kernel, {1, 0}), "k: a block cannot have 0 threads"));
    CHECK(said(nothing_kernel, {1, 32, 163 << 10}) == "");
    CHECK(has(said(nothing_kernel, {1, 32, (163 << 10) + 1}), "shared memory are more than a block has"));
    CHECK(said(much_shared_kernel, {1, 32, 100 << 10}) == "");
    CHECK(has(said(much_shared_kernel, {1, 32, 124 << 10}), "shared memory are more than a block has"));
    CHECK(has(said(nothing_kernel, {int64_t(1) << 31, 32}), "blocks are more than a grid has"));
    CHECK(said(nothing_kernel, {0, 32}) == "");
}

__global__ void wide_kernel(const char* from) { nm::cuda::load_word<16>(from); }

__global__ void misaligned_atomic_kernel(char* at) { atomicAdd(reinterpret_cast<unsigned*>(at), 1u); }

TEST(a_misaligned_access_is_an_error) {
    alignas(16) char bytes[32] = {};
    CHECK(said(wide_kernel, {1, 1}, bytes) == "");
    CHECK(said(wide_kernel, {1, 1}, bytes + 8) == "k: misaligned address");
    CHECK(said(misaligned_atomic_kernel, {1, 1}, bytes + 2) == "k: misaligned address");
}

__global__ void atomics_kernel(unsigned* words, float* sum, int* extremes) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&words[0], i);
    atomicOr(&words[1], 1u << i % 32);
    atomicAnd(&words[2], ~(1u << i % 16));
    atomicAdd(sum, 0.5f);
    atomicMax(&extremes[0], int(i));
    atomicMin(&extremes[1], -int(i));
    for (int turn = 0; turn < 400; ++turn) atomicAdd(&words[6], 1);
    unsigned old = words[3], seen;
    do {
        seen = old;
        old = atomicCAS(&words[3], seen, seen + 3);
    } while (old != seen);
    if (atomicExch(&words[4], i + 1) == 0) atomicAdd(&words[5], 1);
}

TEST(atomics_lose_nothing_between_cpu_threads) {
    const Workers set("4");
    unsigned words[7] = {0, 0, ~0u, 0, 0, 0, 0};
    float sum = 0.0f;
    int extremes[2] = {0, 0};
    CHECK(said(atomics_kernel, {100, 64}, words, &sum, extremes) == "");
    constexpr unsigned n = 6400;
    CHECK(words[0] == n * (n - 1) / 2 && words[1] == ~0u && words[2] == 0xffff0000u && words[3] == 3 * n && words[5] == 1 && words[6] == 400 * n);
    CHECK(sum == 0.5f * n && extremes[0] == int(n) - 1 && extremes[1] == 1 - int(n));
}

TEST(device_code_outside_of_a_kernel_is_an_error) {
    bool refused = false;
    try {
        __syncthreads();
    } catch (const std::logic_error&) {
        refused = true;
    }
    CHECK(refused);
}

}  // namespace
