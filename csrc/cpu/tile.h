// Attention of some rows over one tile of positions: scores, softmax, weighted sum.
//
// A row is one head of one position. Its result depends on its own query and on the keys and values that it
// sees, and on nothing else: how rows and keys are taken together into blocks decides which registers are
// used, never the order of a row's own operations. Each dot product is one accumulator, d ascending, and
// one fixed order of its lanes; each weighted sum is one accumulator, positions ascending. Of positions that
// a row does not see, a score may be computed, but is dropped before the softmax, and the value is never
// multiplied: what is there may be a NaN, and 0 x NaN is NaN.
#pragma once

#include "vectors.h"

namespace {

constexpr int kTile = 128;   // positions; tile t holds t * kTile and on, for every row
constexpr int kPanel = 32;   // positions whose keys or values stay in the first cache for all rows
constexpr int kAhead = 12;   // positions that keys are fetched ahead of their use

struct Range {
    int first, last;  // of positions in the tile, `last` not included
};

inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }

// What a tile is computed in. Rows of `query` and `sums` are `width` floats, those of `weights` kTile.
struct Rows {
    int count;
    int64_t width;
    const float *query;
    const Range *seen;
    float *weights;
    float *largest;  // of the scores
    float *total;    // of the weights
    float *sums;     // of the values, weighted
    bool apart;      // keys and values are read where they are, and do not follow one another there: the
                     // processor does not foresee what is next
};

// Has the processor begin to fetch a row of keys or values.
template <typename T>
inline void fetch(const T *row, int64_t width) {
    for (int64_t at = 0; at < width; at += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + at);
}

// Scores of M rows by kKeys keys.
template <int M, typename T>
inline void dot_block(const float *query, int64_t width, const T *const *keys, float *scores) {
    constexpr int n = Step<T>::vectors;
    Vector sum[kLanes] = {};
    for (int64_t at = 0; at < width; at += n * kLanes) {
        Vector q[M][n];
#pragma GCC unroll 4
        for (int r = 0; r < M; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < n; ++v) q[r][v] = load(query + r * width + at + v * kLanes);
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) {
            Vector k[n];
            Step<T>::load_to(keys[j] + at, k);
#pragma GCC unroll 4
            for (int r = 0; r < M; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < n; ++v) sum[r * kKeys + j] = fused(q[r][v], k[v], sum[r * kKeys + j]);
        }
    }
    float out[kLanes];
    store(out, sums(sum));
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r) memcpy(scores + r * kTile, out + r * kKeys, sizeof(float) * kKeys);
}

