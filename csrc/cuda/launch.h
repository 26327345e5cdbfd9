// Launches kernels; an error becomes an exception that names the kernel.
//
//   const Queue queue(device, stream);
//   launch("mask_kernel", mask_kernel<float>, {blocks, threads}, queue, w, out, count);
#pragma once

#include <stdexcept>
#include <string>

#include "platform.h"
#include "queue.h"

namespace nm::cuda {

struct Grid {
    int64_t blocks;
    int threads;
    size_t shared = 0;  // bytes of dynamic shared memory
};

template <class T>
struct Same {
    using type = T;
};

inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Division of numbers below 2^31 by a divisor known on the host: n / d = (n ceil(2^(31 + l) / d)) >> (31 + l), 2^l >= d.
struct Divider {
    explicit Divider(int64_t d) : divisor(uint32_t(d)) {
        while ((uint64_t(1) << shift) < (uint64_t(d) << 31)) ++shift;
        multiplier = uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor);
    }
    NM_HD uint32_t quotient(uint32_t n) const { return uint32_t((uint64_t(n) * multiplier) >> shift); }

    uint32_t divisor, multiplier, shift = 31;
};

#if !defined(NM_EMULATED)

inline void check(const char* name, cudaError_t status) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

// A function of the driver, whose library is not linked; cudaErrorCallRequiresNewerDriver if the driver lacks it.
cudaError_t driver_function(const char* name, void** entry);

// Allows a kernel that much dynamic shared memory on a GPU; calls CUDA only when the amount grows.
void allow_shared(const char* name, const void* kernel, size_t bytes, int device);

#endif

// Launches kernel(args...); does nothing for an empty grid.
template <class... P>
void launch(const char* name, void (*kernel)(P...), Grid grid, const Queue& queue, typename Same<P>::type... args) {
    if (grid.blocks == 0) return;
    if (grid.blocks < 0 || grid.blocks > 0x7fffffff) {
        throw std::runtime_error(std::string(name) + ": " + std::to_string(grid.blocks) + " blocks are more than a grid has");
    }
#if defined(NM_EMULATED)
    (void)queue;
    emulator::run_grid(name, unsigned(grid.blocks), unsigned(grid.threads), grid.shared, [&] { kernel(args...); });
#else
    // 48 KB, including static shared memory, are always allowed
    if (grid.shared > 16 * 1024) allow_shared(name, reinterpret_cast<const void*>(kernel), grid.shared, queue.device);
    void* addresses[] = {static_cast<void*>(&args)..., nullptr};
    check(name, cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(grid.blocks)), dim3(unsigned(grid.threads)), addresses,
                                 grid.shared, static_cast<cudaStream_t>(queue.stream)));
#endif
}

}  // namespace nm::cuda
