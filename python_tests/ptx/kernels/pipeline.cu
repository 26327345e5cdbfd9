// What the machine of python_tests/ptx is tried on: a small 2:4 GEMM with everything that Hopper does asynchronously.
//
// y[tokens, out] = x[tokens, in] w[out, in]^T, bf16, w packed in the "wgmma.sp" layout. A cluster of two blocks takes 256 of out and
// all tokens, 64 at a time; each block loads its rows of w, and half of x's rows for both. One warp starts the copies, two warpgroups
// multiply 64 rows of out each and store them transposed. Sizes are whole tiles.
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr int kStages = 2, kTokens = 64, kDepth = 64;
constexpr int kValues = 128 * kDepth, kDense = kTokens * kDepth * 2, kMeta = 1024, kStage = kValues + kDense + kMeta;

__device__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ void load_box(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

__device__ void load_box_for_both(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(uint16_t(3))
        : "memory");
}

__device__ void arrive_at(uint32_t barrier, uint32_t block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(
            barrier),
        "r"(block)
        : "memory");
}

// 128 bytes of swizzle: rows of 64 16-bit elements; 64: rows of 32.
__device__ uint64_t descriptor(uint32_t at, int swizzle) {
    const uint64_t stride = swizzle == 128 ? 1024 : 512, kind = swizzle == 128 ? 1 : 2;
    return uint64_t((at & 0x3ffff) >> 4) | uint64_t(1) << 16 | stride >> 4 << 32 | kind << 62;
}

template <int kSelector>
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, uint32_t meta, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %35, 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n64k32.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, %34, %36, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
          "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
          "+f"(d[31])
        : "l"(a), "l"(b), "r"(meta), "r"(add), "n"(kSelector));
}

__device__ uint32_t rounded(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    pipeline(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out,
             const uint32_t* metadata, int slabs, int tiles) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t full[kStages], empty[kStages];
    const uint32_t stages = shared_address(memory), staged = stages + kStages * kStage;
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 16;" ::"r"(shared_address(&empty[s])) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            int stage = 0;
            uint32_t parity = 1;
            for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll 1
                for (int slab = 0; slab < slabs; ++slab) {
                    const uint32_t at = stages + stage * kStage, barrier = shared_address(&full[stage]);
                    wait(shared_address(&empty[stage]), parity);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kStage) : "memory");
                    load_box(at, &values, slab * (kDepth / 2), int(blockIdx.x) * 128, barrier);
                    load_box_for_both(at + kValues + rank * (kDense / 2), &dense, slab * kDepth, tile * kTokens + int(rank) * (kTokens / 2), barrier);
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t* from = metadata + ((int64_t(blockIdx.x) * 2 + half) * slabs + slab) * 128;
                        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                                         at + kValues + kDense + half * 512),
                                     "l"(__cvta_generic_to_global(from)), "r"(barrier)
                                     : "memory");
                    }
                    stage = stage + 1 == kStages ? 0 : stage + 1;
                    parity ^= uint32_t(stage == 0);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int half = group - 1;
        const uint32_t tile_at = staged + half * (kTokens * 128);
        int stage = 0, before = 0;
        uint32_t parity = 0;
        const auto multiply_slab = [&](float (&d)[32], uint32_t& meta, int add) {
            const uint32_t at = stages + stage * kStage;
            wait(shared_address(&full[stage]), parity);
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(meta) : "r"(at + kValues + kDense + half * 512 + thread * 4) : "memory");
            const uint64_t a = descriptor(at + half * (kValues / 2), 64), b = descriptor(at + kValues, 128);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            multiply<0>(d, a, b, meta, add);
            multiply<1>(d, a + 2, b + 4, meta, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (add && lane < 2) arrive_at(shared_address(&empty[before]), uint32_t(lane));
            before = stage;
            stage = stage + 1 == kStages ? 0 : stage + 1;
            parity ^= uint32_t(stage == 0);
        };
        for (int tile = 0; tile < tiles; ++tile) {
            float d[32];
#pragma unroll
            for (int i = 0; i < 32; ++i) d[i] = 0.0f;
            // while two slabs are under way, the words of neither may be written
            uint32_t even, odd;
#pragma unroll 1
            for (int slab = 0; slab < slabs; slab += 2) {
                multiply_slab(d, even, slab > 0);
                if (slab + 1 < slabs) multiply_slab(d, odd, true);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane < 2) arrive_at(shared_address(&empty[before]), uint32_t(lane));
#pragma unroll
            for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const int token = 8 * (j + lane / 16) + lane % 8, piece = 2 * warp + lane / 8 % 2;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(tile_at + token * 128 + (piece ^ token % 8) * 16),
                             "r"(rounded(d[4 * j], d[4 * j + 1])), "r"(rounded(d[4 * j + 2], d[4 * j + 3])),
                             "r"(rounded(d[4 * j + 4], d[4 * j + 5])), "r"(rounded(d[4 * j + 6], d[4 * j + 7]))
                             : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
            if (thread == 0) {
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out),
                             "r"(int(blockIdx.x) * 128 + half * 64), "r"(tile * kTokens), "r"(tile_at)
                             : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
