// The tile registers of AMX: eight, of up to 16 rows of 64 bytes. Code that is compiled for AMX uses the instructions; any
// other does the same in plain C++, so that the kernels on top run, and are tested, on every machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../../core/types.h"

namespace nm {
namespace {

// Registers 0 to 3 hold sums, 16 rows of `width` fp32 numbers; 4 and 5 the left operand, 16 rows of 32 bf16 numbers; 6 and 7
// the right operand, 16 rows of `width` pairs of bf16 numbers: row p holds what pair p of a row on the left is multiplied with.
// They are the thread's while the object lives. Strides are in bytes.
class TileRegisters {
#if defined(__AMX_BF16__)
  public:
    explicit TileRegisters(int width) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; ++i) {
            shape.row_bytes[i] = uint16_t(i == 4 || i == 5 ? 64 : 4 * width);
            shape.rows[i] = 16;
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters&) = delete;

    template <int I>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(I));
    }
    template <int I>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
    }
    // Of what is used once: it takes no place in the first-level cache from what is used again.
    template <int I>
    void stream_load(const void* from, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
    }
    template <int I>
    void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
    }
    // sums += left times right; numbers below 2^-126 count as zero
    template <int Sums, int Left, int Right>
    void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
    }
    // The same of signed bytes, four in place of a pair, and sums in int32.
    template <int Sums, int Left, int Right>
    void dot_bytes() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
    }
#else
  public:
    explicit TileRegisters(int width) : width_(width) {}
    TileRegisters(const TileRegisters&) = delete;

    template <int I>
    void zero() {
        std::memset(register_[I], 0, sizeof register_[I]);
    }
    template <int I>
    void load(const void* from, int64_t stride) {
        for (int row = 0; row < 16; ++row) std::memcpy(register_[I][row], static_cast<const char*>(from) + row * stride, row_bytes(I));
    }
    template <int I>
    void stream_load(const void* from, int64_t stride) {
        load<I>(from, stride);
    }
    template <int I>
    void store(void* to, int64_t stride) {
        for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, register_[I][row], row_bytes(I));
    }
    template <int Sums, int Left, int Right>
    void dot() {
        for (int pair = 0; pair < 16; ++pair) {
            float low[16], high[16];
            for (int t = 0; t < 16; ++t) split(register_[Right][pair][t], low[t], high[t]);
            for (int row = 0; row < 16; ++row) {
                float sums[16], first, second;
                split(register_[Left][row][pair], first, second);
                std::memcpy(sums, register_[Sums][row], sizeof sums);
                for (int t = 0; t < 16; ++t) sums[t] += first * low[t] + second * high[t];
                std::memcpy(register_[Sums][row], sums, sizeof sums);
            }
        }
    }

    template <int Sums, int Left, int Right>
    void dot_bytes() {
        for (int row = 0; row < 16; ++row) {
            for (int t = 0; t < width_; ++t) {
                for (int k = 0; k < 64; ++k) {
                    const auto left = int8_t(register_[Left][row][k / 4] >> k % 4 * 8), right = int8_t(register_[Right][k / 4][t] >> k % 4 * 8);
                    register_[Sums][row][t] += uint32_t(left * right);
                }
            }
        }
    }

  private:
    static void split(uint32_t pair, float& low, float& high) {
        low = bits_float(pair << 16);
        high = bits_float(pair & 0xffff0000u);
    }
    size_t row_bytes(int i) const { return i == 4 || i == 5 ? 64 : size_t(4 * width_); }

    int width_;
    uint32_t register_[8][16][16] = {};
#endif
};

}  // namespace
}  // namespace nm
