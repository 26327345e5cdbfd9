#include "context.h"

#include <algorithm>

namespace nm::cusparselt {

namespace {

// Bytes; what PyTorch's allocator gives, and what every address is checked for.
constexpr uint32_t kAlignment = 16;

}  // namespace

struct Context::Entry {
    explicit Entry(const Library& library) : dense(library), out(library), selection(library), plan(library) {}

    // destroyed from the last to the first
    MadeMatrix dense, out;
    Matmul matmul{};
    Made<Selection, &Entries::MatmulAlgSelectionDestroy> selection;
    Made<Plan, &Entries::MatmulPlanDestroy> plan;
    const void* bias = nullptr;
    size_t workspace = 0;
};

Context::Context(std::shared_ptr<const Library> library) : library_(std::move(library)) {
    library_->check(library_->call.Init(&handle_), "Init");
}

Context::~Context() {
    entries_.clear();
    forms_.clear();
    library_->call.Destroy(&handle_);
}

Context::MadeMatrix& Context::structured(const Form& form) {
    auto& found = forms_[form];
    if (!found) {
        auto made = std::make_unique<MadeMatrix>(*library_);
        const int64_t rows = form.transposed ? form.cols : form.rows, cols = form.transposed ? form.rows : form.cols;
        made->made(library_->call.StructuredDescriptorInit(&handle_, &made->data, rows, cols, cols, kAlignment, form.dtype, kByRow, kHalf),
                   "StructuredDescriptorInit");
        found = std::move(made);
    }
    return *found;
}

std::pair<size_t, size_t> Context::compressed_size(const Form& form) {
    size_t size = 0, buffer = 0;
    library_->check(library_->call.SpMMACompressedSize2(&handle_, &structured(form).data, &size, &buffer), "SpMMACompressedSize2");
    return {size, buffer};
}

void Context::compress(const Form& form, const void* dense, void* compressed, void* buffer, Stream stream) {
    const int op = form.transposed ? kTransposed : kPlain;
    library_->check(library_->call.SpMMACompress2(&handle_, &structured(form).data, 1, op, dense, compressed, buffer, stream),
                    "SpMMACompress2");
}

int Context::plan(const Gemm& p, const void* bias) {
    const Entries& call = library_->call;
    const Form& form = p.sparse;
    auto entry = std::make_unique<Entry>(*library_);
    const Matrix* sparse = &structured(form).data;
    const int64_t b_rows = p.by_token ? p.width : form.cols, b_cols = p.by_token ? form.cols : p.width;
    entry->dense.made(call.DenseDescriptorInit(&handle_, &entry->dense.data, b_rows, b_cols, b_cols, kAlignment, form.dtype, kByRow),
                      "DenseDescriptorInit");
    // stored (width, rows) is (rows, width) by columns
    const int order = p.by_token ? kByColumn : kByRow;
    entry->out.made(call.DenseDescriptorInit(&handle_, &entry->out.data, form.rows, p.width, p.by_token ? form.rows : p.width, kAlignment,
                                             p.out, order),
                    "DenseDescriptorInit");
    library_->check(call.MatmulDescriptorInit(&handle_, &entry->matmul, form.transposed ? kTransposed : kPlain,
                                              p.by_token ? kTransposed : kPlain, sparse, &entry->dense.data, &entry->out.data,
                                              &entry->out.data, form.dtype == kInt8 ? kInInt32 : kInFloat32),
                    "MatmulDescriptorInit");
    if (bias) set_bias(*entry, bias);
    if (p.activation >= 0) {
        const int on = 1;
        library_->check(call.MatmulDescSetAttribute(&handle_, &entry->matmul, p.activation, &on, sizeof on), "MatmulDescSetAttribute");
    }
    entry->selection.made(call.MatmulAlgSelectionInit(&handle_, &entry->selection.data, &entry->matmul, kDefaultAlgorithm),
                          "MatmulAlgSelectionInit");
    const auto choose = [&](int attribute, int value) {
        library_->check(call.MatmulAlgSetAttribute(&handle_, &entry->selection.data, attribute, &value, sizeof value),
                        "MatmulAlgSetAttribute");
    };
    if (p.algorithm >= 0) choose(kAlgorithmId, p.algorithm);
    if (p.splits > 1) choose(kSplitK, p.splits);
    if (p.mode > 0) choose(kSplitKMode, p.mode);
    init_plan(*entry);
    const auto slot = std::find(entries_.begin(), entries_.end(), nullptr);
    if (slot == entries_.end()) {
        entries_.push_back(std::move(entry));
        return static_cast<int>(entries_.size()) - 1;
    }
    *slot = std::move(entry);
    return static_cast<int>(slot - entries_.begin());
}

void Context::init_plan(Entry& entry) {
    entry.plan.destroy();
    const Entries& call = library_->call;
    entry.plan.made(call.MatmulPlanInit(&handle_, &entry.plan.data, &entry.matmul, &entry.selection.data), "MatmulPlanInit");
    library_->check(call.MatmulGetWorkspace(&handle_, &entry.plan.data, &entry.workspace), "MatmulGetWorkspace");
}

void Context::set_bias(Entry& entry, const void* bias) {
    library_->check(library_->call.MatmulDescSetAttribute(&handle_, &entry.matmul, kBiasPointer, &bias, sizeof bias),
                    "MatmulDescSetAttribute");
    entry.bias = bias;
}

Context::Entry& Context::at(int plan) const {
    if (plan < 0 || static_cast<size_t>(plan) >= entries_.size() || !entries_[static_cast<size_t>(plan)]) {
        throw std::out_of_range("there is no plan " + std::to_string(plan));
    }
    return *entries_[static_cast<size_t>(plan)];
}

void Context::drop(int plan) {
    at(plan);
    entries_[static_cast<size_t>(plan)].reset();
}

size_t Context::workspace(int plan) const { return at(plan).workspace; }

int Context::limit(int plan) const {
    int value = 0;
    library_->check(library_->call.MatmulAlgGetAttribute(&handle_, &at(plan).selection.data, kAlgorithmLimit, &value, sizeof value),
                    "MatmulAlgGetAttribute");
    return value;
}

void Context::run(int plan, const Operands& o, float alpha, float beta, Stream stream) {
    Entry& entry = at(plan);
    if (entry.bias && o.bias != entry.bias) {
        set_bias(entry, o.bias);
        if (library_->replan) init_plan(entry);
    }
    library_->check(library_->call.Matmul(&handle_, &entry.plan.data, &alpha, o.sparse, o.dense, &beta, o.residual, o.out, o.workspace,
                                          &stream, 1),
                    "Matmul");
}

}  // namespace nm::cusparselt
