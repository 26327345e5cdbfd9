// MaskedAdamW that also writes the forms of W~ which the next step's GEMMs read, of weights that are 2:4.
#pragma once

#include "adamw_table.h"
#include "kernels.h"

namespace nm::cuda {

// The forms of one weight, in bf16; what is not wanted is null. In pack_forms indices may be null that are those of the held mask already.
struct AdamWForms {
    Packed by_row, by_column;
    void* dense;
    const float* scale;  // for the threshold
};

constexpr int kFormWords = int(sizeof(AdamWForms) / sizeof(int64_t));

// Of all weights of a call: kMagnitude, kThreshold or, of the held masks, kGiven; rows with columns, with the dense form or alone.
struct AdamWPack {
    const AdamWForms* forms;  // by the index of a param
    int select, layout, gradient;  // and the dtype of all gradients, fp32 or bf16, where there are some
    bool columns, dense;
};

constexpr int kPackTile = 64;  // rows and columns of a tile

// masked_adamw, in three launches, that also writes forms. Params are fp32, contiguous and not flat, rows and cols multiples of 64,
// every address one of 16; a tile has 64 x 64 of them. n:m is 2:4, or held masks are.
void masked_adamw_pack(const AdamWArguments& arguments, const AdamWPart& part, const AdamWOptions& options, const AdamWPack& pack,
                       const Queue& queue);

// Its main launch.
void adamw_pack_step(const AdamWTables& tables, const AdamWPart& part, const AdamWOptions& options, const AdamWPack& pack, const Queue& queue);

// Makes the forms of all weights of a table, the params of such a step, in one launch; `owners` as adamw_owners gives them.
void pack_forms(const int64_t* table, const int32_t* owners, int64_t tiles, const AdamWPack& pack, const Queue& queue);

// Of a weight that is contiguous, fp32, of rows and cols that are multiples of 64.
struct FormsCall {
    const float* w;
    const uint8_t* bits;  // of the held mask
    AdamWForms forms;
    int64_t rows, cols;
    int select, layout;
};

// Compares row `strip` of each tile with the packed rows, and where one differs sets *changed to `mark` and makes all forms again.
void renew_changed_forms(const FormsCall& call, int strip, int* changed, int mark, const Queue& queue);

}  // namespace nm::cuda
