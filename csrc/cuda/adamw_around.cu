// MaskedAdamW's small kernels: tables of words, the blocks' first params, the numbers of each param, the sum of statistics.
#include "adamw_pack.h"
#include "adamw_stats.h"
#include "kernels.h"
#include "launch.h"

namespace nm::cuda {

namespace {

constexpr int kWords = 480;  // of one launch: 3840 of the 4096 bytes that arguments may take

// Words travel as an argument: they are read at the launch, so that the host waits for nothing, no pinned memory has to
// outlive the call, and a CUDA graph captures them by value.
struct Words {
    int64_t at[kWords];
};

__global__ void __launch_bounds__(kWords) words_kernel(Words words, int64_t* to, int count) {
    if (int(threadIdx.x) < count) to[threadIdx.x] = words.at[threadIdx.x];
}

// owners[b] = the row of block b's first tile: the last one that begins there or before.
__global__ void __launch_bounds__(256) owners_kernel(const AdamWParam* params, int64_t rows, AdamWPart part, int32_t* owners) {
    const int64_t block = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (block >= part.blocks) return;
    const int64_t tile = part.tile(block);
    int64_t low = 0, high = rows;
    while (low + 1 < high) {
        const int64_t middle = (low + high) / 2;
        if (params[middle].first <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    owners[part.first_block + block] = int32_t(low);
}

struct Hyper {
    double at[8];
};

// A thread per param counts its step and writes the numbers of adamw_scalars.
__global__ void __launch_bounds__(64) adamw_scalars_kernel(AdamWTables tables, AdamWOptions o, const double* hyper, Hyper numbers,
                                                           const int64_t* counts, int64_t count, int64_t params, uint32_t* scalars) {
    const int64_t i = int64_t(blockIdx.x) * 64 + threadIdx.x;
    if (i >= params || is_skipped(o.found)) return;
    float* step = reinterpret_cast<float*>(tables.params[i].step);
    if (step) {
        *step += 1.0f;
        count = int64_t(*step);
    } else if (counts) {
        count = counts[tables.params[i].index];
    }
    if (hyper) {
        NM_UNROLL
        for (int k = 0; k < 8; ++k) numbers.at[k] = hyper[k];
    }
    const AdamW s = adamw_scalars(numbers.at, count, o.frozen, o.eps_inside, o.maximize);
    memcpy(scalars + i * kScalarWords, &s, sizeof s);
}

struct Sums {
    double at[256];
};

NM_DEVICE double joined(bool largest, double a, double b) { return !largest ? a + b : double_bits(b) > double_bits(a) ? b : a; }

// stats[k] = the sum (the last: the largest) of row k of the partials, always in the same order; [0] says whether the step was made.
__global__ void __launch_bounds__(256) adamw_stats_kernel(const double* partials, int64_t blocks, const float* found, double* stats) {
    NM_SHARED(Sums, sums);
    const int k = int(blockIdx.x), thread = int(threadIdx.x);
    const bool applied = !is_skipped(found);
    double x = 0.0;
    if (applied && k > 0) {
        for (int64_t i = thread; i < blocks; i += 256) x = joined(k == kLargest, x, partials[k * blocks + i]);
    }
    sums.at[thread] = x;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) sums.at[thread] = joined(k == kLargest, sums.at[thread], sums.at[thread + half]);
    }
    if (thread == 0) stats[k] = k > 0 ? sums.at[0] : applied ? 1.0 : 0.0;
}

}  // namespace

void upload_words(const std::vector<int64_t>& words, int64_t* to, const Queue& queue) {
    Words part{};
    for (size_t first = 0; first < words.size(); first += kWords) {
        const size_t count = words.size() - first < size_t(kWords) ? words.size() - first : size_t(kWords);
        memcpy(part.at, words.data() + first, count * sizeof(int64_t));
        launch("words_kernel", words_kernel, {1, kWords}, queue, part, to + first, int(count));
    }
}

void adamw_owners(const int64_t* table, int64_t params, const AdamWPart& flat, const AdamWPart& other, int32_t* owners, const Queue& queue) {
    for (const AdamWPart* part : {&flat, &other}) {
        launch("owners_kernel", owners_kernel, {cdiv(part->blocks, 256), 256}, queue, reinterpret_cast<const AdamWParam*>(table), params, *part, owners);
    }
}

namespace {

// The launches before and after the main one, `step(tables)`.
template <class F>
void around(const AdamWArguments& a, int64_t blocks, const AdamWOptions& options, const Queue& queue, const F& step) {
    const auto* params = reinterpret_cast<const AdamWParam*>(a.table);
    const AdamWTables tables{params, a.gradients, a.owners, a.scalars, a.partials, blocks};
    Hyper host_hyper;
    memcpy(host_hyper.at, a.host_hyper, sizeof host_hyper);
    launch("adamw_scalars_kernel", adamw_scalars_kernel, {cdiv(a.params, 64), 64}, queue, tables, options, a.hyper, host_hyper, a.counts, a.count,
           a.params, a.scalars);
    step(tables);
    launch("adamw_stats_kernel", adamw_stats_kernel, {kStats, 256}, queue, a.partials, blocks, options.found, a.stats);
}

}  // namespace

void masked_adamw(const AdamWArguments& a, const AdamWPart& flat, const AdamWPart& other, const AdamWOptions& options, const Queue& queue) {
    around(a, flat.blocks + other.blocks, options, queue, [&](const AdamWTables& tables) {
        adamw_step(tables, flat, true, options, a.n, a.m, queue);
        adamw_step(tables, other, false, options, a.n, a.m, queue);
    });
}

void masked_adamw_pack(const AdamWArguments& a, const AdamWPart& part, const AdamWOptions& options, const AdamWPack& pack, const Queue& queue) {
    around(a, part.blocks, options, queue, [&](const AdamWTables& tables) { adamw_pack_step(tables, part, options, pack, queue); });
}

}  // namespace nm::cuda
