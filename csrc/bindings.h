// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Releases the interpreter lock. Taking it back may end the thread (a daemon thread, once the interpreter shuts down):
// Python then unwinds the stack by force, which a destructor that promises not to throw would turn into an abort, as
// that of py::gil_scoped_release does.
class Unlock {
  public:
    Unlock() : state_(PyEval_SaveThread()) {}
    Unlock(const Unlock&) = delete;
    Unlock& operator=(const Unlock&) = delete;
    ~Unlock() noexcept(false) { PyEval_RestoreThread(state_); }

  private:
    PyThreadState* state_;
};

using Unlocked = pybind11::call_guard<Unlock>;

// Defines every function of csrc/cuda in `module`.
void bind_cuda(pybind11::module_& module);

// Defines the way to cuSPARSELt in `module`.
void bind_cusparselt(pybind11::module_& module);
