// Attention, products and the small steps around them, for few rows at the speed at which a CPU reads memory.
//
// Decoding multiplies every cached Key with a handful of Queries, so it could run at the speed of memory, and general
// kernels reach a third of that. Here the Keys of all requests and heads are cut into equal parts for the threads, and
// a part's Keys are read once for all Queries of their group. Vectors are GCC's and clang's own, so that one source
// serves every instruction set; it is compiled for the machine at hand.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// LANES is 16 or 8 floats; a head is a whole number of them.
constexpr int W = LANES;
#if LANES == 16
constexpr int ACCUMULATORS = 24;
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
constexpr int ACCUMULATORS = 12;
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#define UNROLL _Pragma("GCC unroll 64")

typedef float Vec __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t Int __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(W * 2), aligned(2)));

constexpr int BLOCK = 64;                // Keys that stay in the first-level cache while all Queries pass
constexpr int LINE = 16;                 // floats that memory hands over at once
constexpr int TILE = ACCUMULATORS / 4;   // Queries at once
constexpr float HIDDEN = -1e30f;         // a hidden Key's score: finite, so that a part of hidden Keys alone is no NaN

// Call `done` with `count`, which is 1 to MOST, as a constant.
template <int MOST, typename F> inline void with_constant(int64_t count, F done) {
    if (count == MOST) done(std::integral_constant<int, MOST>());
    else if constexpr (MOST > 1) with_constant<MOST - 1>(count, done);
}

inline int64_t threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline Vec load(const float *at) { return *reinterpret_cast<const Vec *>(at); }
inline Vec load(const uint16_t *at) {  // bfloat16 is the upper half of a float
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Half *>(at), Int) << 16);
}
inline void store(float *at, Vec value) { *reinterpret_cast<Vec *>(at) = value; }
inline Vec all(float value) { return Vec{} + value; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Lanes folded onto each other by halves.
template <typename F> inline float fold(Vec value, F both) {
#if LANES == 16
    value = both(value, __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    value = both(value, __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
    value = both(value, __builtin_shufflevector(value, value, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
#else
    value = both(value, __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3));
    value = both(value, __builtin_shufflevector(value, value, 2, 3, 0, 1, 2, 3, 0, 1));
#endif
    Vec one = both(value, Vec{} + value[1]);
    return one[0];
}

inline float sum(Vec value) { return fold(value, [](Vec a, Vec b) { return a + b; }); }
inline float highest(Vec value) { return fold(value, larger); }

// e^x for x <= 0 to about one unit in the last place: 2^n e^r with |r| <= ln2 / 2 (Cephes' polynomial).
inline Vec exponential(Vec low) {
    Vec x = larger(low, all(-87.0f));
    const Vec magic = all(12582912.0f);  // adding it rounds to an integer
    Vec shifted = x * 1.44269504088896341f + magic;
    Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Int power = (__builtin_convertvector(n, Int) + 127) << 23;
    return low < -87.0f ? Vec{} : p * (Vec)power;
}

// W rows of W floats, rows becoming columns: W.log2() rounds of interleaving halves.
inline void transpose(const float *from, int64_t rows, int64_t stride, float *to, int64_t to_stride) {
    Vec a[W], b[W];
    UNROLL for (int i = 0; i < W; i++) a[i] = i < rows ? load(from + i * stride) : Vec{};
    UNROLL for (int round = 1; round < W; round *= 2) {
        UNROLL for (int i = 0; i < W / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + W / 2], LOW);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + W / 2], HIGH);
        }
        UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
    }
    UNROLL for (int i = 0; i < W; i++) store(to + i * to_stride, a[i]);
}

}  // namespace

extern "C" struct Request {
    float *keys, *values;  // first layer, first head: [layers, ..., kv_heads, capacity, dim]
    int64_t layer_stride, head_stride;
    int64_t start, count;  // position of its first new row, and how many there are
};

namespace {

// What a row sees: with `causal` no later Key, with a window (0 is none) none that is `window` away or more.
struct Sight {
    bool causal;
    int64_t window;

    int64_t from(int64_t at) const { return window ? std::max<int64_t>(0, at - window + 1) : 0; }
    int64_t to(int64_t at, int64_t length) const {
        if (causal) return at + 1;
        return window ? std::min(length, at + window) : length;
    }
};

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
void rotate(const float *x, const float *cosine, const float *sine, float *out, int64_t dim, float scale) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = (x[i] * cosine[i] + x[i + half] * sine[i]) * scale;
        out[i + half] = (x[i + half] * cosine[i + half] + x[i] * sine[i + half]) * scale;
    }
}

