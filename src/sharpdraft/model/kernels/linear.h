// Products of few rows with a weight, at the speed at which a CPU reads memory.
#pragma once

#include <cstddef>

#include "vectors.h"

// A linear layer: weight [outs, in], float32 or, where `narrow`, bfloat16, laid out as [panels, in,
// PANEL], so that a product reads memory from one end to the other; the last panel is filled up
// with zeros. bias [outs] or null. PANEL is the build's.
struct Weight {
    const void *panels;
    const float *bias;
    int64_t narrow, in, outs;
};

namespace {

constexpr int COLUMNS = PANEL / W;
constexpr int ROWS_AT_ONCE = ACCUMULATORS / COLUMNS;
constexpr int AHEAD = 16384;    // bytes that are fetched ahead
constexpr int64_t CHUNK = 512;  // inputs that are summed up by themselves, or digits would be lost

// ROWS rows of x [ROWS, in] by a panel, of which `count` outputs are real.
template <int ROWS, typename T>
void product(const float *x, const T *panel, int64_t in, const float *bias, int64_t count,
             float *out, int64_t outs) {
    alignas(64) float whole[ROWS][PANEL] = {};
    for (int64_t from = 0; from < in; from += CHUNK) {
        Vec acc[ROWS][COLUMNS];
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int c = 0; c < COLUMNS; c++) acc[r][c] = Vec{};
        for (int64_t i = from; i < std::min(in, from + CHUNK); i++, panel += PANEL) {
            const char *next = reinterpret_cast<const char *>(panel) + AHEAD;
            for (size_t at = 0; at < PANEL * sizeof(T); at += LINE * sizeof(float))
                __builtin_prefetch(next + at);
            Vec each[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) each[c] = load(panel + c * W);
            UNROLL for (int r = 0; r < ROWS; r++) {
                Vec own = all(x[r * in + i]);
                UNROLL for (int c = 0; c < COLUMNS; c++) acc[r][c] += own * each[c];
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int c = 0; c < COLUMNS; c++)
                store(whole[r] + c * W, load(whole[r] + c * W) + acc[r][c]);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        for (int64_t o = 0; o < count; o++)
            out[r * outs + o] = whole[r][o] + (bias ? bias[o] : 0.0f);
}

template <typename T>
void products(const Weight &weight, const float *x, int64_t rows, float *out) {
    const int64_t in = weight.in, outs = weight.outs;
    const int64_t tiles = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t panels = (outs + PANEL - 1) / PANEL;
    // A panel is read once for all tiles, unless there are too few panels and enough tiles for all
    // threads.
    const int64_t groups = std::max<int64_t>(1, std::min(4 * threads() / panels, tiles));
#pragma omp parallel for schedule(static) if (in * outs > 1 << 16)
    for (int64_t unit = 0; unit < panels * groups; unit++) {
        int64_t o = unit / groups * PANEL, group = unit % groups;
        const T *panel = static_cast<const T *>(weight.panels) + o * in;
        const float *bias = weight.bias ? weight.bias + o : nullptr;
        const int64_t count = std::min<int64_t>(PANEL, outs - o);
        for (int64_t tile = tiles * group / groups; tile < tiles * (group + 1) / groups; tile++) {
            int64_t row = rows * tile / tiles, take = rows * (tile + 1) / tiles - row;
            with_constant<ROWS_AT_ONCE>(take, [&](auto r) {
                product<r.value>(x + row * in, panel, in, bias, count, out + row * outs + o, outs);
            });
        }
    }
}

// x [rows, in] -> out [rows, outs], in float32.
void linear(const Weight &weight, const float *x, int64_t rows, float *out) {
    if (weight.narrow) products<uint16_t>(weight, x, rows, out);
    else products<float>(weight, x, rows, out);
}

}  // namespace
