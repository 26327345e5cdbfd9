// Plans of cuSPARSELt on the library of the tests (cusparselt/fake.cpp): that what is made is taken back, that nothing
// that the library holds an address of is moved, and that threads share nothing but the library.
#include <dlfcn.h>

#include <cmath>
#include <thread>

#include "../cusparselt/context.h"
#include "check.h"

namespace {

using namespace nm::cusparselt;

std::shared_ptr<const Library> library() { return std::make_shared<Library>(NM_FAKE_CUSPARSELT); }

long long fake(const char* what) {
    static void* handle = dlopen(NM_FAKE_CUSPARSELT, RTLD_NOW);
    return reinterpret_cast<long long (*)(const char*)>(dlsym(handle, "get"))(what);
}

constexpr int64_t kRows = 32, kCols = 64, kWidth = 16;

// As the library wants its operands, which Buffer is not.
template <class T>
struct Aligned {
    explicit Aligned(size_t count) : memory(new (std::align_val_t{16}) T[count]()) {}
    ~Aligned() { ::operator delete[](memory, std::align_val_t{16}); }
    Aligned(const Aligned&) = delete;
    T* memory;
};

float multiply(Context& context, int plan, float weight, const void* bias) {
    const Form form{kRows, kCols, kBfloat16, false};
    const auto [size, scratch] = context.compressed_size(form);
    Aligned<nm::bf16> dense(kRows * kCols), x(kWidth * kCols), y(kWidth * kRows);
    Aligned<char> blob(size), buffer(scratch);
    for (int64_t i = 0; i < kRows * kCols; i += 2) dense.memory[i] = nm::from_float<nm::bf16>(weight);
    for (int64_t i = 0; i < kWidth * kCols; ++i) x.memory[i] = nm::from_float<nm::bf16>(1);
    context.compress(form, dense.memory, blob.memory, buffer.memory, nullptr);
    context.run(plan, {blob.memory, x.memory, y.memory, y.memory, bias, nullptr}, 1, 0, nullptr);
    return nm::to_float(y.memory[kWidth * kRows - 1]);
}

Gemm gemm(int algorithm) { return {{kRows, kCols, kBfloat16, false}, kWidth, kBfloat16, true, -1, algorithm, 1, 0}; }

TEST(cusparselt_plans_are_made_used_and_dropped) {
    {
        Context context(library());
        Aligned<nm::bf16> bias(kRows), other(kRows);
        for (int64_t i = 0; i < kRows; ++i) other.memory[i] = nm::from_float<nm::bf16>(8);
        const int first = context.plan(gemm(-1), nullptr), second = context.plan(gemm(1), bias.memory);
        CHECK(first == 0 && second == 1 && context.limit(first) == 4 && context.workspace(first) == 0);
        CHECK(multiply(context, first, 2, nullptr) == 64);
        CHECK(multiply(context, second, 2, bias.memory) == 64);
        CHECK(multiply(context, second, 2, other.memory) == 72);
        context.drop(first);
        bool caught = false;
        try {
            context.workspace(first);
        } catch (const std::out_of_range&) {
            caught = true;
        }
        CHECK(caught) << "a plan that was dropped";
        CHECK(context.plan(gemm(2), nullptr) == first) << "its number is free again";
        CHECK(multiply(context, second, 1, bias.memory) == 32);
    }
    CHECK(fake("live") == 0) << fake("live");
    CHECK(fake("errors") == 0) << fake("errors");
}

TEST(cusparselt_a_plan_that_fails_leaves_nothing) {
    {
        Context context(library());
        const int plan = context.plan(gemm(0), nullptr);
        const long long before = fake("live");
        for (int algorithm : {4, 99}) {
            std::string said;
            try {
                context.plan(gemm(algorithm), nullptr);
            } catch (const Failure& failure) {
                said = failure.what();
            }
            CHECK(said.find("cusparseLtMatmulAlgSetAttribute failed: CUSPARSE_STATUS_INVALID_VALUE (3)") == 0) << said;
        }
        CHECK(fake("live") == before);
        CHECK(multiply(context, plan, 3, nullptr) == 96);
    }
    CHECK(fake("live") == 0);
}

TEST(cusparselt_threads_have_their_own) {
    const auto shared = library();
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Context context(shared);
            for (int round = 0; round < 5; ++round) {
                const int plan = context.plan(gemm(round % 4), nullptr);
                if (multiply(context, plan, float(t + 1), nullptr) != 32 * (t + 1)) ++wrong;
                context.drop(plan);
            }
        });
    }
    for (std::thread& one : threads) one.join();
    CHECK(wrong == 0) << wrong.load();
    CHECK(fake("live") == 0 && fake("errors") == 0);
}

TEST(cusparselt_that_is_no_library) {
    for (const char* path : {"/nowhere/libcusparseLt.so.0", "libm.so.6"}) {
        std::string said;
        try {
            Library library(path);
        } catch (const std::runtime_error& error) {
            said = error.what();
        }
        const bool named = said.find("it cannot be opened") == 0 || said.find("it has no cusparseLtGetProperty, cusparseLtGetErrorName") == 0;
        CHECK(named) << said;
    }
}

}  // namespace
