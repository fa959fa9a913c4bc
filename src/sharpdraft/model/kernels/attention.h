// Attention of few rows at the speed at which a CPU reads memory.
//
// Decoding multiplies every cached Key with a handful of Queries, so it could run at the speed of
// memory, and general kernels reach a third of that. Here the Keys of all requests and heads are
// cut into equal parts for the threads, and a part's Keys are read once for all Queries of their
// group. Keys that no row sees are never read.
#pragma once

#include <cmath>
#include <vector>

#include "block.h"
#include "pointwise.h"
#include "rows.h"

namespace {

// The Keys of one head, and those parts of them whose results make up the whole.
struct Group {
    int64_t request, head, first_part, last_part;
};

// Some Keys for the Queries of one group. Its result: of each Query the highest score, then of each
// the sum of exponentials, then of each the mixed Values.
struct Part {
    int64_t request, head, from, to, result;
};

// Weights of the norms of Queries and Keys [dim]; null for none.
struct HeadNorms {
    const float *query, *key;
};

// One layer of a pass. queries: those of a group lie together, [requests][kv_heads][group][count]
// [dim]. first_row: of each request.
struct Attention {
    const Pass &pass;
    int64_t layer;
    View view;
    std::vector<Part> &parts;
    std::vector<Group> &groups;
    std::vector<int64_t> &first_row;
    std::vector<float> &queries, &results;

