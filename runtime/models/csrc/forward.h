// All layers of a decoder by one team of threads: its regions, and attention between them.
#pragma once

#include <vector>

#include "attention_team.h"
#include "region.h"

namespace stepgraph {

// Everything is 64 bits wide, since the caller writes it as one array of integers. Tensors are
// bfloat16 and contiguous. regions lack what is said here.
struct ForwardCall {
    int64_t num_threads, num_rows, num_layers;
    const RegionCall* regions;  // [num_layers + 1]
    const int32_t* input_ids;   // [num_rows]
    const int64_t* positions;   // [num_rows]
    const uint16_t* embedding;  // [vocab, embedding_width], or in panels
    int64_t is_packed, vocab, embedding_width, num_positions;
    const uint16_t* rotary;     // [num_positions, 2 * head_dim]: cos, then sin
    uint16_t* residual;         // [num_rows, hidden]
    uint16_t* qkv;              // [num_rows, qkv_width]: what the attention calls read...
    uint16_t* attended;         // [num_rows, attended_width]: ...and write
    uint16_t* out;              // [num_rows, hidden]; null: the last region is left out
    AttentionTeam attention;    // of num_layers calls
};

// A region's call, completed by what the forward says.
inline RegionCall region_call(const ForwardCall& call, int64_t index) {
    RegionCall region = call.regions[index];
    region.num_threads = call.num_threads;
    region.num_rows = call.num_rows;
    region.residual = region.new_residual = call.residual;
    region.cos = call.rotary;
    region.sin = call.rotary + region.head_dim;
    region.rotary_stride = 2 * region.head_dim;
    region.positions = call.positions;
    region.out = index == call.num_layers ? call.out : call.qkv;
    if (index > 0) {
        region.attended = call.attended;
        region.attended_stride = region.attended_width;
    }
    return region;
}

// Whether all ids and positions are rows of their tables.
inline bool is_in_range(const ForwardCall& call) {
    bool good = true;
    for (int64_t row = 0; row < call.num_rows; ++row) {
        good &= call.input_ids[row] >= 0 && call.input_ids[row] < call.vocab;
        good &= call.positions[row] >= 0 && call.positions[row] < call.num_positions;
    }
    return good;
}

inline void embed(const ForwardCall& call, int64_t row, int64_t hidden) {
    const int64_t id = call.input_ids[row];
    uint16_t* target = call.residual + row * hidden;
    if (!call.is_packed) {
        std::memcpy(target, call.embedding + id * call.embedding_width, hidden * sizeof(uint16_t));
        return;
    }
    const uint16_t* panel = call.embedding + id / kPanel * kPanel * call.embedding_width;
    for (int64_t i = 0; i < hidden; ++i) {
        target[i] = panel[(i / 2 * kPanel + id % kPanel) * 2 + i % 2];
    }
}

constexpr int64_t kBadInput = -1;

// Returns attention's Status and what was bad, or kBadInput. Scratch is used until then.
inline int64_t run_forward(const ForwardCall& call, RegionScratch& scratch, int64_t* bad) {
    if (!is_in_range(call)) return kBadInput;
    const int64_t hidden = call.regions[0].hidden;
    scratch.reserve(region_call(call, 0));
    const AttentionTeam& attention = call.attention;
    void* const steps = attention.begin(attention.calls, call.num_layers);
    run_team(static_cast<int>(call.num_threads), [&](Worker& worker) {
        share_rows(worker, call.num_rows, [&](int64_t row) { embed(call, row, hidden); });
        for (int64_t i = 0; i < call.num_layers; ++i) {
            Region(region_call(call, i), scratch).work(worker);
            attention.work(steps, i, &worker);
        }
        if (call.out) Region(region_call(call, call.num_layers), scratch).work(worker);
        release_matrix_kernel();
    });
    return attention.end(steps, bad);
}

}  // namespace stepgraph
