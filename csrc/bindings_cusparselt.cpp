// cuSPARSELt as Python sees it, nmkernels._C.cusparselt: pointers come as integers, dtypes as cudaDataType, a stream as
// its address. The caller has checked shapes, devices and alignment, and has made the context's device the current one.
#include "bindings.h"
#include "cusparselt/context.h"

namespace py = pybind11;

namespace {

using nm::cusparselt::Context;
using nm::cusparselt::Failure;
using nm::cusparselt::Form;
using nm::cusparselt::Library;

Form form(int64_t rows, int64_t cols, int dtype, bool transposed) { return {rows, cols, dtype, transposed}; }

void bind_context(py::module_& module) {
    py::class_<Context>(module, "Context")
        .def(py::init([](std::shared_ptr<Library> library) { return std::make_unique<Context>(library); }), Unlocked())
        .def("compressed_size", [](Context& self, int64_t rows, int64_t cols, int dtype, bool transposed) {
            return self.compressed_size(form(rows, cols, dtype, transposed));
        }, Unlocked())
        .def("compress", [](Context& self, int64_t rows, int64_t cols, int dtype, bool transposed, Address dense, Address compressed,
                            Address buffer, Address stream) {
            self.compress(form(rows, cols, dtype, transposed), at(dense), at(compressed), at(buffer), at(stream));
        }, Unlocked())
        .def("plan", [](Context& self, int64_t rows, int64_t cols, int64_t width, int dtype, int out, bool transposed, bool by_token,
                        Address bias, int activation, int algorithm, int splits, int mode) {
            return self.plan({form(rows, cols, dtype, transposed), width, out, by_token, activation, algorithm, splits, mode}, at(bias));
        }, Unlocked())
        .def("drop", &Context::drop, Unlocked())
        .def("workspace", &Context::workspace)
        .def("limit", &Context::limit, Unlocked())
        .def("run", [](Context& self, int plan, Address sparse, Address dense, Address residual, Address out, Address bias,
                       Address workspace, Address stream, float alpha, float beta) {
            self.run(plan, {at(sparse), at(dense), at(residual), at(out), at(bias), at(workspace)}, alpha, beta, at(stream));
        }, Unlocked());
}

}  // namespace

void bind_cusparselt(py::module_& module) {
    py::register_exception<Failure>(module, "Failure", PyExc_RuntimeError);
    py::class_<Library, std::shared_ptr<Library>>(module, "Library")
        .def(py::init<const std::string&>(), Unlocked())
        .def_readonly("path", &Library::path)
        .def_readonly("version", &Library::version)
        .def_readonly("on_host", &Library::on_host)
        .def_property("replan", [](const Library& self) { return self.replan.load(); }, [](const Library& self, bool value) { self.replan = value; });
    module.attr("oldest") = nm::cusparselt::kOldest;
    bind_context(module);
}
