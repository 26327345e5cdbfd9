// A library with cuSPARSELt's entry points that computes on the CPU's memory, for tests. It checks what it is given as
// strictly as it can, counts what it made and was not asked to take back, and can be told to misbehave:
//
//   set("version", 1000)         major * 1000000 + minor * 100 + patch, 800 at first
//   set("fail:MatmulPlanInit", 10)  that entry answers with this status, until it is set to 0
//   set("limit", 4)              algorithms have ids below this
//   set("wrong:2", 1)            algorithm 2 computes a wrong value somewhere; "split wrong:2": only where the sum is split
//   set("random:3", 1)           algorithm 3 answers differently at each call
//   set("unwritten:1", 1)        algorithm 1 forgets an element
//   set("gelu", 1)               GELU by tanh; 0: by erf; 2: refused
//   set("no bias", 1)            a plan with a bias is refused
//   set("frozen bias", 1)        a plan keeps the bias's address as it was when it was made; 2: when it first ran
//   set("workspace", 1024)       bytes that a plan asks for
//   set("device", 1)             the current device
//   set("idle", 1)               products do nothing, so that what a call costs besides can be measured
//
// get("calls:Matmul") counts calls, get("live") what lives, get("errors") what the library was called wrongly with.
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../core/types.h"
#include "../../cusparselt/abi.h"

using namespace nm::cusparselt;