// The Keys of one head, and those parts of them whose results make up the whole.
struct Group {
    int64_t request, head, first_part, last_part;
};

// Some Keys for the Queries of one group. Its result: of each Query the highest score, then of each the sum of
// exponentials, then of each the mixed Values.
struct Part {
    int64_t request, head, from, to, result;
};

// What to fetch while a tile is worked on: lines of Keys and of Values for each step.
struct Ahead {
    const float *keys, *values;
    int64_t lines;
};

// out [Q, columns] = first * out + left [Q, steps] right [steps, columns], rows of each so many floats apart; first: a
// factor for each row, null for zero. FETCH: whether to fetch ahead on the way.
template <int Q, int COLUMNS, bool FETCH>
inline void multiply(const float *left, int64_t left_stride, const float *right, int64_t right_stride, int64_t steps,
                     int64_t columns, const float *first, Ahead ahead, float *out) {
    for (int64_t column = 0; column < columns; column += COLUMNS * W) {
        Vec acc[Q][COLUMNS];
        UNROLL for (int q = 0; q < Q; q++) UNROLL for (int c = 0; c < COLUMNS; c++)
            acc[q][c] = first ? load(out + q * right_stride + column + c * W) * first[q] : Vec{};
        for (int64_t step = 0; step < steps; step++) {
            for (int64_t line = step * ahead.lines; FETCH && column == 0 && line < (step + 1) * ahead.lines; line++) {
                __builtin_prefetch(ahead.keys + line * LINE);
                __builtin_prefetch(ahead.values + line * LINE);
            }
            Vec each[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) each[c] = load(right + step * right_stride + column + c * W);
            UNROLL for (int q = 0; q < Q; q++) {
                Vec own = all(left[q * left_stride + step]);
                UNROLL for (int c = 0; c < COLUMNS; c++) acc[q][c] += own * each[c];
            }
        }
        UNROLL for (int q = 0; q < Q; q++) UNROLL for (int c = 0; c < COLUMNS; c++)
            store(out + q * right_stride + column + c * W, acc[q][c]);
    }
}

// Up to TILE Queries, whose rows start at `row` of the group, and one block of Keys.
template <int Q>
void attend_block(const Request &request, Sight sight, const float *query, const float *turned, const float *values,
                  int64_t first, int64_t keys, int64_t row, int64_t dim, Ahead ahead, float *top, float *total,
                  float *out) {
    alignas(64) float score[Q * BLOCK], shrink[W] = {};
    multiply<Q, ACCUMULATORS / TILE, true>(query, dim, turned, BLOCK, dim, BLOCK, nullptr, ahead, score);
    int64_t length = request.start + request.count;
    for (int q = 0; q < Q; q++) {
        float *own = score + q * BLOCK;
        int64_t at = request.start + (row + q) % request.count;
        int64_t from = std::clamp<int64_t>(sight.from(at) - first, 0, BLOCK);
        int64_t to = std::clamp<int64_t>(sight.to(at, length) - first, from, BLOCK);
        std::fill(own, own + from, HIDDEN);
        std::fill(own + to, own + BLOCK, HIDDEN);
        Vec high = load(own);
        for (int i = W; i < BLOCK; i += W) high = larger(high, load(own + i));
        float now = std::max(top[q], highest(high));
        shrink[q] = top[q] - now;
        top[q] = now;
    }
    store(shrink, exponential(load(shrink)));
    for (int q = 0; q < Q; q++) {
        float *own = score + q * BLOCK;
        Vec sums{};
        for (int i = 0; i < BLOCK; i += W) {
            Vec weight = exponential(load(own + i) - top[q]);
            store(own + i, weight);
            sums += weight;
        }
        // A part that has seen hidden Keys alone counts for nothing, here and where the parts are put together.
        total[q] = total[q] * shrink[q] + (top[q] == HIDDEN ? 0.0f : sum(sums));
    }
    int64_t vectors = dim / W;
    auto mix = [&](auto width) {
        multiply<Q, width.value, false>(score, BLOCK, values, dim, keys, dim, shrink, {}, out);
    };
    if (vectors % 4 == 0) mix(std::integral_constant<int, 4>());
    else if (vectors % 3 == 0) mix(std::integral_constant<int, 3>());
    else if (vectors % 2 == 0) mix(std::integral_constant<int, 2>());
    else mix(std::integral_constant<int, 1>());
}

