// One wgmma each, to try the machine of python_tests/ptx on operands' layouts: a warpgroup copies 16 KB to shared memory as they are,
// multiplies 64 rows by 16 columns as two descriptors say, and writes its accumulators. Metadata and A in registers come from arrays.
#include <stdint.h>

#define WGMMA_D "{%0, %1, %2, %3, %4, %5, %6, %7}"

// operands: after D; %8 A's descriptor, %9 B's, %10 metadata, %11 to %14 A in registers
#define PRODUCT(name, Sum, letter, instruction, operands)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                                                         \
        name(const uint4* image, uint64_t a, uint64_t b, const uint32_t* metadata, const uint4* fragments, Sum* out) {                        \
        __shared__ __align__(1024) uint4 memory[1024];                                                                                        \
        const uint32_t thread = threadIdx.x, base = uint32_t(__cvta_generic_to_shared(memory)) >> 4;                                          \
        for (uint32_t i = thread; i < 1024; i += 128) memory[i] = image[i];                                                                   \
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                                          \
        __syncthreads();                                                                                                                      \
        Sum d[8];                                                                                                                             \
        for (int i = 0; i < 8; ++i) d[i] = out[8 * thread + i];                                                                               \
        const uint4 own = fragments[thread];                                                                                                  \
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                                                               \
        asm volatile("wgmma.mma_async." instruction " " WGMMA_D ", " operands ";"                                                             \
                     : "+" letter(d[0]), "+" letter(d[1]), "+" letter(d[2]), "+" letter(d[3]), "+" letter(d[4]), "+" letter(d[5]),            \
                       "+" letter(d[6]), "+" letter(d[7])                                                                                     \
                     : "l"(a + base), "l"(b + base), "r"(metadata[thread]), "r"(own.x), "r"(own.y), "r"(own.z), "r"(own.w)                    \
                     : "memory");                                                                                                             \
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");                                      \
        for (int i = 0; i < 8; ++i) asm volatile("" : "+" letter(d[i])::"memory");                                                            \
        for (int i = 0; i < 8; ++i) out[8 * thread + i] = d[i];                                                                               \
    }

PRODUCT(dense_kk, float, "f", "sync.aligned.m64n16k16.f32.bf16.bf16", "%8, %9, 1, 1, 1, 0, 0")
PRODUCT(dense_mn, float, "f", "sync.aligned.m64n16k16.f32.bf16.bf16", "%8, %9, 1, 1, 1, 1, 1")
PRODUCT(dense_rk, float, "f", "sync.aligned.m64n16k16.f32.f16.f16", "{%11, %12, %13, %14}, %9, 1, 1, 1, 0")
PRODUCT(dense_r8, float, "f", "sync.aligned.m64n16k32.f32.e4m3.e5m2", "{%11, %12, %13, %14}, %9, 1, 1, 1")
PRODUCT(sparse_kk_0, float, "f", "sp.sync.aligned.m64n16k32.f32.bf16.bf16", "%8, %9, %10, 0, 1, 1, 1, 0, 0")
PRODUCT(sparse_kk_1, float, "f", "sp.sync.aligned.m64n16k32.f32.bf16.bf16", "%8, %9, %10, 1, 1, 1, 1, 0, 0")
PRODUCT(sparse_mn_0, float, "f", "sp.sync.aligned.m64n16k32.f32.f16.f16", "%8, %9, %10, 0, 1, 1, 1, 1, 1")
PRODUCT(sparse_rk_1, float, "f", "sp.sync.aligned.m64n16k32.f32.bf16.bf16", "{%11, %12, %13, %14}, %9, %10, 1, 1, 1, 1, 0")
PRODUCT(sparse_8, float, "f", "sp.sync.aligned.m64n16k64.f32.e4m3.e5m2", "%8, %9, %10, 0, 1, 1, 1")
PRODUCT(sparse_r8, float, "f", "sp.sync.aligned.m64n16k64.f32.e5m2.e4m3", "{%11, %12, %13, %14}, %9, %10, 0, 1, 1, 1")
PRODUCT(sparse_s8, int32_t, "r", "sp.sync.aligned.m64n16k64.s32.s8.s8", "%8, %9, %10, 0, 1")
