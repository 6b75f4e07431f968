// What the caller hands over, and how work and partial results are laid out.
#pragma once

#include <cstdint>

namespace stepgraph {

// Everything is 64 bits wide, since the caller writes it as one array of integers.
struct Call {
    const void* query;  // [tokens, num_heads, head_dim], strides below in elements
    const void* key;    // [tokens, num_kv_heads, head_dim]
    const void* value;
    void* keys;  // [num_slots, num_kv_heads, head_dim], strides below
    void* values;
    void* out;                    // [tokens, num_heads, head_dim], contiguous
    const int64_t* slot_mapping;  // [tokens]
    const int32_t* block_tables;  // [sequences, table_stride]
    const int32_t* work;          // [1 + items + reductions, kWorkColumns]
    int64_t query_row_stride, query_head_stride;
    int64_t key_row_stride, key_head_stride;
    int64_t value_row_stride, value_head_stride;
    int64_t slot_stride, page_head_stride;  // of keys and of values
    int64_t num_tokens, num_slots, block_shift;
    int64_t num_heads, num_kv_heads, head_dim, table_stride;
    int64_t window;  // 0: none
    int64_t dtype;   // 0 float32, 1 bfloat16, 2 float16
    double scale;
};

constexpr int kWorkColumns = 9;

// Mirrors native_plan.py, which explains the fields.
struct Item {
    int32_t position_offset, sequence, first_row, last_row, first_head, last_head;
    int32_t first_key, last_key, partial;
};

struct Reduction {
    int32_t first_row, last_row, first_head, last_head, partial, num_parts, unused[3];
};

// The largest score, the weights' sum, and the weighted sum of values of one row and head.
inline int64_t partial_stride(const Call& call) { return call.head_dim + 2; }

}  // namespace stepgraph
