// The search for the best 2:4 mask of a tile against its definition, which tries all 90.
#include <random>
#include <vector>

#include "../core/transposable.h"
#include "check.h"

namespace {

const uint32_t kPairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};

float pair_sum(const float* row, uint32_t pair) {
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) {
        const float a = nm::is_nan(row[j]) ? nm::bits_float(0x7f800000u) : nm::magnitude(row[j]);
        if (pair >> j & 1) sum += a;  // the first term is added to 0 and stays what it is
    }
    return sum;
}

uint32_t best_of_90(const float* w) {
    float best = -1.0f;
    uint32_t found = 0, tried = 0;
    for (int i = 0; i < 6 * 6 * 6 * 6; ++i) {
        const uint32_t p[4] = {kPairs[i / 216], kPairs[i / 36 % 6], kPairs[i / 6 % 6], kPairs[i % 6]};
        bool fits = true;
        for (int j = 0; j < 4; ++j) fits &= (p[0] >> j & 1) + (p[1] >> j & 1) + (p[2] >> j & 1) + (p[3] >> j & 1) == 2;
        if (!fits) continue;
        ++tried;
        const float score = (pair_sum(w, p[0]) + pair_sum(w + 4, p[1])) + (pair_sum(w + 8, p[2]) + pair_sum(w + 12, p[3]));
        if (score > best) {
            best = score;
            found = p[0] | p[1] << 4 | p[2] << 8 | p[3] << 12;
        }
    }
    CHECK(tried == 90);
    return found;
}

// Numbers of a few kinds: which kinds a tile mixes decides how its scores tie.
float number(std::mt19937& random, uint32_t kinds) {
    const auto below = [&](uint32_t n) { return uint32_t(random() % n); };
    uint32_t kind = below(8);
    while (!(kinds >> kind & 1)) kind = below(8);
    const float sign = below(2) ? -1.0f : 1.0f;
    switch (kind) {
        case 0: return sign * float(below(3));                                         // ties, zeros of both signs
        case 1: return sign * (1.0f + float(below(4)) * 5.9604644775390625e-8f * 2);   // differences that sums round away
        case 2: return sign * 16777216.0f * float(below(2));                           // and that swallow ones
        case 3: return nm::bits_float(uint32_t(random()) & 0x800fffffu);               // denormals
        case 4: return nm::bits_float(0x7f7fffffu - below(4));                         // sums that overflow
        case 5: return sign * nm::bits_float(0x7f800000u);
        case 6: return nm::bits_float(uint32_t(random()) | 0x7f800001u);               // NaN of any sign and payload
        default: return nm::bits_float(uint32_t(random()));                            // anything
    }
}

}  // namespace

TEST(the_search_finds_the_first_of_the_best_masks) {
    std::mt19937 random(7);
    for (uint32_t kinds = 1; kinds < 256; ++kinds) {
        for (int i = 0; i < 200; ++i) {
            float w[16];
            for (float& x : w) x = number(random, kinds);
            const uint32_t found = nm::transposable_2_4(w), expected = best_of_90(w);
            CHECK(found == expected) << std::hex << found << ", should be " << expected << ", kinds " << kinds;
        }
    }
}

// Every tile of zeros and ones: all ways in which scores can tie.
TEST(the_search_is_right_for_every_tile_of_zeros_and_ones) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        float w[16];
        for (int i = 0; i < 16; ++i) w[i] = float(bits >> i & 1);
        CHECK(nm::transposable_2_4(w) == best_of_90(w)) << std::hex << bits;
    }
}
