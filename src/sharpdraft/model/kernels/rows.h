// New rows of a pass: where they stand, and what they see.
#pragma once

#include <algorithm>
#include <cstdint>

// New rows of one request, which lie in its cache one slot behind the other.
struct Request {
    float *keys, *values;  // first layer, first head: [layers, ..., kv_heads, capacity, dim]
    int64_t layer_stride, head_stride;
    int64_t start, count;  // slot of its first new row, and how many there are

    int64_t length() const { return start + count; }
};

// What a row sees: with `causal` no later slot; with a window (0 for none) no slot that is `window`
// away or more, the first `sinks` slots excepted.
struct View {
    int64_t causal, window, sinks;

    int64_t from(int64_t slot) const {
        return window ? std::max<int64_t>(0, slot - window + 1) : 0;
    }
    int64_t to(int64_t slot, int64_t length) const {
        if (causal) return slot + 1;
        return window ? std::min(length, slot + window) : length;
    }
    // Whether every row of a request sees all Keys in the slots from `first` up to `end`.
    bool whole(const Request &request, int64_t first, int64_t end) const {
        return end <= to(request.start, request.length()) && first >= from(request.length() - 1);
    }
    // The end of the sinks that a row sees.
    int64_t sunk(int64_t slot, int64_t length) const {
        return std::min(sinks, causal ? slot + 1 : length);
    }
};

// The slots that one row or another of a request sees: [0, sinks) and [from, to).
struct Seen {
    int64_t sinks, from, to;

    Seen(View view, const Request &request)
        : sinks(view.sinks), from(view.from(request.start)), to(request.length()) {
        if (from <= sinks) sinks = from = 0;
    }
    int64_t keys() const { return sinks + to - from; }
};

// Gains of the rows of a pass, so many floats apart; null for none.
struct Gain {
    const float *values;
    int64_t stride;
};

// The rows of all requests, one behind the other, and the heads of the layers they pass through.
// cosine, sine [rows, dim]: of the rows' positions.
struct Pass {
    int64_t request_count;
    const Request *requests;
    int64_t rows, heads, kv_heads, dim;
    const float *cosine, *sine;
    float eps;
};
