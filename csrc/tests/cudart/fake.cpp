// A runtime and a driver of CUDA with two GPUs that do nothing, for tests of the host's side: contexts are kept per thread as CUDA does,
// and what is asked of a GPU is written down. Compiled together with that side, by the host's compiler; at the end, what tests call.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../../core/dispatch.h"
#include "../../cuda/gemm/tensor_map.h"
#include "../../cuda/kernels.h"
#include "../../cuda/launch.h"

namespace {

constexpr int kGpus = 2;

std::mutex mutex;
std::string log_text;
bool active[kGpus];                     // primary contexts
thread_local std::vector<int> current;  // GPUs of this thread's contexts, the current one last
thread_local int chosen = -1;           // by cudaSetDevice

void note(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    log_text += line + "\n";
}

std::string on(int device) { return " on " + std::to_string(device); }

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(device + 1)); }

int runtime_device() { return !current.empty() ? current.back() : chosen < 0 ? 0 : chosen; }

void activate(int device) {
    if (!active[device]) note("context" + on(device));
    active[device] = true;
}

// As the runtime does before whatever needs a context.
int with_context() {
    if (current.empty()) current.push_back(runtime_device());
    activate(current.back());
    return current.back();
}

CUresult device_get(CUdevice* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < kGpus ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult current_context(CUcontext* context) {
    *context = current.empty() ? nullptr : context_of(current.back());
    return CUDA_SUCCESS;
}

CUresult device_of_current(CUdevice* device) {
    if (current.empty()) {
        note("error");  // as compute-sanitizer reports it
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = current.back();
    return CUDA_SUCCESS;
}

CUresult retain(CUcontext* context, CUdevice device) {
    activate(device);
    note("retain" + on(device));
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult push(CUcontext context) {
    current.push_back(int(reinterpret_cast<uintptr_t>(context)) - 1);
    note("push" + on(current.back()));
    return CUDA_SUCCESS;
}

CUresult pop(CUcontext* context) {
    if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = context_of(current.back());
    note("pop" + on(current.back()));
    current.pop_back();
    return CUDA_SUCCESS;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    note("encode" + on(current.back()));
    std::memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    const std::map<std::string, void*> all = {
        {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(current_context)},
        {"cuCtxGetDevice", reinterpret_cast<void*>(device_of_current)},
        {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
        {"cuCtxPushCurrent", reinterpret_cast<void*>(push)},
        {"cuCtxPopCurrent", reinterpret_cast<void*>(pop)},
        {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode)},
    };
    const auto one = all.find(name);
    *entry = one == all.end() ? nullptr : one->second;
    *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = runtime_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    chosen = device;
    current.assign(1, device);
    activate(device);
    note("set" + on(device));
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    note("launch" + on(with_context()));
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
    note("allow " + std::to_string(value) + on(with_context()));
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
    with_context();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device) {
    note("ask" + on(device));
    *value = what == cudaDevAttrMultiProcessorCount ? 100 + device : 1;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
const char* cudaGetErrorName(cudaError_t error) {
    static thread_local std::string name;
    return (name = std::to_string(int(error))).c_str();
}

}  // extern "C"

// ---- what tests call; an error's words, or an empty string

namespace {

void one_kernel(int) {}
void other_kernel(int) {}

template <class F>
const char* said(const F& f) {
    static thread_local std::string words;
    words.clear();
    try {
        f();
    } catch (const std::exception& error) {
        words = error.what();
    }
    return words.c_str();
}

const nm::cuda::gemm::Map kMap{1024, 64, 64, 64, 64, nm::cuda::gemm::kSwizzle128, 2};

}  // namespace

extern "C" {

// A call of two launches, of one kernel or two, with so much shared memory.
const char* call(int device, int shared, bool two) {
    return said([&] {
        const nm::cuda::Queue queue(device, nullptr);
        nm::cuda::launch("one", one_kernel, {1, 32, size_t(shared)}, queue, 1);
        nm::cuda::launch("other", two ? other_kernel : one_kernel, {1, 32, size_t(shared)}, queue, 1);
    });
}

// A call that encodes a map, as GEMMs by wgmma.sp do before they launch.
const char* call_with_map(int device) {
    return said([&] {
        const nm::cuda::Queue queue(device, nullptr);
        nm::cuda::launch("one", one_kernel, {1, 32}, queue, int(nm::cuda::gemm::encoded(kMap, nm::kBFloat16, queue).opaque[0]));
    });
}

int encode_alone() {
    CUtensorMap map;
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, nullptr, nullptr, nullptr, nullptr, nullptr, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int processors(int device) { return nm::cuda::gpu(device).processors; }
const char* probe(int device) {
    static thread_local std::string words;
    return (words = nm::cuda::probe(device).error).c_str();
}

void make_current(int device) { cudaSetDevice(device); }
int current_device() { return current.empty() ? -1 : current.back(); }
bool has_context(int device) { return active[device]; }

const char* taken_log() {
    static thread_local std::string text;
    const std::lock_guard<std::mutex> lock(mutex);
    text.swap(log_text);
    log_text.clear();
    return text.c_str();
}

}  // extern "C"
