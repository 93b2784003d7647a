// Keys and values into the blocks of the cache.
#pragma once

#include "abi.h"
#include "vectors.h"

namespace {

template <typename T, typename From>
inline void write(const servelite_batch &batch, const servelite_cache &cache, void *to,
                  const servelite_states &states) {
    for (int64_t row = 0; row < batch.rows; ++row) {
        const int32_t *table = batch.tables + row * batch.table_stride;
        int64_t position = batch.computed[row];
        for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token, ++position) {
            const From *from = (const From *)states.data + token * states.token_stride;
            T *place = (T *)to + table[position / batch.block_size] * cache.block_stride +
                       position % batch.block_size * cache.position_stride;
            for (int64_t head = 0; head < cache.kv_heads; ++head) {
                const From *values = from + head * states.head_stride;
                T *own = place + head * cache.head_stride;
                for (int64_t i = 0; i < cache.head_dim; ++i) from_float(to_float(values[i]), own[i]);
            }
        }
    }
}

inline void write(const servelite_batch &batch, const servelite_cache &cache, void *to,
                  const servelite_states &states) {
    if (cache.dtype == SERVELITE_BFLOAT16) {
        if (states.dtype == SERVELITE_BFLOAT16) write<bfloat16, bfloat16>(batch, cache, to, states);
        else write<bfloat16, float>(batch, cache, to, states);
    } else {
        if (states.dtype == SERVELITE_BFLOAT16) write<float, bfloat16>(batch, cache, to, states);
        else write<float, float>(batch, cache, to, states);
    }
}

}  // namespace

void servelite_write_kv(const servelite_batch *batch, const servelite_cache *cache,
                        const servelite_states *keys, const servelite_states *values) {
    write(*batch, *cache, cache->keys, *keys);
    write(*batch, *cache, cache->values, *values);
}
