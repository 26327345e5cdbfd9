// What the kernels of MaskedAdamW read of a call: tables in device memory, because the number of tensors has no bound.
#pragma once

#include <cstdint>

#include "../core/adamw.h"

namespace nm::cuda {

enum AdamWTensor { kWeight, kFirst, kSecond, kTop, kGradient, kTensors };
enum AdamWStat { kApplied, kChange, kLogChange, kUnchanged, kFlips, kPrunedWeight, kPrunedGrad, kNonZeros, kLargest, kStats };

// One param, int64 words of the table. Its elements are (rows, cols), groups along the columns. `flat` ones lie one after another
// in memory in every tensor of the param, seen as one row; there are a multiple of four, and every address is one of 16.
struct AdamWParam {
    int64_t address[kGradient];  // 0 where there is none; the gradients, new at every step, have a table of their own
    int64_t mask;                // address of the bits of a held mask, rows of (cols + 7) / 8 bytes
    int64_t step;                // address of the step count; 0 where the host counts
    int64_t rows, cols;
    int64_t first, tiles;        // number of its first tile among those of the call
    int64_t dtypes;              // codes of weight and gradient, a byte each
    int64_t walk;                // bit 0: 16-byte accesses fit; bit 1: rows are neighbours in memory
    int64_t index;               // of the param in the call: the table has the flat ones first
    int64_t stride[kTensors][2];  // of rows and columns, in elements

    NM_HD int dtype(AdamWTensor which) const { return int(dtypes >> (which == kWeight ? 0 : 8)) & 255; }
    NM_HD bool aligned() const { return walk & 1; }
    NM_HD bool across() const { return walk & 2; }
};

constexpr int kParamWords = int(sizeof(AdamWParam) / sizeof(int64_t));

// A param's step has its numbers in a slot of 64 bytes.
constexpr int kScalarWords = 16;
static_assert(sizeof(AdamW) <= 4 * kScalarWords);

// What is the same for all params of a call.
struct AdamWOptions {
    const float* scale;  // null if not given
    const float* found;  // likewise; if it is not 0, nothing happens
    bool frozen, eps_inside, maximize, geometric, top;
    bool held, fixed;  // whether params have held masks, and whether weights outside of these stay zero
};

NM_HD bool is_skipped(const float* found) { return found && *found != 0.0f; }

struct AdamWTables {
    const AdamWParam* params;
    const int64_t* gradients;  // addresses, by index
    const int32_t* owners;     // the row of each block's first tile
    const uint32_t* scalars;   // kScalarWords for each row
    double* partials;          // [kStats, blocks]
    int64_t blocks;            // of all launches
};

// The tiles and blocks of one launch, the same kernel for all of them.
struct AdamWPart {
    int64_t first, tiles, first_block, blocks;

    // Block b of the part takes the tiles from here to where block b + 1 begins.
    NM_HD int64_t tile(int64_t b) const { return first + b * (tiles / blocks) + b * (tiles % blocks) / blocks; }
};

}  // namespace nm::cuda
