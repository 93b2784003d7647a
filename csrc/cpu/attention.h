// Paged attention of a flat mixed batch: the work, its division over threads, and the merge of tiles.
//
// A unit is some consecutive tokens of one row and one KV head with its group of query heads. Its tiles are
// computed one by one and merged in ascending order; where there are fewer units than threads can use, the
// tiles of a unit are items of their own, merged afterwards in the same order by the same arithmetic. So
// neither the division, nor the threads, nor the chunk that a token came in changes a bit.
#pragma once

#include <omp.h>
#include <stdlib.h>

#include "abi.h"
#include "tile.h"

namespace {

constexpr int kUnitRows = 256;         // as many tokens are one unit as make about so many rows
constexpr int kPackRows = 12;         // rows from which bfloat16 keys are converted once for all
constexpr double kSerial = 4e5;       // products of the dot products from which two threads are faster
constexpr int64_t kPartial = 1 << 22; // floats that tiles computed apart may take

struct Unit {
    int64_t row, token;   // the token's index in the flat batch
    int64_t position;     // of the first token
    int64_t first, last;  // tiles, `last` not included
    int64_t partial;      // where its tiles' results are, in floats; -1: its tiles are not apart
    double cost;
    int kv_head, tokens;
};

struct Item {
    int64_t unit, tile;  // tile -1: all of the unit's
};

struct Call {
    const servelite_batch &batch;
    const servelite_cache &cache;
    const servelite_states &query, &out;
    float scale;
    int group;
    int64_t width;       // of a row of floats
    int unit_rows;       // of the largest unit
    bool whole;          // the head size is whole steps, so keys can be read where they are
    Unit *units;
    float *partials;
};

// Floats of one tile's result of a unit: the largest score and the total of each row, then the sums.
inline int64_t partial_size(const Call &call, int rows) { return rows * (2 + call.width); }

// One thread's room, of which `Rows` are views. Kept for the next call, and for ever.
struct Scratch {
    float *query, *weights, *tile, *running, *packed;
    Range *seen;
    const void *keys[kTile], *values[kTile];
};

struct Room {
    char *data;
    size_t size;
};

static __thread Room thread_room, call_room;

inline char *grown(Room &room, size_t size) {
    if (room.size >= size) return room.data;
    free(room.data);
    void *data = nullptr;
    if (posix_memalign(&data, 64, size)) data = nullptr;
    room = {(char *)data, data ? size : 0};
    return room.data;
}

inline bool make_scratch(const Call &call, Scratch &scratch) {
    const size_t rows = call.unit_rows, width = call.width;
    const size_t query = rows * width, weights = rows * kTile, result = rows * (2 + width);
    const size_t floats = query + weights + 2 * result + 2 * kTile * width + 64;
    char *room = grown(thread_room, floats * sizeof(float) + rows * sizeof(Range));
    if (!room) return false;
    scratch.query = (float *)room;
    scratch.weights = scratch.query + query;
    scratch.packed = scratch.weights + weights;  // all so far whole vectors
    scratch.tile = scratch.packed + 2 * kTile * width;
    scratch.running = scratch.tile + result;
    scratch.seen = (Range *)(scratch.running + result);
    return true;
}

// What the tokens of a unit see of a tile.
inline void see(const Call &call, const Unit &unit, int64_t tile, Range *seen) {
    const int64_t start = tile * kTile;
    for (int i = 0; i < unit.tokens; ++i) {
        const int64_t end = unit.position + i + 1 - start;
        const int64_t begin = call.batch.window ? end - call.batch.window : -start;
        Range range = {begin > 0 ? (int)begin : 0, end < kTile ? (int)end : kTile};
        if (begin >= kTile || end <= 0) range = {0, 0};
        for (int g = 0; g < call.group; ++g) seen[i * call.group + g] = range;
    }
}

// Points to the keys and values of the positions of a tile that some token of the unit sees.
template <typename T>
inline Range point(const Call &call, const Unit &unit, int64_t tile, Scratch &scratch) {
    const servelite_cache &cache = call.cache;
    const int64_t size = call.batch.block_size, start = tile * kTile;
    int64_t from = call.batch.window ? unit.position - call.batch.window + 1 : 0;
    int64_t to = unit.position + unit.tokens;
    from = from > start ? from : start;
    to = to < start + kTile ? to : start + kTile;
    const int32_t *table = call.batch.tables + unit.row * call.batch.table_stride;
    for (int64_t at = from; at < to;) {
        const int64_t block = at / size, end = (block + 1) * size < to ? (block + 1) * size : to;
        int64_t offset = table[block] * cache.block_stride + (at - block * size) * cache.position_stride +
                         unit.kv_head * cache.head_stride;
        for (; at < end; ++at, offset += cache.position_stride) {
            scratch.keys[at - start] = (const T *)cache.keys + offset;
            scratch.values[at - start] = (const T *)cache.values + offset;
        }
    }
    return {(int)(from - start), (int)(to - start)};
}

// Copies what is pointed to as floats, in the order of Step<T>, and points there.
template <typename T>
inline void pack(const Call &call, Range range, const void **pointers, float *to) {
    for (int j = range.first; j < range.last; ++j, to += call.width) {
        to_lanes<T>((const T *)pointers[j], call.cache.head_dim, 1.0f, to);
        pointers[j] = to;
    }
}

// Lets the places beside `range` that blocks of kKeys reach into point to something too.
inline void fill_up(Range range, const void **pointers) {
    for (int j = range.first; j % kKeys;) pointers[--j] = pointers[range.first];
    for (int j = range.last; j % kKeys; ++j) pointers[j] = pointers[range.first];
}

// Whether a unit's keys and values are copied to floats first.
inline bool packed(const Call &call, int rows) { return !call.whole || rows >= kPackRows; }

inline Rows rows_of(const Call &call, const Unit &unit, const Scratch &scratch, float *result) {
    const int count = unit.tokens * call.group;
    return {count, call.width, scratch.query, scratch.seen, scratch.weights,
            result, result + count, result + 2 * count,
            !packed(call, count) && call.cache.position_stride != call.cache.head_dim};
}

// One tile of a unit into `result`.
template <typename T>
inline void compute_tile(const Call &call, const Unit &unit, int64_t tile, Scratch &scratch, float *result) {
    see(call, unit, tile, scratch.seen);
    const Range range = point<T>(call, unit, tile, scratch);
    const Rows rows = rows_of(call, unit, scratch, result);
    if (packed(call, rows.count)) {
        pack<T>(call, range, scratch.keys, scratch.packed);
        pack<T>(call, range, scratch.values, scratch.packed + kTile * call.width);
        fill_up(range, scratch.keys);
        attend_tile<float>(rows, (const float *const *)scratch.keys, (const float *const *)scratch.values);
    } else {
        fill_up(range, scratch.keys);
        attend_tile<T>(rows, (const T *const *)scratch.keys, (const T *const *)scratch.values);
    }
}

// Adds one tile's result to that of those before it. Rows that see nothing of the tile are left alone.
inline void merge(const Rows &into, const Rows &tile) {
    for (int r = 0; r < tile.count; ++r) {
        if (tile.seen[r].first >= tile.seen[r].last) continue;
        const float largest = tile.largest[r] > into.largest[r] ? tile.largest[r] : into.largest[r];
        const float base = largest == -__builtin_inff() ? 0.0f : largest;
        const float old = exponential(into.largest[r] - base), fresh = exponential(tile.largest[r] - base);
        into.largest[r] = largest;
        into.total[r] = into.total[r] * old + tile.total[r] * fresh;
        float *sums = into.sums + r * into.width;
        const float *added = tile.sums + r * into.width;
        for (int64_t at = 0; at < into.width; at += kLanes)
            store(sums + at, fused(load(added + at), all(fresh), load(sums + at) * all(old)));
    }
}

inline void clear(const Rows &rows) {
    for (int r = 0; r < rows.count; ++r) rows.largest[r] = -__builtin_inff();
    memset(rows.total, 0, sizeof(float) * (size_t)(rows.count * (1 + rows.width)));
}

template <typename T, typename Q>
inline void take_query(const Call &call, const Unit &unit, float *to) {
    for (int i = 0; i < unit.tokens; ++i)
        for (int g = 0; g < call.group; ++g, to += call.width)
            to_lanes<T>((const Q *)call.query.data + (unit.token + i) * call.query.token_stride +
                            (unit.kv_head * call.group + g) * call.query.head_stride,
                        call.cache.head_dim, call.scale, to);
}

template <typename T, typename Q>
inline void give_out(const Call &call, const Unit &unit, const Rows &rows) {
    for (int r = 0; r < rows.count; ++r)
        from_lanes<T>(rows.sums + r * rows.width, call.cache.head_dim, 1.0f / rows.total[r],
                      (Q *)call.out.data + (unit.token + r / call.group) * call.out.token_stride +
                          (unit.kv_head * call.group + r % call.group) * call.out.head_stride);
}

// Merges the tiles of a unit that were computed apart.
template <typename T, typename Q>
inline void finish(const Call &call, const Unit &unit, Scratch &scratch) {
    const Rows running = rows_of(call, unit, scratch, scratch.running);
    clear(running);
    for (int64_t tile = unit.first; tile < unit.last; ++tile) {
        see(call, unit, tile, scratch.seen);
        float *result =
            call.partials + unit.partial + (tile - unit.first) * partial_size(call, running.count);
        merge(running, rows_of(call, unit, scratch, result));
    }
    give_out<T, Q>(call, unit, running);
}

template <typename T, typename Q>
inline void run(const Call &call, const Item &item, Scratch &scratch) {
    const Unit &unit = call.units[item.unit];
    take_query<T, Q>(call, unit, scratch.query);
    if (item.tile >= 0) {
        const int64_t size = partial_size(call, unit.tokens * call.group);
        compute_tile<T>(call, unit, item.tile, scratch,
                        call.partials + unit.partial + (item.tile - unit.first) * size);
        return;
    }
    const Rows running = rows_of(call, unit, scratch, scratch.running);
    clear(running);
    for (int64_t tile = unit.first; tile < unit.last; ++tile) {
        compute_tile<T>(call, unit, tile, scratch, scratch.tile);
        merge(running, rows_of(call, unit, scratch, scratch.tile));
    }
    give_out<T, Q>(call, unit, running);
}

// Cuts the batch into units, or counts them where there is no room for them yet.
inline int64_t make_units(const Call &call, Unit *units) {
    const servelite_batch &batch = call.batch;
    const int most_tokens = most(1, kUnitRows / call.group);
    int64_t made = 0;
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int64_t start = batch.starts[row], stop = batch.starts[row + 1];
        for (int64_t token = start; token < stop; token += most_tokens)
            for (int head = 0; head < call.cache.kv_heads; ++head, ++made) {
                if (!units) continue;
                const int tokens = (int)(stop - token < most_tokens ? stop - token : most_tokens);
                const int64_t position = batch.computed[row] + token - start, end = position + tokens;
                int64_t begin = batch.window ? position - batch.window + 1 : 0;
                begin = begin > 0 ? begin : 0;
                const double cost = (double)(end - begin) * tokens * call.group * call.width;
                units[made] = {row, token, position, begin / kTile, (end + kTile - 1) / kTile, -1,
                               cost, head, tokens};
            }
    }
    return made;
}