void attend_part(const Request &request, const Part &part, int64_t layer, Sight sight, const float *queries,
                 int64_t rows, int64_t dim, std::vector<float> &turned, float *top, float *total, float *out) {
    turned.resize(dim * BLOCK);
    int64_t offset = layer * request.layer_stride + part.head * request.head_stride;
    std::fill(top, top + rows, HIDDEN);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * dim, 0.0f);
    for (int64_t first = part.from; first < part.to; first += BLOCK) {
        int64_t keys = std::min<int64_t>(BLOCK, part.to - first);
        const float *key = request.keys + offset + first * dim, *value = request.values + offset + first * dim;
        for (int k = 0; k < BLOCK; k += W)
            for (int64_t d = 0; d < dim; d += W)
                transpose(key + k * dim + d, keys - k, dim, turned.data() + d * BLOCK + k, BLOCK);
        // The next block is fetched bit by bit while the tiles of this one are worked on: all at once would only queue.
        bool more = first + 2 * BLOCK <= part.to;
        int64_t tiles = (rows + TILE - 1) / TILE, lines = more ? (BLOCK / LINE + tiles - 1) / tiles : 0;
        Ahead ahead{key + BLOCK * dim, value + BLOCK * dim, lines};
        for (int64_t row = 0; row < rows;) {
            int64_t take = std::min<int64_t>(rows - row, TILE);
            with_constant<TILE>(take, [&](auto q) {
                attend_block<q.value>(request, sight, queries + row * dim, turned.data(), value, first, keys, row, dim,
                                      ahead, top + row, total + row, out + row * dim);
            });
            ahead.keys += lines * dim * LINE;
            ahead.values += lines * dim * LINE;
            row += take;
        }
    }
}

}  // namespace

// Norm, scale and rotate the Queries and Keys of new rows, write their Keys and Values into the caches, and attend.
//
// qkv [rows, heads + 2 kv_heads, dim]: rows of all requests one behind the other; it is overwritten. q_norm, k_norm
// [dim] and gain [rows], its values gain_stride apart: null for none. cosine, sine [rows, dim]. mixed [rows, heads,
// dim].
extern "C" void sharpdraft_attend(int64_t count, const Request *requests, int64_t layer, float *qkv, int64_t heads,
                                  int64_t kv_heads, int64_t dim, const float *q_norm, const float *k_norm, float eps,
                                  const float *gain, int64_t gain_stride, const float *cosine, const float *sine,
                                  int causal, int64_t window, float *mixed) {
    const Sight sight{causal != 0, window};
    static thread_local std::vector<float> queries, results;
    static thread_local std::vector<Part> parts;
    static thread_local std::vector<Group> groups;
    static thread_local std::vector<int64_t> first_row;
    int64_t group = heads / kv_heads, all_heads = heads + 2 * kv_heads, keys = 0, rows = 0;
    first_row.clear();
    for (int64_t i = 0; i < count; i++) {
        first_row.push_back(rows);
        rows += requests[i].count;
        keys += (requests[i].start + requests[i].count) * kv_heads;
    }
    // Several parts a thread, so that none waits long for the last; each a whole number of blocks.
    int64_t size = std::max<int64_t>(2 * BLOCK, (keys / (8 * threads()) + BLOCK - 1) / BLOCK * BLOCK);
    parts.clear();
    groups.clear();
    int64_t place = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t length = requests[i].start + requests[i].count;
        int64_t begin = sight.from(requests[i].start) / BLOCK * BLOCK;
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t first = static_cast<int64_t>(parts.size());
            for (int64_t from = begin; from < length; from += size) {
                parts.push_back({i, head, from, std::min(length, from + size), place});
                place += group * requests[i].count * (dim + 2);
            }
            groups.push_back({i, head, first, static_cast<int64_t>(parts.size())});
        }
    }
    queries.resize(rows * heads * dim);
    results.resize(place);
    float scale = 1 / std::sqrt(static_cast<float>(dim));
    float *query_data = queries.data(), *result_data = results.data();
    const Part *part_data = parts.data();
    const Group *group_data = groups.data();
    const int64_t *rows_data = first_row.data();
    const int64_t part_count = static_cast<int64_t>(parts.size()), group_count = static_cast<int64_t>(groups.size());
    // Waking threads takes longer than little work does.
