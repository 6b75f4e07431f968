// Attention for callers whose own team of threads works on a step's layers, one after another.
#pragma once

#include "threads.h"

namespace stepgraph {

// The attention library's functions as another library calls them.
struct AttentionTeam {
    void* (*begin)(const void* calls, int64_t count);
    void (*work)(void* steps, int64_t index, Worker* worker);  // returns when the layer is done
    int64_t (*end)(void* steps, int64_t* bad);                 // returns a Status
    const void* calls;                                         // an array of Call, for begin
};

}  // namespace stepgraph
