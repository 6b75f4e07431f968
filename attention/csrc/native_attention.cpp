// The C interface: write a step's keys and values into the pages, then attend.
//
// Threads come from the OpenMP runtime that torch itself runs on. The caller hands its entry
// points over, so this library links none and there is never a second pool of threads.

#include <atomic>
#include <vector>

#include "attend.h"

namespace stepgraph {
namespace {

struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
    void (*barrier)();                                             // GOMP_barrier
    int (*thread_num)();                                           // omp_get_thread_num
    int (*num_threads)();                                          // omp_get_num_threads
};

OpenMP openmp;

enum Status : int64_t { kDone = 0, kBadSlot = 1, kBadBlock = 2 };

struct Step {
    const Call* call;
    const Item* items;
    const Reduction* reductions;
    int num_items, num_reductions;
    float* partials;
    std::atomic<int> next_item{0}, next_reduction{0};
    std::atomic<int64_t> status{kDone}, bad{0};

    void fail(Status why, int64_t what) {
        bad = what;
        status = why;
    }
};

template <class Storage>
void write_rows(Step& step, int64_t first, int64_t last) {
    const Call& call = *step.call;
    const int64_t token = call.num_kv_heads * call.head_dim;
    const std::size_t head_bytes = call.head_dim * sizeof(Storage);
    for (int64_t row = first; row < last; ++row) {
        const int64_t slot = call.slot_mapping[row];
        if (slot < 0 || slot >= call.num_slots) {
            step.fail(kBadSlot, slot);
            return;
        }
        for (int64_t head = 0; head < call.num_kv_heads; ++head) {
            const int64_t target = slot * token + head * call.head_dim;
            std::memcpy(
                static_cast<Storage*>(call.keys) + target,
                static_cast<const Storage*>(call.key) + row * call.key_row_stride +
                    head * call.key_head_stride,
                head_bytes);
            std::memcpy(
                static_cast<Storage*>(call.values) + target,
                static_cast<const Storage*>(call.value) + row * call.value_row_stride +
                    head * call.value_head_stride,
                head_bytes);
        }
    }
}

// What each thread of the team does.
template <class Element>
void work(Step& step) {
    const Call& call = *step.call;
    const int64_t thread = openmp.thread_num(), threads = openmp.num_threads();
    write_rows<typename Element::Storage>(
        step, call.num_tokens * thread / threads, call.num_tokens * (thread + 1) / threads);
    openmp.barrier();  // rows may be read by any sequence: equal prompts share blocks
    if (step.status == kDone) {
        static thread_local Scratch scratch;
        for (int i; (i = step.next_item.fetch_add(1)) < step.num_items;) {
            Attention<Element> attention(call, step.items[i], scratch, step.partials);
            if (!attention.run()) step.fail(kBadBlock, attention.bad_block());
        }
    }
    if (step.num_reductions == 0) return;
    openmp.barrier();
    if (step.status != kDone) return;
    for (int i; (i = step.next_reduction.fetch_add(1)) < step.num_reductions;) {
        reduce<Element>(call, step.reductions[i], step.partials);
    }
}

template <class Element>
void work_entry(void* step) {
    work<Element>(*static_cast<Step*>(step));
}

#if defined(__AVX512BF16__)
using Bfloat = BfloatPairElement;
#else
using Bfloat = BfloatElement;
#endif

}  // namespace
}  // namespace stepgraph

#define STEPGRAPH_EXPORT __attribute__((visibility("default")))

extern "C" {

STEPGRAPH_EXPORT void stepgraph_use_openmp(
    void* parallel, void* barrier, void* thread_num, void* num_threads) {
    using stepgraph::openmp;
    openmp.parallel = reinterpret_cast<decltype(openmp.parallel)>(parallel);
    openmp.barrier = reinterpret_cast<decltype(openmp.barrier)>(barrier);
    openmp.thread_num = reinterpret_cast<decltype(openmp.thread_num)>(thread_num);
    openmp.num_threads = reinterpret_cast<decltype(openmp.num_threads)>(num_threads);
}

// Returns a Status; bad gets the slot or block id that is outside the cache.
STEPGRAPH_EXPORT int64_t stepgraph_attend(const stepgraph::Call* call, int64_t* bad) {
    using namespace stepgraph;
    const int32_t* header = call->work;
    Step step;
    step.call = call;
    step.num_items = header[0];
    step.num_reductions = header[1];
    step.items = reinterpret_cast<const Item*>(call->work + kWorkColumns);
    step.reductions =
        reinterpret_cast<const Reduction*>(call->work + (1 + header[0]) * kWorkColumns);
    static thread_local std::vector<float> partials;
    const std::size_t num_floats = header[2] * partial_stride(*call);
    if (partials.size() < num_floats) partials.resize(num_floats);
    step.partials = partials.data();
    void (*const entries[])(void*) = {
        work_entry<FloatElement>, work_entry<Bfloat>, work_entry<HalfElement>};
    openmp.parallel(entries[call->dtype], &step, header[3], 0);
    *bad = step.bad;
    return step.status;
}

}  // extern "C"
