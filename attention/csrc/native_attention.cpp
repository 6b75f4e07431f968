// The C interface: write a step's keys and values into the pages, then attend.

#include <atomic>
#include <deque>
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
          reductions(reinterpret_cast<const Reduction*>(items + header[0])) {}

    const Call& call;
    const int32_t* header;  // items, reductions, partial results, threads
    const Item* items;
    const Reduction* reductions;
    float* partials = nullptr;
    std::atomic<int64_t> status{kDone}, bad{0};

    void fail(Status why, int64_t what) {
        bad = what;
        status = why;
    }
};

template <class Storage>
void write_rows(Step& step, int64_t first, int64_t last) {
    const Call& call = step.call;
    const std::size_t head_bytes = call.head_dim * sizeof(Storage);
    for (int64_t row = first; row < last; ++row) {
        const int64_t slot = call.slot_mapping[row];
        if (slot < 0 || slot >= call.num_slots) {
            step.fail(kBadSlot, slot);
            return;
        }
        for (int64_t head = 0; head < call.num_kv_heads; ++head) {
            const int64_t target = slot * call.slot_stride + head * call.page_head_stride;
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

// What each thread of a team does; returns when everything is done, or has failed.
template <class Element>
void work(Step& step, Worker& worker) {
    const Call& call = step.call;
    const int64_t num_writes = (call.num_tokens + kRowsPerTask - 1) / kRowsPerTask;
    worker.share(static_cast<int>(num_writes), [&](int64_t task) {
        const int64_t first = task * kRowsPerTask, last = first + kRowsPerTask;
        write_rows<typename Element::Storage>(step, first, std::min(last, call.num_tokens));
    });
    // All are written, since rows may be read by any sequence: equal prompts share blocks.
    if (step.status != kDone) return;
    static thread_local Scratch scratch;
    const int num_items = step.header[0];
    worker.take_turns(num_items, [&](int task) {
        Attention<Element> attention(call, step.items[task], scratch, step.partials);
        const auto next_item = [&]() -> const Item* {
            const int next = worker.next_turn();
            return next < num_items ? &step.items[next] : nullptr;
        };
        if (!attention.run(next_item)) step.fail(kBadBlock, attention.bad_block());
    });
    if (step.status != kDone || step.header[1] == 0) return;
    worker.share(step.header[1], [&](int task) {
        reduce<Element>(call, step.reductions[task], step.partials);
    });
}

#if defined(__AVX512BF16__)
using Bfloat = BfloatPairElement;
#else
using Bfloat = BfloatElement;
#endif

void work_on(Step& step, Worker& worker) {
    void (*const by_dtype[])(Step&, Worker&) = {
        work<FloatElement>, work<Bfloat>, work<HalfElement>};
    by_dtype[step.call.dtype](step, worker);
}

// The layers of one step. They run one after another, so they share partial results.
class Steps {
public:
    Steps(const Call* calls, int64_t count) {
        std::size_t num_floats = 0;
        for (int64_t i = 0; i < count; ++i) {
            const Step& step = steps_.emplace_back(calls[i]);
            const std::size_t needed = step.header[2] * partial_stride(calls[i]);
            num_floats = std::max(num_floats, needed);
        }
        static thread_local std::vector<float> partials;
        if (partials.size() < num_floats) partials.resize(num_floats);
        for (Step& step : steps_) step.partials = partials.data();
    }

    Step& operator[](int64_t index) { return steps_[index]; }

    // The first layer's that failed, if one did.
    int64_t status(int64_t* bad) const {
        for (const Step& step : steps_) {
            if (step.status == kDone) continue;
            *bad = step.bad;
            return step.status;
        }
        return kDone;
    }

private:
    std::deque<Step> steps_;  // never moved: queues can't be
};

}  // namespace
}  // namespace stepgraph

extern "C" {

// Returns a Status; bad gets the slot or block id that is outside the cache.
STEPGRAPH_EXPORT int64_t stepgraph_attend(const stepgraph::Call* call, int64_t* bad) {
    using namespace stepgraph;
    Steps steps(call, 1);
    run_team(steps[0].header[3], [&](Worker& worker) { work_on(steps[0], worker); });
    return steps.status(bad);
}

// The functions of an AttentionTeam.

STEPGRAPH_EXPORT void* stepgraph_attention_begin(const void* calls, int64_t count) {
    return new stepgraph::Steps(static_cast<const stepgraph::Call*>(calls), count);
}

STEPGRAPH_EXPORT void stepgraph_attention_work(
    void* steps, int64_t index, stepgraph::Worker* worker) {
    stepgraph::work_on((*static_cast<stepgraph::Steps*>(steps))[index], *worker);
}

STEPGRAPH_EXPORT int64_t stepgraph_attention_end(void* steps, int64_t* bad) {
    const auto* done = static_cast<stepgraph::Steps*>(steps);
    const int64_t status = done->status(bad);
    delete done;
    return status;
}

}  // extern "C"
