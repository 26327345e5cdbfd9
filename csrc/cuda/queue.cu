// A thread's way to a GPU.
#include "queue.h"

#if defined(NM_EMULATED)

namespace nm::cuda {

Queue::Queue(int device, void* stream) : device(device), stream(stream) {}
Queue::~Queue() {}

}  // namespace nm::cuda

#else

#include <cuda.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "launch.h"

namespace nm::cuda {

namespace {

// The driver's error codes equal the runtime's.
void expect(int device, CUresult status) {
    if (status != CUDA_SUCCESS) check(("GPU " + std::to_string(device)).c_str(), cudaError_t(status));
}

struct Contexts {
    CUresult (*device_of)(CUdevice*, int);
    CUresult (*current)(CUcontext*);
    CUresult (*device_of_current)(CUdevice*);
    CUresult (*retain_primary)(CUcontext*, CUdevice);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext*);
};

const Contexts& contexts() {
    static const Contexts found = [] {
        const auto get = [](const char* name, auto& function) {
            void* entry;
            check(name, driver_function(name, &entry));
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(entry);
        };
        Contexts all{};
        get("cuDeviceGet", all.device_of);
        get("cuCtxGetCurrent", all.current);
        get("cuCtxGetDevice", all.device_of_current);
        get("cuDevicePrimaryCtxRetain", all.retain_primary);
        get("cuCtxPushCurrent", all.push);
        get("cuCtxPopCurrent", all.pop);
        return all;
    }();
    return found;
}

// The primary context of a GPU, also used by the runtime and torch; retained once and never released.
CUcontext primary(CUdevice device) {
    static std::mutex mutex;
    static std::map<CUdevice, CUcontext> held;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = held.find(device);
    if (known != held.end()) return known->second;
    CUcontext context;
    expect(device, contexts().retain_primary(&context, device));
    return held[device] = context;
}

}  // namespace

Queue::Queue(int device, void* stream) : device(device), stream(stream) {
    CUdevice wanted, current;
    CUcontext context = nullptr;
    expect(device, contexts().device_of(&wanted, device));
    // asked first, because to ask for the GPU of no context is an error, which compute-sanitizer reports
    expect(device, contexts().current(&context));
    // any context of it, because a stream of a non-primary context, such as a green one, works only in its own
    if (context && contexts().device_of_current(&current) == CUDA_SUCCESS && current == wanted) return;
    expect(device, contexts().push(primary(wanted)));
    pushed_ = true;
}

Queue::~Queue() {
    CUcontext popped;
    if (pushed_) contexts().pop(&popped);
}

cudaError_t driver_function(const char* name, void** entry) {
    cudaDriverEntryPointQueryResult there = cudaDriverEntryPointSymbolNotFound;
    // versions of the functions as of CUDA 12.0
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, entry, 12000, cudaEnableDefault, &there);
    if (status != cudaSuccess) cudaGetLastError();  // clear it, so that no later call reports it
    return status == cudaSuccess && there != cudaDriverEntryPointSuccess ? cudaErrorCallRequiresNewerDriver : status;
}

void allow_shared(const char* name, const void* kernel, size_t bytes, int device) {
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, size_t> allowed;
    const std::lock_guard<std::mutex> lock(mutex);
    size_t& most = allowed[{kernel, device}];
    if (bytes <= most) return;
    check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
    most = bytes;
}

}  // namespace nm::cuda

#endif
