// The C interface of the native CPU kernels, loaded with ctypes; servelite/kernels/cpu/library.py mirrors it.
// Pointers are the caller's and are only read, outputs apart. Strides are in elements.
#pragma once

#include <stdint.h>

extern "C" {

enum { SERVELITE_FLOAT32 = 0, SERVELITE_BFLOAT16 = 1 };

// One step's flat batch of one KV group.
struct servelite_batch {
    const int64_t *starts;    // [rows + 1]: where each row's tokens begin in the flat batch
    const int64_t *computed;  // [rows]: tokens of each row in the cache before the step
    const int32_t *tables;    // [rows, table_stride]: block IDs
    int64_t table_stride;
    int64_t rows;
    int64_t block_size;
    int64_t window;  // positions that a token sees, itself included; 0: all before it
};

// One layer's keys and values, both [blocks, block_size, kv_heads, head_dim], the last dimension dense.
struct servelite_cache {
    void *keys;
    void *values;
    int64_t block_stride;
    int64_t position_stride;
    int64_t head_stride;
    int64_t kv_heads;
    int64_t head_dim;
    int32_t dtype;
};

// A tensor [tokens, heads, head_dim], the last dimension dense.
struct servelite_states {
    void *data;
    int64_t token_stride;
    int64_t head_stride;
    int64_t heads;
    int32_t dtype;
};

// Causal attention of the batch's tokens, their own keys and values already in the cache. `out` has the
// query's dtype. Returns 0, or 1 where there was no memory for the intermediates.
__attribute__((visibility("default"))) int servelite_attend(
    const servelite_batch *batch, const servelite_cache *cache, const servelite_states *query,
    const servelite_states *out, float scale, int threads);

// Puts the batch's keys and values where its block tables say, in the cache's dtype.
__attribute__((visibility("default"))) void servelite_write_kv(
    const servelite_batch *batch, const servelite_cache *cache, const servelite_states *keys,
    const servelite_states *values);
}
