// Teams of threads, and how they share tasks.
//
// Threads come from the OpenMP runtime that torch itself runs on. The caller hands its entry
// point over, so a library links none and there is never a second pool of threads.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STEPGRAPH_EXPORT __attribute__((visibility("default")))

namespace stepgraph {

struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
};

inline OpenMP openmp;

// What the threads of a team have in common. They go through the same phases, each a number of
// tasks that lie in as many shares of neighbours as there are threads.
class Team {
public:
    explicit Team(int num_threads) : shares_(std::max(1, num_threads)) {}

private:
    friend class Worker;

    // In a cache line of its own: where two cores take turns at writing a line, each write takes
    // as long as a small task.
    struct alignas(64) Share {
        std::atomic<uint64_t> next{0};  // a phase, and the next task of this share in it
    };

    std::vector<Share> shares_;
    alignas(64) std::atomic<int> num_workers_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};  // tasks of all phases so far
};

// One thread of a team. All of them make the same calls in the same order. They wait for the
// tasks, not for each other: one that the system runs late finds all done, where at a barrier
// everybody would wait for it.
class Worker {
public:
    explicit Worker(Team& team)
        : team_(team), index_(team.num_workers_.fetch_add(1, std::memory_order_relaxed)) {}

    // Below the team's size.
    int index() const { return index_; }

    // A phase. Neighbouring tasks read neighbouring memory, so a thread works on its own share,
    // then helps with the others'. Returns when all tasks are done.
    template <class Function>
    void share(int num_tasks, const Function& task) {
        run(num_tasks, static_cast<int>(team_.shares_.size()), task);
    }

    // A phase whose tasks all threads take by turns, in order.
    template <class Function>
    void take_turns(int num_tasks, const Function& task) {
        run(num_tasks, 1, task);
    }

    // Within such a phase: the task that is next, if there is one. Another thread may take it.
    int next_turn() const {
        return static_cast<int>(team_.shares_[0].next.load(std::memory_order_relaxed));
    }

private:
    static constexpr int kSpins = 1000;

    template <class Function>
    void run(int num_tasks, int num_shares, const Function& task) {
        ++phase_;
        num_tasks_ += num_tasks;
        int num_done = 0;
        for (int i = 0; i < num_shares; ++i) {
            const int64_t share = (index_ + i) % num_shares;
            const auto first = static_cast<uint32_t>(num_tasks * share / num_shares);
            const auto end = static_cast<uint32_t>(num_tasks * (share + 1) / num_shares);
            for (uint32_t at; (at = take(team_.shares_[share].next, first, end)) < end;) {
                task(static_cast<int>(at));
                ++num_done;
            }
        }
        if (num_done > 0) team_.num_done_.fetch_add(num_done, std::memory_order_release);
        wait();
    }

    // The next task of a share that begins with `first`; `end` if none is left. A later phase has
    // begun only if none is.
    uint32_t take(std::atomic<uint64_t>& next, uint32_t first, uint32_t end) const {
        uint64_t seen = next.load(std::memory_order_relaxed);
        while (true) {
            const uint32_t phase = seen >> 32;
            const uint32_t task = phase == phase_ ? static_cast<uint32_t>(seen) : first;
            if (phase > phase_ || task >= end) return end;
            const uint64_t taken = uint64_t{phase_} << 32 | (task + 1);
            if (next.compare_exchange_weak(seen, taken, std::memory_order_relaxed)) return task;
        }
    }

    void wait() const {
        const auto& num_done = team_.num_done_;
        for (int spins = 0; num_done.load(std::memory_order_acquire) < num_tasks_; ++spins) {
            if (spins < kSpins) {
                pause();
            } else {
                sched_yield();
            }
        }
    }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    Team& team_;
    const int index_;
    uint32_t phase_ = 0;
    int64_t num_tasks_ = 0;  // of all phases so far
};

// Calls work(worker) on each thread of a team. It may turn out smaller than asked for.
template <class Function>
void run_team(int num_threads, const Function& work) {
    struct Call {
        const Function& work;
        Team team;
    } call{work, Team(num_threads)};
    openmp.parallel(
        [](void* self) {
            Call& call = *static_cast<Call*>(self);
            Worker worker(call.team);
            call.work(worker);
        },
        &call, num_threads, 0);
}

}  // namespace stepgraph

extern "C" STEPGRAPH_EXPORT void stepgraph_use_openmp(void* parallel) {
    stepgraph::openmp.parallel = reinterpret_cast<decltype(stepgraph::openmp.parallel)>(parallel);
}
