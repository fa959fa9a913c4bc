// The small steps between products: norms, rotation, sums, activations.
#pragma once

#include <cmath>

#include "vectors.h"

namespace {

// One over the root mean square of `size` values.
inline float inverse_rms(const float *x, int64_t size, float eps) {
    Vec squares{};
    float rest = 0;
    int64_t i = 0;
    for (; i + W <= size; i += W) squares += load(x + i) * load(x + i);
    for (; i < size; i++) rest += x[i] * x[i];
    return 1 / std::sqrt((sum(squares) + rest) / size + eps);
}

void norm(const float *x, const float *weight, float eps, int64_t size, float *out) {
    float scale = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// x turned to its position; the first half of `sine` carries its sign.
void rotate(const float *x, const float *cosine, const float *sine, float *out, int64_t dim,
            float scale) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = (x[i] * cosine[i] + x[i + half] * sine[i]) * scale;
        out[i + half] = (x[i + half] * cosine[i + half] + x[i] * sine[i + half]) * scale;
    }
}

// hidden += delta (null for none), and normed = its root mean square norm; all [rows, size].
void add_norm(float *hidden, const float *delta, const float *weight, float eps, int64_t rows,
              int64_t size, float *normed) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t row = 0; row < rows; row++) {
        float *own = hidden + row * size;
        const float *added = delta ? delta + row * size : nullptr;
        for (int64_t i = 0; added && i < size; i++) own[i] += added[i];
        norm(own, weight, eps, size, normed + row * size);
    }
}

// silu(gate) * up for gate_up [rows, 2 size], gates first -> out [rows, size].
void gated(const float *gate_up, int64_t rows, int64_t size, float *out) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + 2 * row * size, *up = gate + size;
        float *own = out + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            Vec x = load(gate + i), small = exponential(x > 0 ? -x : x);
            store(own + i, x * (x > 0 ? 1 / (1 + small) : small / (1 + small)) * load(up + i));
        }
        for (; i < size; i++) own[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    }
}

}  // namespace
