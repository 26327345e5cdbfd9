// The bf16 GEMMs with a compressed operand, from dense tiles that are expanded block by block inside the cache: fprop and
// wgrad (C = A B), dgrad (C = Aᵀ B).
//
// A block of the compressed matrix, some outputs by some of their depth, is expanded into tiles that stay in the second-level
// cache, and is multiplied with all tokens of a task. Its sums stay there too, until the depth is done. With few tokens the
// tiles would wait for the expansion and the expansion for memory: there the next block is expanded between the steps of
// this one's product. With many that takes a little off too; in between the reads, spread over many rows, cost more.
#include <atomic>

#include "bf16.h"
#include "bf16_rows.h"

namespace nm {
namespace {

// Tiles of expanded weights are a line of 64 bytes apart: at a distance of 1 KB the lines of a row would share few sets of the cache.
constexpr int64_t kTileRoom = kTileSide * kTileDepth + kLine;
constexpr int64_t kPair = 2 * kTileSide;  // outputs of a block of sums
constexpr int64_t kFewTokens = 64;

// What one task works on, and in what blocks.
struct TaskSizes {
    int64_t range, tokens;   // outputs and tokens of a task
    int64_t outputs, depth;  // of a block
    bool ahead, few;         // the next block is expanded during the product of this one; few tokens
};

TaskSizes sizes_of_tasks(const Bf16Gemm& gemm, int64_t tokens, bool transposed, int threads) {
    const int64_t least = std::max<int64_t>(1, gemm.outputs * gemm.depth / kChunk);  // tasks that are worth handing out
    if (tokens <= kFewTokens && !transposed) {
        // two passes over the tokens share a block, so that it is better as deep as the cache allows
        const int64_t deepest = caches().second / 4 / (kPair * int64_t(sizeof(bf16))) / kPiece * kPiece;
        const int64_t depth = tokens <= kPair ? kPiece : std::min(round_up(gemm.depth, kPiece), deepest);
        const int64_t tasks = std::min<int64_t>(least, 4 * threads);
        return {round_up(ceil_div(gemm.outputs, tasks), kPair), tokens, kPair, std::max(depth, kPiece), true, true};
    }
    // sums take a quarter of the second-level cache, an expanded block an eighth, or two of them a quarter
    const int64_t most = 256, wide = std::max(caches().second / 4 / most / int64_t(sizeof(float)) / kPair, int64_t(1)) * kPair;
    const int64_t chunks = ceil_div(tokens, wide), tasks = std::min<int64_t>(least, ceil_div(2 * threads, chunks));
    const int64_t outputs = std::min(most, round_up(ceil_div(gemm.outputs, tasks), kPair));
    return {outputs, wide, outputs, kPiece, tokens >= wide, false};
}

// A block: where it begins, its size, and the pieces it is expanded in.
struct TileBlock {
    int64_t output = 0, outputs = 0, depth = 0, steps = 0, pieces_each = 0, pieces = 0;
    bf16* tiles = nullptr;  // [pair of tiles][step][2][kTileRoom]
};

// The tiles of A for C = A B: a tile's rows are rows of A.
struct ByRows {
    static constexpr bool kTransposed = false;
    static constexpr Streamed kStreamed = Streamed::kLeft;

    static void count_pieces(TileBlock& block) {
        block.pieces_each = ceil_div(block.steps * kTileDepth, kPiece);
        block.pieces = round_up(block.outputs, kPair) * block.pieces_each;
    }

    // A row of the block, kPiece columns of it. False: an index is not below m.
    template <class P>
    static bool expand(const StoredBf16& a, P p, const TileBlock& block, int64_t piece) {
        const int64_t row = piece / block.pieces_each, first = piece % block.pieces_each * kPiece, begin = block.depth + first;
        const int64_t end = std::min({begin + kPiece, block.depth + block.steps * kTileDepth, a.cols});
        const int64_t tile = (row / kPair * block.steps + first / kTileDepth) * 2 + row % kPair / kTileSide;
        bf16* to = block.tiles + tile * kTileRoom + row % kTileSide * kLine;
        if (row < block.outputs) {
            return expand_lines(a, p, block.output + row, begin, end, [&](auto, int64_t i, const Line& line) __attribute__((always_inline)) {
                store_line(to + i * 2 * kTileRoom, line);
            });
        }
        for (int64_t i = 0; i * kLine < end - begin; ++i) std::memset(static_cast<void*>(to + i * 2 * kTileRoom), 0, kLine * sizeof(bf16));
        return true;
    }
};

// The tiles of A for C = Aᵀ B: a tile's columns are columns of A, its rows pairs of A's rows.
struct ByColumns {
    static constexpr bool kTransposed = true;
    static constexpr Streamed kStreamed = Streamed::kRight;

