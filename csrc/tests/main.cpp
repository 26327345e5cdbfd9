// Runs every test, or those whose names contain the first argument; 1 when something failed.
#include <chrono>
#include <cstdio>
#include <random>

#include "check.h"

namespace nm_test {

int failures = 0;

void report_failure(const char* file, int line, const char* condition, const std::string& what) {
    if (++failures <= 50) std::fprintf(stderr, "%s:%d: %s does not hold: %s\n", file, line, condition, what.c_str());
}

namespace {

float draw(std::mt19937_64& random, bool edge_cases) {
    const uint64_t pick = random() % 64;
    const float plain = float(std::normal_distribution<double>()(random));
    if (!edge_cases || pick > 40) return plain;
    constexpr float kInf = __builtin_inff();
    const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, kInf, -kInf, __builtin_nanf(""), -__builtin_nanf("7"), 1e-41f, -1e-41f, 3.4e38f, -65504.0f};
    if (pick < 12) return special[pick];
    return pick < 26 ? 0.0f : (pick & 1 ? 0.5f : -0.5f);
}

}  // namespace

Buffer numbers(int64_t count, int dtype, uint64_t seed, bool edge_cases) {
    std::mt19937_64 random(seed);
    Buffer buffer(count, size_of(dtype));
    nm::by_dtype(dtype, [&](auto tag) {
        using T = decltype(tag);
        for (int64_t i = 0; i < count; ++i) {
            const T x = nm::from_float<T>(draw(random, edge_cases));
            std::memcpy(buffer.as<char>() + size_t(i) * sizeof(T), &x, sizeof(T));
        }
    });
    return buffer;
}

double number(const Buffer& buffer, int dtype, int64_t index) {
    double found = 0.0;
    nm::by_dtype(dtype, [&](auto tag) { found = double(nm::to_float(buffer.as<decltype(tag)>()[index])); });
    return found;
}

bool same_numbers(const Buffer& a, const Buffer& b, int dtype) {
    if (a.bytes() != b.bytes()) return false;
    const size_t size = size_t(size_of(dtype));
    for (size_t i = 0; i < a.bytes() / size; ++i) {
        const double x = number(a, dtype, int64_t(i)), y = number(b, dtype, int64_t(i));
        const bool both_nan = x != x && y != y;
        if (!both_nan && std::memcmp(a.as<char>() + i * size, b.as<char>() + i * size, size) != 0) return false;
    }
    return true;
}

}  // namespace nm_test

int main(int argc, char** argv) {
    const std::string wanted = argc > 1 ? argv[1] : "";
    int ran = 0;
    for (const auto& test : nm_test::tests()) {
        if (test.name.find(wanted) == std::string::npos) continue;
        const auto start = std::chrono::steady_clock::now();
        const int before = nm_test::failures;
        test.run();
        ++ran;
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("%-44s %s %6.1f s\n", test.name.c_str(), nm_test::failures == before ? "ok    " : "FAILED", seconds);
        std::fflush(stdout);
    }
    std::printf("%d tests, %d failures\n", ran, nm_test::failures);
    return nm_test::failures != 0 || ran == 0;
}
