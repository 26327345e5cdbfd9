// One wgmma, to test the PTX machine of python_tests/ptx on the layouts of operands: a warpgroup copies 16 KB to shared memory unchanged,
// multiplies 64 rows by 16 columns as two descriptors say, and writes its accumulators. Metadata and A in registers come from arrays.
// test_products.py replaces the instruction by others, with any of these operands.
#include <stdint.h>

extern "C" __global__ void __launch_bounds__(128)
    product(const uint4* image, uint64_t a, uint64_t b, const uint32_t* metadata, const uint4* fragments, float* out) {
    __shared__ __align__(1024) uint4 memory[1024];
    const uint32_t thread = threadIdx.x, base = uint32_t(__cvta_generic_to_shared(memory)) >> 4;
    for (uint32_t i = thread; i < 1024; i += 128) memory[i] = image[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[8];
    for (int i = 0; i < 8; ++i) d[i] = out[8 * thread + i];
    const uint4 own = fragments[thread];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // operands: D; %8 A's descriptor, %9 B's, %10 metadata, %11 to %14 A in registers
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n16k32.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%11, %12, %13, %14}, %9, %10, 1, "
                 "1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "l"(a + base), "l"(b + base), "r"(metadata[thread]), "r"(own.x), "r"(own.y), "r"(own.z), "r"(own.w)
                 : "memory");
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(d[i])::"memory");
    for (int i = 0; i < 8; ++i) out[8 * thread + i] = d[i];
}
