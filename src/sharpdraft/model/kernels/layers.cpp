// What Python calls: a pass through all layers, and its steps one by one.

#include <vector>

#include "attention.h"
#include "linear.h"
#include "pointwise.h"

// Weights of the norms, q_norm and k_norm null for none, and linear layers.
struct Layer {
    const float *attn_norm, *q_norm, *k_norm, *mlp_norm;
    Weight qkv, out, gate_up, down;
};

// All layers of a pass and what goes through them. views: of each layer. gains: of each layer, null
// for none at all. hidden [rows, size]: overwritten by the last layer's output. normed [rows, in of
// the first layer's qkv]: what the first layer projects, null for `hidden` under its norm.
// final_norm [size], final [rows, size]: behind the last layer. tapped: where the output of each
// layer goes, null for nowhere.
struct Run {
    int64_t layer_count;
    const Layer *layers;
    const View *views;
    const Gain *gains;
    int64_t size;
    float *hidden;
    const float *normed, *final_norm;
    float *final;
    float *const *tapped;
};

extern "C" void sharpdraft_layers(const Pass *pass, const Run *run) {
    static thread_local std::vector<float> own_normed, qkv, mixed, delta, gate_up, active;
    const int64_t rows = pass->rows, size = run->size, dim = pass->dim;
    own_normed.resize(rows * size);
    delta.resize(rows * size);
    mixed.resize(rows * pass->heads * dim);
    qkv.resize(rows * (pass->heads + 2 * pass->kv_heads) * dim);
    float *hidden = run->hidden;
    const float *normed = run->normed, *added = nullptr;
    auto tap = [&](int64_t layer) {
        if (run->tapped[layer]) std::copy(hidden, hidden + rows * size, run->tapped[layer]);
    };
    for (int64_t i = 0; i < run->layer_count; i++) {
        const Layer &layer = run->layers[i];
        if (i || !normed) {
            add_norm(hidden, added, layer.attn_norm, pass->eps, rows, size, own_normed.data());
            normed = own_normed.data();
        }
        if (i) tap(i - 1);
        linear(layer.qkv, normed, rows, qkv.data());
        attend(*pass, i, run->views[i], {layer.q_norm, layer.k_norm},
               run->gains ? run->gains[i] : Gain{}, qkv.data(), mixed.data());
        linear(layer.out, mixed.data(), rows, delta.data());
        add_norm(hidden, delta.data(), layer.mlp_norm, pass->eps, rows, size, own_normed.data());
        gate_up.resize(rows * layer.gate_up.outs);
        active.resize(rows * layer.down.in);
        linear(layer.gate_up, own_normed.data(), rows, gate_up.data());
        gated(gate_up.data(), rows, layer.down.in, active.data());
        linear(layer.down, active.data(), rows, delta.data());
        added = delta.data();
    }
    add_norm(hidden, added, run->final_norm, pass->eps, rows, size, run->final);
    tap(run->layer_count - 1);
}

extern "C" void sharpdraft_attend(const Pass *pass, int64_t layer, const View *view,
                                  const float *q_norm, const float *k_norm, const Gain *gain,
                                  float *qkv, float *mixed) {
    attend(*pass, layer, *view, {q_norm, k_norm}, *gain, qkv, mixed);
}

extern "C" void sharpdraft_linear(const Weight *weight, const float *x, int64_t rows, float *out) {
    linear(*weight, x, rows, out);
}

extern "C" void sharpdraft_add_norm(float *hidden, const float *delta, const float *weight,
                                    float eps, int64_t rows, int64_t size, float *normed) {
    add_norm(hidden, delta, weight, eps, rows, size, normed);
}

extern "C" void sharpdraft_gated(const float *gate_up, int64_t rows, int64_t size, float *out) {
    gated(gate_up, rows, size, out);
}
