// nmkernels._C: the compiled core as Python sees it. Pointers come as integers (Tensor.data_ptr()), dtypes as the
// codes of cpu/dispatch.h; the caller has checked shapes, devices and contiguity. Nothing here touches Python
// objects while a kernel runs, so the interpreter lock is released around each.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/kernels.h"

namespace py = pybind11;

namespace {

// Raised whenever a signature or the meaning of an argument below changes; nmkernels/backends checks it.
constexpr int kAbi = 1;

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

using Unlocked = py::call_guard<py::gil_scoped_release>;

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "The compiled core of nmkernels; use nmkernels.ops.";
    module.attr("abi") = kAbi;
    module.attr("cuda") = false;
    module.def("pool_workers", &nm::pool_workers);

    module.def("mask", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int threads) {
        nm::mask(at(w), dtype, numel, n, m, at<uint8_t>(out), threads);
    }, Unlocked());
    module.def("prune", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int threads) {
        nm::prune(at(w), dtype, numel, n, m, at(out), threads);
    }, Unlocked());
}
