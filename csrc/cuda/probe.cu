// Queries the driver, the linked runtime and a GPU before any other kernel is used.
#include "kernels.h"
#include "launch.h"

#if !defined(NM_EMULATED)

#include <map>
#include <mutex>

namespace nm::cuda {

namespace {

// Compiled for the same GPUs as all other kernels.
__global__ void probe_kernel() {}

}  // namespace

Probe probe(int device) {
    Probe found{};
    // these two calls need no driver
    cudaDriverGetVersion(&found.driver);
    cudaRuntimeGetVersion(&found.runtime);
    try {
        const Queue here(device, nullptr);
        // loads the code for this GPU; unlike a launch it may happen while a stream is captured
        cudaFuncAttributes attributes;
        check("probe", cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel)));
    } catch (const std::runtime_error& error) {
        found.error = error.what();
    }
    cudaGetLastError();  // a launch later on must not report this one's error
    return found;
}

const Gpu& gpu(int device) {
    static std::mutex mutex;
    static std::map<int, Gpu> known;  // elements have stable addresses
    const std::lock_guard<std::mutex> lock(mutex);
    const auto there = known.find(device);
    if (there != known.end()) return there->second;
    const auto ask = [&](cudaDeviceAttr what) {
        int value = 0;
        check("gpu", cudaDeviceGetAttribute(&value, what, device));
        return value;
    };
    Gpu found{};
    found.capability = 10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor);
    found.processors = ask(cudaDevAttrMultiProcessorCount);
    found.shared = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found.clock = ask(cudaDevAttrClockRate);
    found.memory_clock = ask(cudaDevAttrMemoryClockRate);
    found.memory_bits = ask(cudaDevAttrGlobalMemoryBusWidth);
    return known[device] = found;
}

}  // namespace nm::cuda

#endif
