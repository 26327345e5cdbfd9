// How a kernel starts, and what becomes of an error: an exception that names the kernel.
//
//   Queue queue{device, stream};
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

// Division of numbers below 2^31 by one that the host knows: n / d = (n ceil(2^(31 + l) / d)) >> (31 + l), 2^l >= d.
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

class OnDevice {
  public:
    OnDevice(const char* name, int device) {
        check(name, cudaGetDevice(&before_));
        if (before_ != device) check(name, cudaSetDevice(device));
        changed_ = before_ != device;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

#endif

// Starts kernel(args...) on every thread of the grid; nothing happens where the grid has no blocks.
template <class... P>
void launch(const char* name, void (*kernel)(P...), Grid grid, Queue queue, typename Same<P>::type... args) {
    if (grid.blocks == 0) return;
    if (grid.blocks < 0 || grid.blocks > 0x7fffffff) {
        throw std::runtime_error(std::string(name) + ": " + std::to_string(grid.blocks) + " blocks are more than a grid has");
    }
#if defined(NM_EMULATED)
    (void)queue;
    emulator::run_grid(name, unsigned(grid.blocks), unsigned(grid.threads), grid.shared, [&] { kernel(args...); });
#else
    const OnDevice here(name, queue.device);
    // 48 KB, of which the kernel's own shared memory takes some, are allowed unasked
    if (grid.shared > 16 * 1024) {
        check(name, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(grid.shared)));
    }
    kernel<<<unsigned(grid.blocks), unsigned(grid.threads), grid.shared, static_cast<cudaStream_t>(queue.stream)>>>(args...);
    check(name, cudaGetLastError());
#endif
}

}  // namespace nm::cuda
