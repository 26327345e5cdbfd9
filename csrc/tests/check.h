// A test is TEST(name) { ... CHECK(condition) << "said when it fails"; }; main.cpp runs them all.
//
// These tests run under sanitizers (make sanitize), so every buffer ends exactly where its tensor ends, starts where
// only an element's alignment holds, and every instruction set is compared with the portable one. What is right is
// settled by python_tests, against the reference.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../cpu/isa.h"

namespace nm_test {

struct Test {
    std::string name;
    std::function<void()> run;
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Registered {
    Registered(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                                \
    static void name();                                           \
    static const nm_test::Registered registered_##name(#name, name); \
    static void name()

// Counts what failed and says where.
void report_failure(const char* file, int line, const char* condition, const std::string& what);

class Failure {
  public:
    Failure(bool holds, const char* file, int line, const char* condition) : holds_(holds), file_(file), line_(line), condition_(condition) {}
    ~Failure() {
        if (!holds_) report_failure(file_, line_, condition_, text_.str());
    }
    template <class X>
    Failure& operator<<(const X& x) {
        if (!holds_) text_ << x;
        return *this;
    }

  private:
    bool holds_;
    const char* file_;
    int line_;
    const char* condition_;
    std::ostringstream text_;
};

#define CHECK(condition) nm_test::Failure((condition), __FILE__, __LINE__, #condition)

// `count` elements of `size` bytes, the first at an odd multiple of `size` past an allocation's start, or `offset` bytes.
class Buffer {
  public:
    Buffer(int64_t count, int size) : Buffer(count, size, size) {}
    Buffer(int64_t count, int size, int offset) : bytes_(size_t(count) * size_t(size)), offset_(size_t(offset)), memory_(new char[bytes_ + offset_]) {
        std::memset(memory_.get(), 0x5a, bytes_ + offset_);
    }
    void* data() const { return memory_.get() + offset_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data());
    }
    size_t bytes() const { return bytes_; }
    bool operator==(const Buffer& other) const { return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0; }

  private:
    size_t bytes_, offset_;
    std::unique_ptr<char[]> memory_;
};

inline int size_of(int dtype) { return dtype == nm::kFloat32 ? 4 : 2; }

constexpr int kDtypes[] = {nm::kFloat32, nm::kBFloat16, nm::kFloat16};

// Random numbers with zeros of both signs, ties, denormals, infinities and NaNs among them when `edge_cases`.
Buffer numbers(int64_t count, int dtype, uint64_t seed, bool edge_cases);

double number(const Buffer& buffer, int dtype, int64_t index);

// The same bits, any NaN for any NaN.
bool same_numbers(const Buffer& a, const Buffer& b, int dtype);

struct Size {
    int64_t rows, groups;
};

// Few and odd, around every width that kernels work in.
inline std::vector<Size> sizes() { return {{1, 1}, {3, 1}, {17, 1}, {1, 5}, {3, 16}, {17, 17}, {2, 33}, {1, 1031}}; }

struct NM {
    int n, m;
};

inline std::vector<NM> patterns() {
    return {{2, 4}, {1, 4}, {2, 8}, {1, 8}, {4, 8}, {1, 16}, {1, 32}, {4, 16}, {1, 1}, {4, 4}, {1, 2}, {3, 5}, {7, 12}, {5, 48}, {3, 64}, {100, 256}};
}

inline std::string label(NM p, int dtype, const std::string& isa) {
    const char* names[] = {"float32", "bfloat16", "float16"};
    return std::to_string(p.n) + ":" + std::to_string(p.m) + " " + names[dtype] + " " + isa;
}

// f(name) with each instruction set of this processor in use.
template <class F>
void each_isa(const F& f) {
    const std::string before = nm::isa();
    for (const std::string& name : nm::isas()) {
        nm::use_isa(name);
        f(name);
    }
    nm::use_isa(before);
}

// f(pattern, dtype, size, edge_cases)
template <class F>
void each_case(const F& f) {
    for (NM p : patterns()) {
        for (int dtype : kDtypes) {
            for (Size size : sizes()) {
                if (size.groups * p.m > 70000) continue;
                for (bool edge_cases : {false, true}) f(p, dtype, size, edge_cases);
            }
        }
    }
}

}  // namespace nm_test
