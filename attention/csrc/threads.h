// Teams of threads, and tasks that they take by turns.
//
// Threads come from the OpenMP runtime that torch itself runs on. The caller hands its entry
// point over, so a library links none and there is never a second pool of threads.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STEPGRAPH_EXPORT __attribute__((visibility("default")))

namespace stepgraph {

struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
};

inline OpenMP openmp;

// Tasks that threads take by turns. Threads then wait for the tasks, not for each other: one
// that the system runs late finds all done, where at a barrier everybody would wait for it.
class alignas(64) TaskQueue {
public:
    explicit TaskQueue(int count) : count_(count), share_(1 + count / kShares) {}

    template <class Function>
    void run(const Function& function) {
        for (int i; (i = next_.fetch_add(share_, std::memory_order_relaxed)) < count_;) {
            const int end = std::min(i + share_, count_);
            for (int task = i; task < end; ++task) function(task);
            done_.fetch_add(end - i, std::memory_order_release);
        }
    }

    void wait() const {
        for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
            if (spins < kSpins) {
                pause();
            } else {
                sched_yield();
            }
        }
    }

private:
    static constexpr int kSpins = 1000;
    static constexpr int kShares = 64;  // more of them, and taking one costs more than it evens out

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    const int count_, share_;
    std::atomic<int> next_{0}, done_{0};
};

// Work in phases: no task of a phase begins before all tasks of the phase before it are done.
class Phases {
public:
    void add(int num_tasks, std::function<void(int)> task) {
        phases_.emplace_back(num_tasks, std::move(task));
    }

    // Runs everything; each thread calls at_end when it is done.
    void run(int num_threads, void (*at_end)()) {
        at_end_ = at_end;
        openmp.parallel(
            [](void* self) { static_cast<Phases*>(self)->work(); }, this, num_threads, 0);
    }

private:
    struct Phase {
        Phase(int num_tasks, std::function<void(int)> of_task)
            : queue(num_tasks), task(std::move(of_task)) {}

        TaskQueue queue;
        std::function<void(int)> task;
    };

    void work() {
        for (Phase& phase : phases_) {
            phase.queue.run(phase.task);
            phase.queue.wait();
        }
        at_end_();
    }

    std::deque<Phase> phases_;
    void (*at_end_)() = nullptr;
};

}  // namespace stepgraph

extern "C" STEPGRAPH_EXPORT void stepgraph_use_openmp(void* parallel) {
    stepgraph::openmp.parallel = reinterpret_cast<decltype(stepgraph::openmp.parallel)>(parallel);
}