#pragma omp parallel if (keys * group * dim > 1 << 17)
    {
        std::vector<float> turned;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            int64_t i = std::upper_bound(rows_data, rows_data + count, row) - rows_data - 1;
            const Request &request = requests[i];
            int64_t line = row - rows_data[i], at = layer * request.layer_stride + (request.start + line) * dim;
            const float *turn = cosine + row * dim, *sines = sine + row * dim;
            for (int64_t head = 0; head < all_heads; head++) {
                float *own = qkv + (row * all_heads + head) * dim;
                if (head < heads) {
                    if (q_norm) norm(own, q_norm, eps, dim, own);
                    if (gain) {
                        Vec more = all(gain[row * gain_stride]);
                        for (int64_t d = 0; d < dim; d += W) store(own + d, load(own + d) + more * load(own + d));
                    }
                    // A group's Queries lie together: [requests][kv_heads][group][count][dim].
                    int64_t to = rows_data[i] * heads + (head / group * group + head % group) * request.count + line;
                    rotate(own, turn, sines, query_data + to * dim, dim, scale);
                } else if (head < heads + kv_heads) {
                    if (k_norm) norm(own, k_norm, eps, dim, own);
                    rotate(own, turn, sines, request.keys + at + (head - heads) * request.head_stride, dim, 1);
                } else {
                    std::copy(own, own + dim, request.values + at + (head - heads - kv_heads) * request.head_stride);
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < part_count; p++) {
            const Part &part = part_data[p];
            const Request &request = requests[part.request];
            int64_t own = group * request.count;
            const float *query = query_data + (rows_data[part.request] * heads + part.head * own) * dim;
            float *result = result_data + part.result;
            attend_part(request, part, layer, sight, query, own, dim, turned, result, result + own, result + 2 * own);
        }
        // Every part weighs as much as its softmax would have had in the whole.
#pragma omp for schedule(static)
        for (int64_t g = 0; g < group_count; g++) {
            const Group &whole = group_data[g];
            const Request &request = requests[whole.request];
            int64_t own = group * request.count;
            for (int64_t q = 0; q < own; q++) {
                float top = HIDDEN, total = 0;
                for (int64_t p = whole.first_part; p < whole.last_part; p++)
                    top = std::max(top, result_data[part_data[p].result + q]);
                int64_t row = rows_data[whole.request] + q % request.count;
                int64_t head = whole.head * group + q / request.count;
                float *out = mixed + (row * heads + head) * dim;
                std::fill(out, out + dim, 0.0f);
                for (int64_t p = whole.first_part; p < whole.last_part; p++) {
                    const float *result = result_data + part_data[p].result;
                    float weight = std::exp(result[q] - top);
                    total += weight * result[own + q];
                    const float *values = result + 2 * own + q * dim;
                    for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) + load(values + d) * weight);
                }
                for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) / total);
            }
        }
    }
}

// A linear layer: weight [outs, in], float32 or bfloat16, laid out as [panels, in, PANEL], so that a product reads
// memory from one end to the other; the last panel is filled up with zeros. bias [outs] or null. PANEL is given by the
// build.
extern "C" struct Weight {
    const void *panels;
    const float *bias;
    int64_t narrow, in, outs;
};

namespace {

constexpr int COLUMNS = PANEL / W;
constexpr int ROWS_AT_ONCE = ACCUMULATORS / COLUMNS;
constexpr int AHEAD = 16384;     // bytes that are fetched ahead
constexpr int64_t CHUNK = 512;  // inputs that are summed up by themselves, or wide layers would lose digits

// ROWS rows of x [ROWS, in] by a panel, of which `count` outputs are real.
template <int ROWS, typename T>
void product(const float *x, const T *panel, int64_t in, const float *bias, int64_t count, float *out, int64_t outs) {
    alignas(64) float whole[ROWS][PANEL] = {};
    for (int64_t from = 0; from < in; from += CHUNK) {
        Vec acc[ROWS][COLUMNS];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int c = 0; c < COLUMNS; c++) acc[r][c] = Vec{};
        for (int64_t i = from; i < std::min(in, from + CHUNK); i++, panel += PANEL) {
            const char *next = reinterpret_cast<const char *>(panel) + AHEAD;
            for (size_t at = 0; at < PANEL * sizeof(T); at += LINE * sizeof(float)) __builtin_prefetch(next + at);
            Vec each[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) each[c] = load(panel + c * W);
            UNROLL for (int r = 0; r < ROWS; r++) {
                Vec own = all(x[r * in + i]);
                UNROLL for (int c = 0; c < COLUMNS; c++) acc[r][c] += own * each[c];
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int c = 0; c < COLUMNS; c++)
            store(whole[r] + c * W, load(whole[r] + c * W) + acc[r][c]);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        for (int64_t o = 0; o < count; o++) out[r * outs + o] = whole[r][o] + (bias ? bias[o] : 0.0f);
}

template <typename T> void products(const Weight &weight, const float *x, int64_t rows, float *out) {
    const int64_t in = weight.in, outs = weight.outs;
    const int64_t tiles = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, panels = (outs + PANEL - 1) / PANEL;
    // A panel is read once for all tiles, unless there are too few panels and enough tiles for all threads.
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

}  // namespace

// x [rows, in] -> out [rows, outs], in float32.
extern "C" void sharpdraft_linear(const Weight *weight, const float *x, int64_t rows, float *out) {
    if (weight->narrow) products<uint16_t>(*weight, x, rows, out);
    else products<float>(*weight, x, rows, out);
}

// hidden += delta (null for none), and normed = its root mean square norm; all [rows, size].
extern "C" void sharpdraft_add_norm(float *hidden, const float *delta, const float *weight, float eps, int64_t rows,
                                    int64_t size, float *normed) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t row = 0; row < rows; row++) {
        float *own = hidden + row * size;
        const float *added = delta ? delta + row * size : nullptr;
        for (int64_t i = 0; added && i < size; i++) own[i] += added[i];
        norm(own, weight, eps, size, normed + row * size);
    }
}