    int64_t group() const { return pass.heads / pass.kv_heads; }
};

// Cut what the rows see into parts. Returns how many Keys that are, of all heads.
int64_t plan(Attention &own) {
    const Pass &pass = own.pass;
    const Request *requests = pass.requests;
    int64_t keys = 0, rows = 0, place = 0;
    own.first_row.clear();
    for (int64_t i = 0; i < pass.request_count; i++) {
        own.first_row.push_back(rows);
        rows += requests[i].count;
        keys += Seen(own.view, requests[i]).keys() * pass.kv_heads;
    }
    // Several parts a thread, so that none waits long for the last; each a whole number of blocks.
    const int64_t even = (keys / (8 * threads()) + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t size = std::max<int64_t>(2 * BLOCK, even);
    own.parts.clear();
    own.groups.clear();
    for (int64_t i = 0; i < pass.request_count; i++) {
        const Seen seen(own.view, requests[i]);
        for (int64_t head = 0; head < pass.kv_heads; head++) {
            const int64_t first = static_cast<int64_t>(own.parts.size());
            auto cut = [&](int64_t from, int64_t to) {
                for (; from < to; from += size) {
                    own.parts.push_back({i, head, from, std::min(to, from + size), place});
                    place += own.group() * requests[i].count * (pass.dim + 2);
                }
            };
            cut(0, seen.sinks);
            cut(seen.from, seen.to);
            own.groups.push_back({i, head, first, static_cast<int64_t>(own.parts.size())});
        }
    }
    own.queries.resize(rows * pass.heads * pass.dim);
    own.results.resize(place);
    return keys;
}

// Norm, scale and rotate the Queries and Keys of one row, and write its Key and Value into the
// cache.
void prepare(const Attention &own, HeadNorms norms, Gain gain, int64_t row, float *qkv) {
    const Pass &pass = own.pass;
    const int64_t dim = pass.dim, heads = pass.heads, kv_heads = pass.kv_heads;
    const int64_t *first = own.first_row.data(), group = own.group();
    const int64_t i = std::upper_bound(first, first + pass.request_count, row) - first - 1;
    const Request &request = pass.requests[i];
    const int64_t line = row - first[i];
    const int64_t at = own.layer * request.layer_stride + (request.start + line) * dim;
    const float *cosine = pass.cosine + row * dim, *sine = pass.sine + row * dim;
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    for (int64_t head = 0; head < heads + 2 * kv_heads; head++) {
        float *x = qkv + (row * (heads + 2 * kv_heads) + head) * dim;
        if (head < heads) {
            if (norms.query) norm(x, norms.query, pass.eps, dim, x);
            if (gain.values) {
                Vec more = all(gain.values[row * gain.stride]);
                for (int64_t d = 0; d < dim; d += W) store(x + d, load(x + d) + more * load(x + d));
            }
            const int64_t to =
                first[i] * heads + (head / group * group + head % group) * request.count + line;
            rotate(x, cosine, sine, own.queries.data() + to * dim, dim, scale);
        } else if (head < heads + kv_heads) {
            if (norms.key) norm(x, norms.key, pass.eps, dim, x);
            float *key = request.keys + at + (head - heads) * request.head_stride;
            rotate(x, cosine, sine, key, dim, 1);
        } else {
            float *value = request.values + at + (head - heads - kv_heads) * request.head_stride;
            std::copy(x, x + dim, value);
        }
    }
}

// Let the Queries of a part attend to its Keys.
void attend_part(const Attention &own, const Part &part, std::vector<float> &turned) {
    const Request &request = own.pass.requests[part.request];
    const int64_t dim = own.pass.dim, rows = own.group() * request.count;
    const int64_t offset = own.layer * request.layer_stride + part.head * request.head_stride;
    const int64_t query = own.first_row[part.request] * own.pass.heads + part.head * rows;
    const float *queries = own.queries.data() + query * dim;
    float *top = own.results.data() + part.result, *total = top + rows, *out = total + rows;
    turned.resize(dim * BLOCK);
    std::fill(top, top + rows, HIDDEN);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * dim, 0.0f);
    for (int64_t first = part.from; first < part.to; first += BLOCK) {
        const int64_t keys = std::min<int64_t>(BLOCK, part.to - first);
        const float *key = request.keys + offset + first * dim;
        const float *value = request.values + offset + first * dim;
        for (int k = 0; k < BLOCK; k += W)
            for (int64_t d = 0; d < dim; d += W)
                transpose(key + k * dim + d, keys - k, dim, turned.data() + d * BLOCK + k, BLOCK);
        const bool whole = keys == BLOCK && own.view.whole(request, first, first + BLOCK);
        const Block block{request, own.view, dim, first, keys, whole, turned.data(), value};
        // The next block is fetched bit by bit while the tiles of this one are worked on: all at
        // once would only queue.
        const bool more = first + 2 * BLOCK <= part.to;
        const int64_t tiles = (rows + TILE - 1) / TILE;
        const int64_t lines = more ? (BLOCK / LINE + tiles - 1) / tiles : 0;
        Ahead ahead{key + BLOCK * dim, value + BLOCK * dim, lines};
        for (int64_t row = 0; row < rows;) {
            const int64_t take = std::min<int64_t>(rows - row, TILE);
            const Tile tile{row, queries + row * dim, top + row, total + row, out + row * dim};
            with_constant<TILE>(take, [&](auto q) { attend_block<q.value>(block, tile, ahead); });
            ahead.keys += lines * dim * LINE;
            ahead.values += lines * dim * LINE;
            row += take;
        }
    }
}

// Put the parts of a group together; every one weighs as much as its softmax would have had in the
// whole.
void merge(const Attention &own, const Group &whole, float *mixed) {
    const int64_t dim = own.pass.dim, count = own.pass.requests[whole.request].count;
    const int64_t rows = own.group() * count;
    const Part *first = own.parts.data() + whole.first_part;
    const Part *last = own.parts.data() + whole.last_part;
    for (int64_t q = 0; q < rows; q++) {
        float top = HIDDEN, total = 0;
        for (const Part *part = first; part < last; part++)
            top = std::max(top, own.results[part->result + q]);
        const int64_t row = own.first_row[whole.request] + q % count;
        float *out = mixed + (row * own.pass.heads + whole.head * own.group() + q / count) * dim;
        std::fill(out, out + dim, 0.0f);
        for (const Part *part = first; part < last; part++) {
            const float *result = own.results.data() + part->result;
            const float weight = std::exp(result[q] - top);
            total += weight * result[rows + q];
            const float *values = result + 2 * rows + q * dim;
            for (int64_t d = 0; d < dim; d += W)
                store(out + d, load(out + d) + load(values + d) * weight);
        }
        for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) / total);
    }
}

// Norm, scale and rotate the Queries and Keys of new rows, write their Keys and Values into the
// caches, and attend. qkv [rows, heads + 2 kv_heads, dim] is overwritten; mixed [rows, heads, dim].
void attend(const Pass &pass, int64_t layer, View view, HeadNorms norms, Gain gain, float *qkv,
            float *mixed) {
    static thread_local std::vector<float> queries, results;
    static thread_local std::vector<Part> parts;
    static thread_local std::vector<Group> groups;
    static thread_local std::vector<int64_t> first_row;
    Attention own{pass, layer, view, parts, groups, first_row, queries, results};
    const int64_t work = plan(own) * own.group() * pass.dim;
    const int64_t part_count = static_cast<int64_t>(own.parts.size());
    const int64_t group_count = static_cast<int64_t>(own.groups.size());
    // Waking threads takes longer than little work does.
#pragma omp parallel if (work > 1 << 17)
    {
        std::vector<float> turned;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < pass.rows; row++) prepare(own, norms, gain, row, qkv);
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < part_count; p++) attend_part(own, own.parts[p], turned);
#pragma omp for schedule(static)
        for (int64_t g = 0; g < group_count; g++) merge(own, own.groups[g], mixed);
    }
}

}  // namespace
