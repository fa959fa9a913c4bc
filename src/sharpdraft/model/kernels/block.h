// Attention of a few Queries to a block of Keys.
#pragma once

#include "rows.h"
#include "vectors.h"

namespace {

// Keys that stay in the first-level cache while all Queries pass.
constexpr int BLOCK = 64;
// Queries at once.
constexpr int TILE = ACCUMULATORS / 4;
// A hidden Key's score: finite, so that a part without a visible one is no NaN.
constexpr float HIDDEN = -1e30f;

// What to fetch while a tile is worked on: lines of Keys and of Values for each step.
struct Ahead {
    const float *keys, *values;
    int64_t lines;
};

// Keys of a request from slot `first` on, at most BLOCK of them. whole: there are BLOCK, and every
// row sees them all. turned: Keys [dim, BLOCK], zeros behind the last; values [keys, dim].
struct Block {
    const Request &request;
    View view;
    int64_t dim, first, keys;
    bool whole;
    const float *turned, *values;
};

// Queries [.., dim] of a group from its row `row` on, and their results so far: the highest score
// and the sum of exponentials of each, and the mixed Values [.., dim].
struct Tile {
    int64_t row;
    const float *query;
    float *top, *total, *out;
};

// out [Q, columns] = first * out + left [Q, steps] right [steps, columns], rows of each so many
// floats apart; first: a factor for each row, null for zero. FETCH: whether to fetch ahead on the
// way.
template <int Q, int COLUMNS, bool FETCH>
inline void multiply(const float *left, int64_t left_stride, const float *right,
                     int64_t right_stride, int64_t steps, int64_t columns, const float *first,
                     Ahead ahead, float *out) {
    for (int64_t column = 0; column < columns; column += COLUMNS * W) {
        Vec acc[Q][COLUMNS];
        UNROLL for (int q = 0; q < Q; q++)
            UNROLL for (int c = 0; c < COLUMNS; c++)
                acc[q][c] =
                    first ? load(out + q * right_stride + column + c * W) * first[q] : Vec{};
        for (int64_t step = 0; step < steps; step++) {
            for (int64_t line = step * ahead.lines;
                 FETCH && column == 0 && line < (step + 1) * ahead.lines; line++) {
                __builtin_prefetch(ahead.keys + line * LINE);
                __builtin_prefetch(ahead.values + line * LINE);
            }
            Vec each[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++)
                each[c] = load(right + step * right_stride + column + c * W);
            UNROLL for (int q = 0; q < Q; q++) {
                Vec own = all(left[q * left_stride + step]);
                UNROLL for (int c = 0; c < COLUMNS; c++) acc[q][c] += own * each[c];
            }
        }
        UNROLL for (int q = 0; q < Q; q++)
            UNROLL for (int c = 0; c < COLUMNS; c++)
                store(out + q * right_stride + column + c * W, acc[q][c]);
    }
}

// Hide those scores [BLOCK] that a row of the group does not see. Inlined, its loops would double
// the code of every tile.
__attribute__((noinline)) void hide(const Block &block, int64_t row, float *score) {
    const View view = block.view;
    const int64_t length = block.request.length();
    const int64_t slot = block.request.start + row % block.request.count;
    auto within = [&](int64_t at) { return std::clamp<int64_t>(at - block.first, 0, block.keys); };
    const int64_t sunk = within(view.sunk(slot, length));
    const int64_t from = std::max(sunk, within(view.from(slot)));
    const int64_t to = std::max(from, within(view.to(slot, length)));
    std::fill(score + sunk, score + from, HIDDEN);
    std::fill(score + to, score + BLOCK, HIDDEN);
}

// Let Q Queries attend to a block.
template <int Q> void attend_block(const Block &block, const Tile &tile, Ahead ahead) {
    alignas(64) float score[Q * BLOCK], shrink[W] = {};
    const int64_t dim = block.dim;
    multiply<Q, ACCUMULATORS / TILE, true>(tile.query, dim, block.turned, BLOCK, dim, BLOCK,
                                           nullptr, ahead, score);
    for (int q = 0; q < Q; q++) {
        float *own = score + q * BLOCK;
        if (!block.whole) hide(block, tile.row + q, own);
        Vec high = load(own);
        for (int i = W; i < BLOCK; i += W) high = larger(high, load(own + i));
        float now = std::max(tile.top[q], highest(high));
        shrink[q] = tile.top[q] - now;
        tile.top[q] = now;
    }
    store(shrink, exponential(load(shrink)));
    for (int q = 0; q < Q; q++) {
        float *own = score + q * BLOCK;
        Vec sums{};
        for (int i = 0; i < BLOCK; i += W) {
            Vec weight = exponential(load(own + i) - tile.top[q]);
            store(own + i, weight);
            sums += weight;
        }
        // A part that has seen hidden Keys alone counts for nothing, here and where the parts are
        // put together.
        tile.total[q] = tile.total[q] * shrink[q] + (tile.top[q] == HIDDEN ? 0.0f : sum(sums));
    }
    const int64_t vectors = dim / W;
    auto mix = [&](auto width) {
        multiply<Q, width.value, false>(score, BLOCK, block.values, dim, block.keys, dim, shrink,
                                        {}, tile.out);
    };
    if (vectors % 4 == 0) mix(std::integral_constant<int, 4>());
    else if (vectors % 3 == 0) mix(std::integral_constant<int, 3>());
    else if (vectors % 2 == 0) mix(std::integral_constant<int, 2>());
    else mix(std::integral_constant<int, 1>());
}

}  // namespace