    static void count_pieces(TileBlock& block) {
        block.pieces_each = ceil_div(block.outputs, kPiece);
        block.pieces = block.steps * kTileSide * block.pieces_each;
    }

    // Two rows, kPiece columns of them.
    template <class P>
    static bool expand(const StoredBf16& a, P p, const TileBlock& block, int64_t piece) {
        const int64_t pair = piece / block.pieces_each, first = piece % block.pieces_each * kPiece, begin = block.output + first;
        const int64_t end = std::min(begin + kPiece, block.output + block.outputs), row = block.depth + 2 * pair;
        alignas(64) bf16 lines[2][kPiece];
        bool valid = true;
        for (int64_t i = 0; i < 2; ++i) {
            if (row + i < a.rows) {
                valid &= expand_lines(a, p, row + i, begin, end, [&](auto, int64_t j, const Line& line) __attribute__((always_inline)) {
                    store_line(lines[i] + j * kLine, line);
                });
            } else {
                std::memset(static_cast<void*>(lines[i]), 0, sizeof lines[i]);
            }
        }
        for (int64_t j = 0; j * kLine < end - begin; ++j) {
            bf16* to = block.tiles + ((first / kPair + j) * block.steps + pair / kTileSide) * 2 * kTileRoom + pair % kTileSide * kLine;
            store_pairs(to, to + kTileRoom, load_line(lines[0] + j * kLine), load_line(lines[1] + j * kLine));
        }
        return valid;
    }
};

// Outputs [begin, end) of the tiles [first, last) of `tokens` tokens, C's first token being that of tile 0.
template <class By, class P, class Out>
bool multiply(const Bf16Gemm& gemm, const PackedBf16& packed, const TaskSizes& sizes, P p, int64_t begin, int64_t end, int64_t first, int64_t last,
              int64_t tokens, Out* c, bool streamed) {
    static thread_local Scratch block_room, sums_room;
    const int64_t pairs = sizes.outputs / kPair, room = pairs * sizes.depth / kTileDepth * 2 * kTileRoom;
    bf16* tiles = block_room.at_least<bf16>((sizes.ahead ? 2 : 1) * room);
    float* sums = sums_room.at_least<float>(pairs * ceil_div(last - first, 2) * kBlockSums);
    const int64_t depths = std::max<int64_t>(1, ceil_div(gemm.depth, sizes.depth)), blocks = ceil_div(end - begin, sizes.outputs) * depths;
    const auto block_at = [&](int64_t i) {
        TileBlock block;
        if (i >= blocks) return block;
        block.output = begin + i / depths * sizes.outputs;
        block.outputs = std::min(sizes.outputs, end - block.output);
        block.depth = i % depths * sizes.depth;
        block.steps = ceil_div(std::min(sizes.depth, gemm.depth - block.depth), kTileDepth);
        block.tiles = tiles + (sizes.ahead ? i % 2 * room : 0);
        By::count_pieces(block);
        return block;
    };
    BlockProduct product(packed.width, sizes.few ? Streamed::kNeither : By::kStreamed);
    bool valid = true;
    TileBlock next = block_at(0);
    int64_t expanded = 0;
    for (int64_t i = 0; i < blocks; ++i) {
        const TileBlock now = next;
        for (; expanded < now.pieces; ++expanded) valid &= By::expand(gemm.a, p, now, expanded);
        next = block_at(i + 1);
        expanded = 0;
        const bool fresh = now.depth == 0, done = now.depth + sizes.depth >= gemm.depth;
        // pieces of the next block are spread evenly over the steps
        const int64_t steps = ceil_div(last - first, 2) * ceil_div(now.outputs, kPair) * now.steps;
        int64_t step = 0;
        for (int64_t tile = first; tile < last; tile += 2) {
            for (int64_t output = 0; output < now.outputs; output += kPair) {
                float* block = sums + ((tile - first) / 2 * pairs + output / kPair) * kBlockSums;
                const Side weights{now.tiles + output / kPair * now.steps * 2 * kTileRoom, 2 * kTileRoom, kTileRoom};
                const Side inputs = packed.side(tile, now.depth / kTileDepth);
                const char* later = reinterpret_cast<const char*>(block + kBlockSums);
                const auto between = [&] {
                    ++step;
                    if (sizes.ahead) {
                        for (; expanded * steps < step * next.pieces; ++expanded) valid &= By::expand(gemm.a, p, next, expanded);
                    }
                    if (!fresh) {
                        for (int line = 0; line < 4; ++line, later += 64) __builtin_prefetch(later);
                    }
                };
                const bool two = tile + 1 < last;
                if constexpr (By::kTransposed) {
                    if (two) product.template add<2, 2>(inputs, weights, now.steps, block, fresh, between);
                    else product.template add<1, 2>(inputs, weights, now.steps, block, fresh, between);
                } else {
                    if (two) product.template add<2, 2>(weights, inputs, now.steps, block, fresh, between);
                    else product.template add<2, 1>(weights, inputs, now.steps, block, fresh, between);
                }
                if (!done) continue;
                const int64_t token = tile * kTileSide, there = std::min(kPair, tokens - token), o = now.output + output;
                const int64_t outputs = std::min(kPair, end - o);
                Out* to = c + o * gemm.c_row + token * gemm.c_col;
                const bf16* bias = gemm.bias ? gemm.bias + o : nullptr;
                if constexpr (By::kTransposed) deliver(block, there, outputs, to, gemm.c_col, gemm.c_row, bias, streamed);
                else deliver(block, outputs, there, to, gemm.c_row, gemm.c_col, bias, streamed);
            }
        }
    }
    if (streamed) stream_fence();
    return valid;
}

template <class By, class Out, class P>
bool every_token(const Bf16Gemm& gemm, P p, int threads) {
    const int64_t fit = kPackedBytes / int64_t(sizeof(bf16)) / std::max<int64_t>(gemm.depth, 1), chunk = std::max<int64_t>(fit / 512, 1) * 512;
    const bool streamed = gemm.outputs * gemm.tokens * int64_t(sizeof(Out)) >= caches().second;
    std::atomic<bool> valid{true};
    for (int64_t done = 0; gemm.outputs > 0 && done < gemm.tokens; done += chunk) {
        const int64_t tokens = std::min(chunk, gemm.tokens - done);
        const PackedBf16 packed = pack(gemm, done, tokens, !By::kTransposed, threads);
        const TaskSizes sizes = sizes_of_tasks(gemm, tokens, By::kTransposed, threads);
        const int64_t ranges = ceil_div(gemm.outputs, sizes.range), tiles = ceil_div(sizes.tokens, kTileSide);
        parallel_for(ranges * ceil_div(packed.tiles, tiles), threads, [&](int64_t i) {
            const int64_t begin = i % ranges * sizes.range, first = i / ranges * tiles;
            if (!multiply<By>(gemm, packed, sizes, p, begin, std::min(begin + sizes.range, gemm.outputs), first,
                              std::min(first + tiles, packed.tiles), tokens, static_cast<Out*>(gemm.c) + done * gemm.c_col, streamed)) {
                valid = false;
            }
        });
    }
    return valid;
}

}  // namespace

namespace NM_ISA {

bool bf16_spmm(const SpmmCall& call, int n, int m, int threads) {
    const Bf16Gemm gemm(call, n, m, ByRows::kTransposed);
    bool valid = true;
    by_expansion(n, m, [&](auto p) {
#if defined(__AVX512BF16__)
        // one token and few stored values: what is stored is multiplied, with fp32 inputs permuted to it
        if (call.tokens == 1 && (!kExpands<decltype(p)> || 8 * n <= m) && call.b_row == 1 && call.c_row == 1 && !call.unrounded) {
            valid = linear({call.b, call.values, call.indices, call.bias, call.c, call.rows, call.cols}, 1, kBFloat16, n, m, threads);
            return;
        }
        if constexpr (kExpands<decltype(p)>) {
            if (call.tokens >= 1 && call.tokens <= kRowTokens) {
                valid = few_row_products(gemm, p, threads);
                return;
            }
        }
#if !defined(__AMX_BF16__)
        // without tile registers zeros cost as much as weights: what is stored is multiplied, in pairs or in fp32
        if constexpr (!kExpands<decltype(p)>) {
            valid = spmm(call, kBFloat16, n, m, threads);
            return;
        }
        if (bf16_pairs(call, n, m, threads)) return;
#endif
#endif
        valid = call.unrounded ? every_token<ByRows, float>(gemm, p, threads) : every_token<ByRows, bf16>(gemm, p, threads);
    });
    return valid;
}

bool bf16_spmm_transposed(const SpmmCall& call, int n, int m, int threads) {
    const Bf16Gemm gemm(call, n, m, ByColumns::kTransposed);
    bool valid = true;
    by_expansion(n, m, [&](auto p) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
        if (!kExpands<decltype(p)> || (8 * n <= m && call.tokens > kFewTokens)) {
            valid = spmm_transposed(call, kBFloat16, n, m, threads);
            return;
        }
#endif
        valid = every_token<ByColumns, bf16>(gemm, p, threads);
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
