// The C interface: write a step's keys and values into the pages, then attend.

#include <atomic>
#include <vector>

#include "attend.h"
#include "threads.h"

namespace stepgraph {
namespace {

constexpr int kRowsPerTask = 16;

enum Status : int64_t { kDone = 0, kBadSlot = 1, kBadBlock = 2 };

struct Step {
    explicit Step(const Call& of)
        : call(of),
          header(of.work),
          items(reinterpret_cast<const Item*>(of.work + kWorkColumns)),
          reductions(reinterpret_cast<const Reduction*>(items + header[0])),
          writes(static_cast<int>((of.num_tokens + kRowsPerTask - 1) / kRowsPerTask)),
          attentions(header[0]),
          merges(header[1]) {}

    const Call& call;
    const int32_t* header;  // items, reductions, partial results, threads
    const Item* items;
    const Reduction* reductions;
    float* partials = nullptr;
    TaskQueue writes, attentions, merges;
    std::atomic<int64_t> status{kDone}, bad{0};

    void fail(Status why, int64_t what) {
        bad = what;
        status = why;
    }
};

template <class Storage>
void write_rows(Step& step, int64_t first, int64_t last) {
    const Call& call = step.call;
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
    const Call& call = step.call;
    step.writes.run([&](int64_t task) {
        const int64_t first = task * kRowsPerTask, last = first + kRowsPerTask;
        write_rows<typename Element::Storage>(step, first, std::min(last, call.num_tokens));
    });
    step.writes.wait();  // rows may be read by any sequence: equal prompts share blocks
    if (step.status != kDone) return;
    static thread_local Scratch scratch;
    step.attentions.run([&](int task) {
        Attention<Element> attention(call, step.items[task], scratch, step.partials);
        if (!attention.run()) step.fail(kBadBlock, attention.bad_block());
    });
    if (step.header[1] == 0) return;
    step.attentions.wait();
    if (step.status != kDone) return;
    step.merges.run(
        [&](int task) { reduce<Element>(call, step.reductions[task], step.partials); });
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

extern "C" {

// Returns a Status; bad gets the slot or block id that is outside the cache.
STEPGRAPH_EXPORT int64_t stepgraph_attend(const stepgraph::Call* call, int64_t* bad) {
    using namespace stepgraph;
    Step step(*call);
    static thread_local std::vector<float> partials;
    const std::size_t num_floats = step.header[2] * partial_stride(*call);
    if (partials.size() < num_floats) partials.resize(num_floats);
    step.partials = partials.data();
    void (*const entries[])(void*) = {
        work_entry<FloatElement>, work_entry<Bfloat>, work_entry<HalfElement>};
    openmp.parallel(entries[call->dtype], &step, step.header[3], 0);
    *bad = step.bad;
    return step.status;
}

}  // extern "C"