// Sets tiles apart of units that are too large a part of the whole; returns the floats they take.
inline int64_t set_apart(const Call &call, int64_t units, double cost, int threads) {
    int64_t floats = 0;
    for (int64_t i = 0; i < units; ++i) {
        Unit &unit = call.units[i];
        const int64_t tiles = unit.last - unit.first;
        if (tiles < 2 || unit.cost * threads * 4 < cost) continue;
        const int64_t size = tiles * partial_size(call, unit.tokens * call.group);
        if (floats + size > kPartial) continue;
        unit.partial = floats;
        floats += size;
    }
    return floats;
}

template <typename T, typename Q>
inline int attend(Call &call, int threads) {
    const int64_t units = make_units(call, nullptr);
    Unit *list = (Unit *)malloc(sizeof(Unit) * (size_t)(units + 1));
    if (!list) return 1;
    call.units = list;
    make_units(call, list);
    double cost = 0;
    for (int64_t i = 0; i < units; ++i) {
        cost += list[i].cost;
        call.unit_rows = most(call.unit_rows, list[i].tokens * call.group);
    }
    // No more threads than have half of that each.
    if (cost * 2 < kSerial * threads) threads = most(1, (int)(cost * 2 / kSerial));
    const int64_t floats = threads > 1 ? set_apart(call, units, cost, threads) : 0;
    int64_t count = 0;
    for (int64_t i = 0; i < units; ++i) count += list[i].partial < 0 ? 1 : list[i].last - list[i].first;
    char *room = grown(call_room, sizeof(float) * (size_t)floats + sizeof(Item) * (size_t)(count + 1));
    if (!room) {
        free(list);
        return 1;
    }
    Item *items = (Item *)room;
    call.partials = (float *)(items + count + 1);
    int64_t made = 0;
    for (int64_t i = 0; i < units; ++i) {
        if (list[i].partial < 0) items[made++] = {i, -1};
        else
            for (int64_t tile = list[i].first; tile < list[i].last; ++tile) items[made++] = {i, tile};
    }
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch scratch;
        const bool ready = make_scratch(call, scratch);
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i)
            if (ready) run<T, Q>(call, items[i], scratch);
        if (floats) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < units; ++i)
                if (ready && list[i].partial >= 0) finish<T, Q>(call, list[i], scratch);
        }
    }
    free(list);
    return failed;
}

}  // namespace

int servelite_attend(const servelite_batch *batch, const servelite_cache *cache,
                     const servelite_states *query, const servelite_states *out, float scale, int threads) {
    const bool half = cache->dtype == SERVELITE_BFLOAT16;
    const int64_t width = half ? padded<bfloat16>(cache->head_dim) : padded<float>(cache->head_dim);
    const int group = (int)(query->heads / cache->kv_heads);
    const bool whole = width == cache->head_dim;
    Call call = {*batch, *cache, *query, *out, scale, group, width, 1, whole, nullptr, nullptr};
    if (query->dtype == SERVELITE_BFLOAT16)
        return half ? attend<bfloat16, bfloat16>(call, threads) : attend<float, bfloat16>(call, threads);
    return half ? attend<bfloat16, float>(call, threads) : attend<float, float>(call, threads);
}