namespace {

struct OfHandle {
    std::thread::id thread;
    long long device;
};
struct OfMatrix {
    int64_t rows, cols, ld;
    int dtype, order;
    bool sparse;
};
struct OfMatmul {
    int op_a, op_b;
    OfMatrix a, b, d;
    int compute;
    bool relu = false, gelu = false;
    const void* bias = nullptr;
};
struct OfSelection {
    int algorithm = 0, splits = 1, mode = 0;
};
struct OfPlan {
    const OfMatmul* matmul;
    OfSelection selection;
    const void* bias;
    bool ran = false;
};

std::mutex g_lock;
std::map<std::string, long long> g_settings{{"version", 800}, {"limit", 4}};
std::map<std::string, long long> g_calls;
std::set<const void*> g_live;
std::deque<OfMatmul> g_matmuls;  // the library has no entry that destroys one
std::atomic<long long> g_errors{0};
std::atomic<bool> g_idle{false};

long long setting(const std::string& name) {
    const std::lock_guard<std::mutex> guard(g_lock);
    const auto found = g_settings.find(name);
    return found == g_settings.end() ? 0 : found->second;
}

constexpr int kInvalid = 3;

// What a struct of the caller's holds: its own address, since it must not be moved, and what was made for it.
template <class T>
struct Inside {
    const void* self;
    T* content;
};

template <class T, class Struct>
void put(Struct* where, T* content) {
    const Inside<T> inside{where, content};
    std::memcpy(where->data, &inside, sizeof inside);
    const std::lock_guard<std::mutex> guard(g_lock);
    g_live.insert(where);
}

template <class T, class Struct>
T* get(const Struct* where) {
    Inside<T> inside;
    std::memcpy(&inside, where->data, sizeof inside);
    const std::lock_guard<std::mutex> guard(g_lock);
    if (inside.self == where && g_live.count(where)) return inside.content;
    ++g_errors;
    return nullptr;
}

template <class T, class Struct>
Status take_back(const Struct* where) {
    T* content = get<T>(where);
    if (!content) return kInvalid;
    const std::lock_guard<std::mutex> guard(g_lock);
    g_live.erase(where);
    delete content;
    return kSuccess;
}

// Counts a call; the status that it was told to answer, or that a handle of another thread or device gets.
Status enter(const char* entry, const Handle* handle = nullptr) {
    {
        const std::lock_guard<std::mutex> guard(g_lock);
        ++g_calls[entry];
    }
    if (const long long status = setting(std::string("fail:") + entry)) return static_cast<Status>(status);
    if (!handle) return kSuccess;
    const OfHandle* content = get<OfHandle>(handle);
    if (!content || content->thread != std::this_thread::get_id() || content->device != setting("device")) {
        ++g_errors;
        return kInvalid;
    }
    return kSuccess;
}

#define ENTER(...)                                               \
    if (const Status status = enter(__VA_ARGS__)) return status; \
    static_assert(true, "")

int size_of(int dtype) {
    switch (dtype) {
        case kFloat32: case kInt32: return 4;
        case kFloat16: case kBfloat16: return 2;
        case kInt8: case kE4m3: case kE5m2: return 1;
        default: return 0;
    }
}

Status refuse() {
    ++g_errors;
    return kInvalid;
}

// An fp8 number: so many exponent and mantissa bits; e4m3 has no inf, and NaN only where all bits are set.
float small_float(uint8_t bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const float whole = static_cast<float>(mantissa) / static_cast<float>(1 << mantissa_bits);
    const float size = exponent ? std::ldexp(1 + whole, exponent - bias) : std::ldexp(whole, 1 - bias);
    return bits & 0x80 ? -size : size;
}

double load(const void* memory, int dtype, int64_t i) {
    switch (dtype) {
        case kFloat32: return static_cast<const float*>(memory)[i];
        case kFloat16: return nm::to_float(static_cast<const nm::fp16*>(memory)[i]);
        case kBfloat16: return nm::to_float(static_cast<const nm::bf16*>(memory)[i]);
        case kInt8: return static_cast<const int8_t*>(memory)[i];
        case kInt32: return static_cast<const int32_t*>(memory)[i];
        case kE4m3: return small_float(static_cast<const uint8_t*>(memory)[i], 4, 3);
        default: return small_float(static_cast<const uint8_t*>(memory)[i], 5, 2);
    }
}

void store(void* memory, int dtype, int64_t i, double x) {
    switch (dtype) {
        case kFloat32: static_cast<float*>(memory)[i] = static_cast<float>(x); break;
        case kFloat16: static_cast<nm::fp16*>(memory)[i] = nm::from_float<nm::fp16>(static_cast<float>(x)); break;
        case kBfloat16: static_cast<nm::bf16*>(memory)[i] = nm::from_float<nm::bf16>(static_cast<float>(x)); break;
        case kInt8: static_cast<int8_t*>(memory)[i] = static_cast<int8_t>(std::fmax(-128, std::fmin(127, std::nearbyint(x)))); break;
        default: static_cast<int32_t*>(memory)[i] = static_cast<int32_t>(x);
    }
}

double activated(const OfMatmul& m, double x) {
    if (m.relu) return x > 0 ? x : 0;
    if (!m.gelu) return x;
    if (setting("gelu") == 1) return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return 0.5 * x * (1 + std::erf(x * M_SQRT1_2));
}

bool aligned(const void* p) { return p && reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// A compressed operand: a mark, its size, and the dense values.
struct Head {
    uint64_t mark;
    int64_t rows, cols;
    uint64_t unused;
};
constexpr uint64_t kMark = 0x3432736574617453;

int64_t place(const OfMatrix& m, int64_t row, int64_t col) { return m.order == kByRow ? row * m.ld + col : col * m.ld + row; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Its presence says that this library works on the CPU's memory.
int nm_cusparselt_on_host = 1;

void set(const char* name, long long value) {
    const std::lock_guard<std::mutex> guard(g_lock);
    g_settings[name] = value;
    if (std::string(name) == "idle") g_idle = value != 0;
}

void reset() {
    const std::lock_guard<std::mutex> guard(g_lock);
    g_settings = {{"version", 800}, {"limit", 4}};
    g_calls.clear();
    g_errors = 0;
    g_idle = false;
}

long long get(const char* name) {
    const std::lock_guard<std::mutex> guard(g_lock);
    const std::string what = name;
    if (what == "live") return static_cast<long long>(g_live.size());
    if (what == "errors") return g_errors;
    return what.rfind("calls:", 0) == 0 ? g_calls[what.substr(6)] : g_settings[what];
}

Status cusparseLtGetProperty(int part, int* value) {
    const int version = static_cast<int>(setting("version"));
    *value = part == kMajor ? version / 1000000 : part == kMinor ? version / 100 % 10000 : version % 100;
    return kSuccess;
}

const char* cusparseLtGetErrorName(Status status) {
    return status == kNotSupported ? "CUSPARSE_STATUS_NOT_SUPPORTED" : status == kInvalid ? "CUSPARSE_STATUS_INVALID_VALUE" : "CUSPARSE_STATUS_OTHER";
}

const char* cusparseLtGetErrorString(Status status) { return status == kNotSupported ? "operation not supported" : "invalid value"; }

Status cusparseLtInit(Handle* handle) {
    ENTER("Init");
    put(handle, new OfHandle{std::this_thread::get_id(), setting("device")});
    return kSuccess;
}

Status cusparseLtDestroy(const Handle* handle) { return take_back<OfHandle>(handle); }

#if !defined(NM_WITHOUT_DENSE)
Status cusparseLtDenseDescriptorInit(const Handle* handle, Matrix* matrix, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment,
                                     int dtype, int order) {
    ENTER("DenseDescriptorInit", handle);
    const int step = 16 / std::max(1, size_of(dtype));
    if (rows % step || cols % step || alignment != 16 || ld != (order == kByRow ? cols : rows)) return refuse();
    put(matrix, new OfMatrix{rows, cols, ld, dtype, order, false});
    return kSuccess;
}
#endif

Status cusparseLtStructuredDescriptorInit(const Handle* handle, Matrix* matrix, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment,
                                          int dtype, int order, int sparsity) {
    ENTER("StructuredDescriptorInit", handle);
    const int step = size_of(dtype) == 1 ? 32 : 16;
    if (rows % step || cols % step || alignment != 16 || ld != cols || order != kByRow || sparsity != kHalf || size_of(dtype) > 2) {
        return refuse();
    }
    put(matrix, new OfMatrix{rows, cols, ld, dtype, order, true});
    return kSuccess;
}

Status cusparseLtMatDescriptorDestroy(const Matrix* matrix) { return take_back<OfMatrix>(matrix); }

Status cusparseLtMatmulDescriptorInit(const Handle* handle, Matmul* matmul, int op_a, int op_b, const Matrix* a, const Matrix* b,
                                      const Matrix* c, const Matrix* d, int compute) {
    ENTER("MatmulDescriptorInit", handle);
    const OfMatrix *ma = get<OfMatrix>(a), *mb = get<OfMatrix>(b), *md = get<OfMatrix>(d);
    if (!ma || !mb || !md || c != d || !ma->sparse || mb->sparse || ma->dtype != mb->dtype) return refuse();
    const int64_t rows = op_a == kPlain ? ma->rows : ma->cols, inner = op_a == kPlain ? ma->cols : ma->rows;
    const int64_t inner_b = op_b == kPlain ? mb->rows : mb->cols, width = op_b == kPlain ? mb->cols : mb->rows;
    if (rows != md->rows || inner != inner_b || width != md->cols || compute != (ma->dtype == kInt8 ? kInInt32 : kInFloat32)) return refuse();
    // in 8 bits both are read along the sum
    if (size_of(ma->dtype) == 1 && (op_a != kPlain || op_b != kTransposed)) return kNotSupported;
    const std::lock_guard<std::mutex> guard(g_lock);
    OfMatmul* content = &g_matmuls.emplace_back();
    content->op_a = op_a, content->op_b = op_b, content->a = *ma, content->b = *mb, content->d = *md, content->compute = compute;
    std::memcpy(matmul->data, &content, sizeof content);
    return kSuccess;
}

static OfMatmul* of(const Matmul* matmul) {
    OfMatmul* content;
    std::memcpy(&content, matmul->data, sizeof content);
    return content;
}

Status cusparseLtMatmulDescSetAttribute(const Handle* handle, Matmul* matmul, int attribute, const void* data, size_t size) {
    ENTER("MatmulDescSetAttribute", handle);
    if (attribute == kBiasPointer) {
        if (size != sizeof(void*)) return refuse();
        if (setting("no bias")) return kNotSupported;
        std::memcpy(&of(matmul)->bias, data, size);
        return kSuccess;
    }
    int on = 0;
    if (size != sizeof on) return refuse();
    std::memcpy(&on, data, size);
    if (attribute == kGelu && setting("gelu") == 2) return kNotSupported;
    (attribute == kRelu ? of(matmul)->relu : of(matmul)->gelu) = on != 0;
    return attribute == kRelu || attribute == kGelu ? kSuccess : refuse();
}

Status cusparseLtMatmulAlgSelectionInit(const Handle* handle, Selection* selection, const Matmul*, int algorithm) {
    ENTER("MatmulAlgSelectionInit", handle);
    if (algorithm != kDefaultAlgorithm) return refuse();
    put(selection, new OfSelection);
    return kSuccess;
}

Status cusparseLtMatmulAlgSelectionDestroy(const Selection* selection) { return take_back<OfSelection>(selection); }

Status cusparseLtMatmulAlgSetAttribute(const Handle* handle, Selection* selection, int attribute, const void* data, size_t size) {
    ENTER("MatmulAlgSetAttribute", handle);
    OfSelection* content = get<OfSelection>(selection);
    int value = 0;
    if (!content || size != sizeof value) return refuse();
    std::memcpy(&value, data, size);
    if (attribute == kAlgorithmId) {
        if (value < 0 || value >= setting("limit")) return kInvalid;
        content->algorithm = value;
    } else if (attribute == kSplitK) {
        content->splits = value;
    } else if (attribute == kSplitKMode) {
        if (value < kOneKernel || value > kTwoKernels) return kNotSupported;
        content->mode = value;
    } else {
        return refuse();
    }
    return kSuccess;
}

Status cusparseLtMatmulAlgGetAttribute(const Handle* handle, const Selection* selection, int attribute, void* data, size_t size) {
    ENTER("MatmulAlgGetAttribute", handle);
    const int value = static_cast<int>(setting("limit"));
    if (!get<OfSelection>(selection) || attribute != kAlgorithmLimit || size != sizeof value) return refuse();
    std::memcpy(data, &value, size);
    return kSuccess;
}

Status cusparseLtMatmulPlanInit(const Handle* handle, Plan* plan, const Matmul* matmul, const Selection* selection) {
    ENTER("MatmulPlanInit", handle);
    const OfSelection* content = get<OfSelection>(selection);
    if (!content) return refuse();
    put(plan, new OfPlan{of(matmul), *content, of(matmul)->bias});
    return kSuccess;
}

Status cusparseLtMatmulPlanDestroy(const Plan* plan) { return take_back<OfPlan>(plan); }

Status cusparseLtMatmulGetWorkspace(const Handle* handle, const Plan* plan, size_t* size) {
    ENTER("MatmulGetWorkspace", handle);
    if (!get<OfPlan>(plan)) return refuse();
    *size = static_cast<size_t>(setting("workspace"));
    return kSuccess;
}

Status cusparseLtMatmul(const Handle* handle, const Plan* plan, const void* alpha, const void* a, const void* b, const void* beta,
                        const void* c, void* d, void* workspace, Stream* streams, int32_t count) {
    if (g_idle) return kSuccess;
    ENTER("Matmul", handle);
    OfPlan* p = get<OfPlan>(plan);
    if (!p || !streams || count != 1 || !aligned(a) || !aligned(b) || !aligned(c) || !aligned(d)) return refuse();
    const long long bytes = setting("workspace");
    if (bytes && !workspace) return refuse();
    if (bytes) std::memset(workspace, 0xff, static_cast<size_t>(bytes));
    const OfMatmul& m = *p->matmul;
    const Head* head = static_cast<const Head*>(a);
    if (head->mark != kMark || head->rows != m.a.rows || head->cols != m.a.cols) return refuse();
    if (setting("frozen bias") == 2 && !p->ran) p->bias = m.bias;
    p->ran = true;
    const void* bias = setting("frozen bias") ? p->bias : m.bias;
    if (bias && !aligned(bias)) return refuse();
    const int64_t inner = m.op_a == kPlain ? m.a.cols : m.a.rows;
    const std::string id = std::to_string(p->selection.algorithm);
    const bool wrong = setting("wrong:" + id) || (p->selection.splits > 1 && setting("split wrong:" + id));
    const bool random = setting("random:" + id), unwritten = setting("unwritten:" + id);
    static std::atomic<int> g_turn{0};
    const int turn = ++g_turn;
    for (int64_t i = 0; i < m.d.rows; ++i) {
        for (int64_t j = 0; j < m.d.cols; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < inner; ++k) {
                const int64_t ka = m.op_a == kPlain ? place(m.a, i, k) : place(m.a, k, i);
                const int64_t kb = m.op_b == kPlain ? place(m.b, k, j) : place(m.b, j, k);
                sum += load(head + 1, m.a.dtype, ka) * load(b, m.b.dtype, kb);
            }
            const int64_t at = place(m.d, i, j);
            const float first = *static_cast<const float*>(alpha), second = *static_cast<const float*>(beta);
            double y = first * sum + (second != 0 ? second * load(c, m.d.dtype, at) : 0);
            if (bias) y += load(bias, m.a.dtype == kInt8 ? kFloat32 : m.d.dtype, i);
            y = activated(m, y);
            const bool last = i + 1 == m.d.rows && j + 1 == m.d.cols;
            if (last && wrong) y += 100;
            if (last && random) y += turn % 2 ? 0.5 : 0;
            if (!(last && unwritten)) store(d, m.d.dtype, at, y);
        }
    }
    return kSuccess;
}

Status cusparseLtSpMMACompressedSize2(const Handle* handle, const Matrix* sparse, size_t* size, size_t* buffer) {
    ENTER("SpMMACompressedSize2", handle);
    const OfMatrix* m = get<OfMatrix>(sparse);
    if (!m || !m->sparse) return refuse();
    *size = sizeof(Head) + static_cast<size_t>(m->rows * m->cols * size_of(m->dtype));
    *buffer = 64;
    return kSuccess;
}

Status cusparseLtSpMMACompress2(const Handle* handle, const Matrix* sparse, int sparse_a, int op, const void* dense, void* compressed,
                                void* buffer, Stream) {
    ENTER("SpMMACompress2", handle);
    const OfMatrix* m = get<OfMatrix>(sparse);
    if (!m || !m->sparse || sparse_a != 1 || !aligned(dense) || !aligned(compressed) || !aligned(buffer)) return refuse();
    const int64_t rows = op == kPlain ? m->rows : m->cols, inner = op == kPlain ? m->cols : m->rows;
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = 0; k < inner; k += 4) {
            int kept = 0;
            for (int64_t e = k; e < k + 4; ++e) kept += load(dense, m->dtype, op == kPlain ? place(*m, i, e) : place(*m, e, i)) != 0;
            if (kept > 2) return refuse();
        }
    }
    const Head head{kMark, m->rows, m->cols, 0};
    std::memcpy(compressed, &head, sizeof head);
    std::memcpy(static_cast<Head*>(compressed) + 1, dense, static_cast<size_t>(m->rows * m->cols * size_of(m->dtype)));
    return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
