// The C interface: products with packed weights, and a decoder's regions between attention calls.

#include "region.h"

extern "C" {

STEPGRAPH_EXPORT void stepgraph_linear(const stepgraph::LinearCall* call) {
    stepgraph::run_linear(*call);
}

STEPGRAPH_EXPORT void stepgraph_region(const stepgraph::RegionCall* call) {
    static thread_local std::vector<uint16_t> scratch;
    stepgraph::Region(*call, scratch).run();
}

#if defined(STEPGRAPH_MATRIX_KERNEL)
STEPGRAPH_EXPORT void stepgraph_use_matrix_kernel(void* multiply, void* release) {
    using stepgraph::matrix_kernel;
    matrix_kernel.multiply = reinterpret_cast<decltype(matrix_kernel.multiply)>(multiply);
    matrix_kernel.release = reinterpret_cast<decltype(matrix_kernel.release)>(release);
}
#endif

}  // extern "C"
