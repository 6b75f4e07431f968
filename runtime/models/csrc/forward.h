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
    uint16_t* residual;         // [num_rows, hidden]: the embeddings, which are overwritten
    const uint16_t *cos, *sin;  // [num_rows, head_dim]
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
    region.cos = call.cos;
    region.sin = call.sin;
    region.out = index == call.num_layers ? call.out : call.qkv;
    if (index > 0) {
        region.attended = call.attended;
        region.attended_stride = region.attended_width;
    }
    return region;
}

// Returns attention's Status, and what was bad. Scratch is used until then.
inline int64_t run_forward(const ForwardCall& call, RegionScratch& scratch, int64_t* bad) {
    scratch.reserve(region_call(call, 0));
    const AttentionTeam& attention = call.attention;
    void* const steps = attention.begin(attention.calls, call.num_layers);
    run_team(static_cast<int>(call.num_threads), [&](Worker& worker) {
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
