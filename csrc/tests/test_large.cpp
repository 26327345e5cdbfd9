// More than 2^31 elements, in the memory of huge.h.
#if !defined(__SANITIZE_THREAD__)  // hours, and nothing about threads
#include "huge.h"

using namespace nm_test;

namespace {

// The result on the first and on the last mapped tile equals that of the tile alone.
TEST(two_billion_elements) {
    const Huge w(2 * kElements), out(2 * kElements);
    CHECK(w.ok() && out.ok()) << "no room for the mappings";
    if (!w.ok() || !out.ok()) return;
    fill(w.data(), 1);
    fill(w.last(), 2);
    Buffer alone(kTile / 2, 2);
    each_isa([&](const std::string& isa) {
        if (isa == "portable") return;  // the same indices in the same types, at a fifth of the speed
        std::memset(out.data(), 0, size_t(kTile));
        std::memset(out.last(), 0, size_t(kTile));
        nm::kernels().prune(w.data(), nm::kBFloat16, kElements, 2, 4, out.data(), 2);
        for (const auto& [from, to] : {std::pair<char*, char*>{w.data(), out.data()}, {w.last(), out.last()}}) {
            nm::kernels().prune(from, nm::kBFloat16, kTile / 2, 2, 4, alone.data(), 1);
            CHECK(std::memcmp(to, alone.data(), size_t(kTile)) == 0) << isa << (to == out.data() ? " at the start" : " at the end");
        }
    });
}

TEST(two_billion_elements_compressed) {
    const int64_t cols = 1 << 20, rows = kElements / cols;
    const Huge w(2 * kElements), values(kElements), indices(kElements / 8 * 1);
    CHECK(w.ok() && values.ok() && indices.ok()) << "no room for the mappings";
    if (!w.ok() || !values.ok() || !indices.ok()) return;
    fill(w.data(), 3);
    fill(w.last(), 4);
    each_isa([&](const std::string& isa) {
        if (isa == "portable") return;
        Buffer few(cols / 2, 2), packed(cols / 8, 1);
        CHECK(nm::kernels().compress(w.data(), nm::kBFloat16, rows, cols, 2, 4, nullptr, values.data(), reinterpret_cast<uint8_t*>(indices.data()), 2));
        nm::kernels().compress(w.data() + (rows - 1) * cols * 2, nm::kBFloat16, 1, cols, 2, 4, nullptr, few.data(), packed.as<uint8_t>(), 1);
        CHECK(std::memcmp(values.data() + (rows - 1) * cols, few.data(), few.bytes()) == 0) << isa;
        CHECK(nm::kernels().decompress(values.data(), reinterpret_cast<uint8_t*>(indices.data()), nm::kBFloat16, rows, cols, 2, 4, w.data(), 2)) << isa;
    });
}

}  // namespace
#endif
