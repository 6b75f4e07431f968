// The C interface: products with packed weights, a decoder's regions between attention calls, and
// all of its layers.

#include "forward.h"

extern "C" {

STEPGRAPH_EXPORT void stepgraph_linear(const stepgraph::LinearCall* call) {
    stepgraph::run_linear(*call);
}

STEPGRAPH_EXPORT void stepgraph_region(const stepgraph::RegionCall* call) {
    static thread_local stepgraph::RegionScratch scratch;
    scratch.reserve(*call);
    const stepgraph::Region region(*call, scratch);
    stepgraph::run_team(static_cast<int>(call->num_threads), [&](stepgraph::Worker& worker) {
        region.work(worker);
        stepgraph::release_matrix_kernel();
    });
}

// Returns what stepgraph_attend does.
STEPGRAPH_EXPORT int64_t stepgraph_forward(const stepgraph::ForwardCall* call, int64_t* bad) {
    static thread_local stepgraph::RegionScratch scratch;
    return stepgraph::run_forward(*call, scratch, bad);
}

#if defined(STEPGRAPH_MATRIX_KERNEL)
STEPGRAPH_EXPORT void stepgraph_use_matrix_kernel(void* multiply, void* release) {
    using stepgraph::matrix_kernel;
    matrix_kernel.multiply = reinterpret_cast<decltype(matrix_kernel.multiply)>(multiply);
    matrix_kernel.release = reinterpret_cast<decltype(matrix_kernel.release)>(release);
}
#endif

}  // extern "C"
