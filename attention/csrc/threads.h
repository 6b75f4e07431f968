// Jobs that several threads share, and tasks that they take by turns.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STEPGRAPH_EXPORT __attribute__((visibility("default")))

namespace stepgraph {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// stepgraph_run_job of native_threads.cpp, which all libraries share.
using RunJob = void (*)(void (*)(void*), void*, void (*)(void*), int);
inline RunJob run_job = nullptr;

// Calls job->work() on this thread and on up to num_threads - 1 others, each of which may come at
// any time, or not at all, and may still be at it when this returns. So work() must be done when
// any one thread returns from it, and a later one must touch nothing but the job.
template <class J>
void run_shared(const std::shared_ptr<J>& job, int num_threads) {
    if (num_threads == 1) return job->work();
    run_job(
        [](void* state) { (*static_cast<std::shared_ptr<J>*>(state))->work(); },
        new std::shared_ptr<J>(job),
        [](void* state) { delete static_cast<std::shared_ptr<J>*>(state); }, num_threads - 1);
}

// Tasks that threads take by turns. Threads wait for the tasks, not for each other: one that the
// system runs late finds all done, where at a barrier everybody would wait for it.
class alignas(64) TaskQueue {
public:
    explicit TaskQueue(int count) : count_(count) {}

    template <class Function>
    void run(const Function& function) {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
            function(i);
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void wait() const {
        for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
            if (spins < kSpins) {
                pause_briefly();
            } else {
                sched_yield();
            }
        }
    }

private:
    static constexpr int kSpins = 1000;

    const int count_;
    std::atomic<int> next_{0}, done_{0};
};

// Work in phases: no task of a phase begins before all tasks of the phase before it are done.
class Phases {
public:
    void add(int num_tasks, std::function<void(int)> task) {
        phases_.emplace_back(num_tasks, std::move(task));
    }

    // Each thread calls it when it is done.
    void set_at_end(void (*at_end)()) { at_end_ = at_end; }

    void work() {
        for (Phase& phase : phases_) {
            phase.queue.run(phase.task);
            phase.queue.wait();
        }
        if (at_end_) at_end_();
    }

private:
    struct Phase {
        Phase(int num_tasks, std::function<void(int)> of_task)
            : queue(num_tasks), task(std::move(of_task)) {}

        TaskQueue queue;
        std::function<void(int)> task;
    };

    std::deque<Phase> phases_;
    void (*at_end_)() = nullptr;
};

}  // namespace stepgraph

extern "C" STEPGRAPH_EXPORT void stepgraph_share_threads(void* run_job) {
    stepgraph::run_job = reinterpret_cast<stepgraph::RunJob>(run_job);
}
