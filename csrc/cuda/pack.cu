// Chooses the kernels for a call of pack.
#include "launch.h"
#include "pack.h"

namespace nm::cuda {

namespace {

void pack_along_rows(Pack call, const Queue& queue) {
    if (call.cols / call.m * call.n * index_bits(call.m) % 8 == 0) {  // rows end on whole bytes: treat as one long row
        call.cols *= call.rows;
        call.rows = 1;
    }
    const int64_t done = call.rows == 1 ? pack_rows(call, queue) : 0;
    if (done < call.rows * call.cols) pack_any(call, done, queue);
}

}  // namespace

bool pack(const Pack& call, const Queue& queue) {
    check_pattern(call.n, call.m);
    if (call.rows == 0 || call.cols == 0) return true;
    const bool streamed = !call.by_column.values && call.layout == kCanonical && call.select != kTransposable && !call.dense;
    if (!streamed && pack_tiles(call, queue)) return true;
    if (call.layout != kCanonical || call.select == kTransposable || call.dense) return false;
    Pack one = call;
    one.by_column = {};
    if (call.by_row.values) pack_along_rows(one, queue);
    one.by_column = call.by_column;
    one.by_row = {};
    // a tile kernel that cannot do both may do one of them
    if (call.by_column.values && !(call.by_row.values && pack_tiles(one, queue))) pack_any(one, 0, queue);
    return true;
}

}  // namespace nm::cuda
