// nmkernels._emulated: the CUDA kernels, run by the emulator on CPU tensors; a backend for tests, never shipped.
#include "bindings.h"

PYBIND11_MODULE(_emulated, module, pybind11::mod_gil_not_used()) {
    module.doc() = "The CUDA kernels of nmkernels run on the CPU, for tests.";
    bind_cuda(module);
}
