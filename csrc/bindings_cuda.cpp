// The CUDA kernels as Python sees them, as functions of a module: the core's submodule `cuda`, or the emulator's module.
// Pointers come as integers, dtypes as the codes of core/dispatch.h; the last two arguments are the device and its stream.
// The caller has checked shapes, devices and contiguity. The interpreter lock is released around each call.
#include "bindings.h"
#include "cuda/kernels.h"

namespace py = pybind11;

namespace {

using nm::cuda::Queue;

Queue queue(int device, Address stream) { return {device, at(stream)}; }

void bind_groups(py::module_& module) {
    module.def("mask", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::mask(at(w), dtype, numel, n, m, at<uint8_t>(out), queue(device, stream));
    }, Unlocked());
    module.def("prune", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::prune(at(w), dtype, numel, n, m, at(out), queue(device, stream));
    }, Unlocked());
    module.def("soft_threshold", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::soft_threshold(at(w), dtype, numel, n, m, at(out), queue(device, stream));
    }, Unlocked());
}

void bind_tensors(py::module_& module) {
    module.def("soft_threshold_chunks", nm::cuda::soft_threshold_chunks);
    module.def("soft_threshold_scale", [](Address w, int dtype, int64_t numel, int n, int m, Address sums, Address scale, int device, Address stream) {
        nm::cuda::soft_threshold_scale(at(w), dtype, numel, n, m, at(sums), at<float>(scale), queue(device, stream));
    }, Unlocked());
    module.def("transposable_mask", [](Address w, int dtype, int64_t rows, int64_t cols, Address out, int device, Address stream) {
        nm::cuda::transposable_mask(at(w), dtype, rows, cols, at<uint8_t>(out), queue(device, stream));
    }, Unlocked());
}

// compress, decompress, pack
void bind_packed(py::module_&) {}

// mvue, mvue_compress
void bind_mvue(py::module_&) {}

void bind_adamw(py::module_&) {}

// linear
void bind_products(py::module_& module) {
    using nm::cuda::LinearCall;
    module.def("linear_few_splits", &nm::cuda::linear_few_splits);
    module.def("linear_few", [](Address x, Address values, Address indices, Address bias, Address y, Address parts, int dtype, int activation,
                                int64_t tokens, int64_t rows, int64_t cols, int n, int m, int splits, int processors, int device, Address stream) {
        const LinearCall call{at(x), at(values), at<uint8_t>(indices), at(bias), at(y), at<float>(parts), dtype, activation,
                              tokens, rows, cols, n, m, splits, processors};
        nm::cuda::linear_few(call, queue(device, stream));
    }, Unlocked());
}

}  // namespace

void bind_cuda(py::module_& module) {
    bind_groups(module);
    bind_tensors(module);
    bind_packed(module);
    bind_mvue(module);
    bind_adamw(module);
    bind_products(module);
}