// silu(gate) * up for gate_up [rows, 2 size] -> out [rows, size].
extern "C" void sharpdraft_gated(const float *gate_up, int64_t rows, int64_t size, float *out) {
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

// q_norm, k_norm: null for none. causal, window: see Sight. kind: which of
// the gains is this layer's.
extern "C" struct Layer {
    const float *attn_norm, *q_norm, *k_norm, *mlp_norm;
    Weight qkv, out, gate_up, down;
    int64_t causal, window, kind;
};

// All layers of a pass, one behind the other, and the norm behind the last.
//
// hidden [rows, size]: overwritten by the last layer's output. normed [rows, in of the first layer's qkv]: what the
// first layer projects, null for `hidden` under its norm. final_norm [size], final [rows, size]: behind the last layer.
// tapped: where the output of each layer goes, null for nowhere. gain, gain_stride: as in sharpdraft_attend, one for
// each kind of layer.
extern "C" void sharpdraft_layers(int64_t layer_count, const Layer *layers, int64_t heads, int64_t kv_heads,
                                  int64_t dim, int64_t size, float eps, const float *final_norm, int64_t count,
                                  const Request *requests, int64_t rows, const float *cosine, const float *sine,
                                  const float *const *gain, const int64_t *gain_stride, float *hidden,
                                  const float *normed, float *final, float *const *tapped) {
    static thread_local std::vector<float> own_normed, qkv, mixed, delta, gate_up, active;
    own_normed.resize(rows * size);
    delta.resize(rows * size);
    mixed.resize(rows * heads * dim);
    qkv.resize(rows * (heads + 2 * kv_heads) * dim);
    const float *added = nullptr;
    auto tap = [&](int64_t layer) {
        if (tapped[layer]) std::copy(hidden, hidden + rows * size, tapped[layer]);
    };
    for (int64_t i = 0; i < layer_count; i++) {
        const Layer &layer = layers[i];
        if (i || !normed) {
            sharpdraft_add_norm(hidden, added, layer.attn_norm, eps, rows, size, own_normed.data());
            normed = own_normed.data();
        }
        if (i) tap(i - 1);
        sharpdraft_linear(&layer.qkv, normed, rows, qkv.data());
        sharpdraft_attend(count, requests, i, qkv.data(), heads, kv_heads, dim, layer.q_norm, layer.k_norm, eps,
                          gain[layer.kind], gain_stride[layer.kind], cosine, sine, layer.causal, layer.window,
                          mixed.data());
        sharpdraft_linear(&layer.out, mixed.data(), rows, delta.data());
        sharpdraft_add_norm(hidden, delta.data(), layer.mlp_norm, eps, rows, size, own_normed.data());
        gate_up.resize(rows * layer.gate_up.outs);
        active.resize(rows * layer.down.in);
        sharpdraft_linear(&layer.gate_up, own_normed.data(), rows, gate_up.data());
        sharpdraft_gated(gate_up.data(), rows, layer.down.in, active.data());
        sharpdraft_linear(&layer.down, active.data(), rows, delta.data());
        added = delta.data();
    }
    sharpdraft_add_norm(hidden, added, final_norm, eps, rows, size, final);
    tap(layer_count - 1);
}
