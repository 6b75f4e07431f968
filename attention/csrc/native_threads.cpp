// Threads that help with a job as long as they can be had.
//
// A team as of OpenMP ends a job only when each of its threads has come and gone. Where other
// programs want the processors too, the last one may come milliseconds late, to find nothing to
// do, and a step of a model has a hundred jobs. Here the caller does the job; helpers that come in
// time share its tasks, and those that come late find it done and leave, whoever has gone on.

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "threads.h"

namespace stepgraph {
namespace {

class Job {
public:
    Job(void (*work)(void*), void* state, void (*drop)(void*), int num_helpers)
        : work_(work), state_(state), drop_(drop), places_(num_helpers) {}
    ~Job() { drop_(state_); }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    void work() const { work_(state_); }
    bool wants_helper() { return places_.fetch_sub(1, std::memory_order_relaxed) > 0; }

private:
    void (*work_)(void*);
    void* state_;
    void (*drop_)(void*);
    std::atomic<int> places_;
};

// Never destroyed, since its threads run until the process ends.
class Pool {
public:
    // Runs the job on this thread and on up to so many helpers; returns when this thread is done.
    void run(const std::shared_ptr<Job>& job, int num_helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (; num_threads_ < num_helpers; ++num_threads_) {
                std::thread([this] { help(); }).detach();
            }
            job_ = job;
            number_.fetch_add(1, std::memory_order_release);
        }
        if (num_sleeping_.load(std::memory_order_acquire) > 0) wake_.notify_all();
        job->work();
        std::lock_guard<std::mutex> lock(mutex_);
        if (job_ == job) job_.reset();
    }

private:
    // Longer than the gaps between a step's jobs: waking a thread takes longer than most jobs.
    static constexpr int kSpins = 20000;

    void help() {
        for (uint64_t seen = 0;;) {
            wait_for_other(seen);
            std::shared_ptr<Job> job;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                seen = number_.load(std::memory_order_relaxed);
                job = job_;
            }
            if (job && job->wants_helper()) job->work();
        }
    }

    void wait_for_other(uint64_t seen) {
        for (int spins = 0; spins < kSpins; ++spins) {
            if (number_.load(std::memory_order_acquire) != seen) return;
            pause_briefly();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        num_sleeping_.fetch_add(1, std::memory_order_release);
        wake_.wait(lock, [&] { return number_.load(std::memory_order_relaxed) != seen; });
        num_sleeping_.fetch_sub(1, std::memory_order_release);
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<Job> job_;         // the newest that isn't done
    std::atomic<uint64_t> number_{0};  // counts jobs
    std::atomic<int> num_sleeping_{0};
    int num_threads_ = 0;
};

// The process's own: a forked one has none of its parent's threads.
Pool& pool() {
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) {
        pool = new Pool;
        owner = getpid();
    }
    return *pool;
}

}  // namespace
}  // namespace stepgraph

extern "C" STEPGRAPH_EXPORT void stepgraph_run_job(
    void (*work)(void*), void* state, void (*drop)(void*), int num_helpers) {
    const auto job = std::make_shared<stepgraph::Job>(work, state, drop, num_helpers);
    stepgraph::pool().run(job, num_helpers);
}