// Adds the values of positions `range`, weighted, to N vectors of the sums of M rows.
template <int M, int N, typename T>
inline void sum_block(const float *weights, Range range, const T *const *values, int64_t at, float *sums,
                      int64_t width) {
    constexpr int n = Step<T>::vectors;
    static_assert(N % n == 0, "whole steps");
    Vector sum[M][N];
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) sum[r][v] = load(sums + r * width + at + v * kLanes);
    for (int j = range.first; j < range.last; ++j) {
        Vector value[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; v += n) Step<T>::load_to(values[j] + at + v * kLanes, value + v);
#pragma GCC unroll 4
        for (int r = 0; r < M; ++r) {
            const Vector weight = all(weights[r * kTile + j]);
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) sum[r][v] = fused(weight, value[v], sum[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) store(sums + r * width + at + v * kLanes, sum[r][v]);
}

template <int M, typename T>
inline void sum_rows(const float *weights, Range range, const T *const *values, float *sums, int64_t width) {
    if (range.first >= range.last) return;
    int64_t at = 0;
    for (; at + kWide * kLanes <= width; at += kWide * kLanes)
        sum_block<M, kWide, T>(weights, range, values, at, sums, width);
    for (; at < width; at += Step<T>::vectors * kLanes)
        sum_block<M, Step<T>::vectors, T>(weights, range, values, at, sums, width);
}

// The scores of a row to weights; positions beside `seen` up to whole vectors get 0.
inline void softmax(float *scores, Range seen, float &largest, float &total) {
    const int first = seen.first / kLanes * kLanes;
    const int last = (seen.last + kLanes - 1) / kLanes * kLanes;
    const float lowest = -__builtin_inff();
    for (int j = first; j < seen.first; ++j) scores[j] = lowest;
    for (int j = seen.last; j < last; ++j) scores[j] = lowest;
    Vector high = all(lowest), sum = {};
    for (int j = first; j < last; j += kLanes) high = larger(load(scores + j), high);
    largest = largest_lane(high);
    const Vector base = all(largest == lowest ? 0.0f : largest);
    for (int j = first; j < last; j += kLanes) {
        const Vector weight = exponential(load(scores + j) - base);
        store(scores + j, weight);
        sum += weight;
    }
    total = sum_of_lanes(sum);
}

struct Scores {
    // M rows from `row` on, over the positions of one panel.
    template <int M, typename T>
    static inline void of(const Rows &rows, int row, Range panel, const T *const *keys,
                          const T *const *values) {
        Range seen = {kTile, 0};
        for (int r = row; r < row + M; ++r)
            if (rows.seen[r].first < rows.seen[r].last) {
                seen.first = least(seen.first, rows.seen[r].first);
                seen.last = most(seen.last, rows.seen[r].last);
            }
        const int last = least(seen.last, panel.last);
        for (int j = most(seen.first, panel.first) / kKeys * kKeys; j < last; j += kKeys) {
            if (rows.apart && row == 0)
                for (int i = j; i < j + kKeys; ++i) {
                    if (i + kAhead < seen.last) fetch(keys[i + kAhead], rows.width);
                    if (i >= seen.first && i < seen.last) fetch(values[i], rows.width);
                }
            dot_block<M, T>(rows.query + row * rows.width, rows.width, keys + j,
                            rows.weights + row * kTile + j);
        }
    }
};

struct Sums {
    template <int M, typename T>
    static inline void of(const Rows &rows, int row, Range panel, const T *const *, const T *const *values) {
        Range own[M], shared = panel;
        for (int r = 0; r < M; ++r) {
            const Range seen = rows.seen[row + r];
            own[r] = {most(seen.first, panel.first), least(seen.last, panel.last)};
            shared = {most(shared.first, own[r].first), least(shared.last, own[r].last)};
        }
        if (shared.first >= shared.last) shared = {panel.last, panel.last};
        // Each row: what comes before the shared positions, those, what comes after.
        float *weights = rows.weights + row * kTile, *sums = rows.sums + row * rows.width;
        for (int r = 0; r < M; ++r)
            sum_rows<1, T>(weights + r * kTile, {own[r].first, least(shared.first, own[r].last)}, values,
                           sums + r * rows.width, rows.width);
        sum_rows<M, T>(weights, shared, values, sums, rows.width);
        for (int r = 0; r < M; ++r)
            sum_rows<1, T>(weights + r * kTile, {most(shared.last, own[r].first), own[r].last}, values,
                           sums + r * rows.width, rows.width);
    }
};

// All rows, panel by panel, kRows at a time.
template <typename Operation, typename T>
inline void by_panels(const Rows &rows, const T *const *keys, const T *const *values) {
    for (int at = 0; at < kTile; at += kPanel) {
        const Range panel = {at, at + kPanel};
        int row = 0;
        for (; row + kRows <= rows.count; row += kRows)
            Operation::template of<kRows, T>(rows, row, panel, keys, values);
        // Where kRows is 2 no more than one is left.
        constexpr int three = kRows < 3 ? 1 : 3, two = kRows < 3 ? 1 : 2;
        if (rows.count - row == 3) Operation::template of<three, T>(rows, row, panel, keys, values);
        if (rows.count - row == 2) Operation::template of<two, T>(rows, row, panel, keys, values);
        if (rows.count - row == 1) Operation::template of<1, T>(rows, row, panel, keys, values);
    }
}

// `keys` and `values` point to the tile's positions, of which only those that a row sees are looked at, but
// `keys` from and up to the next multiple of kKeys.
template <typename T>
inline void attend_tile(const Rows &rows, const T *const *keys, const T *const *values) {
    by_panels<Scores>(rows, keys, values);
    for (int r = 0; r < rows.count; ++r)
        if (rows.seen[r].first < rows.seen[r].last)
            softmax(rows.weights + r * kTile, rows.seen[r], rows.largest[r], rows.total[r]);
    memset(rows.sums, 0, sizeof(float) * (size_t)(rows.count * rows.width));
    by_panels<Sums>(rows, keys, values);
}

}  // namespace
