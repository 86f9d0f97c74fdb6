// A thread pool that runs a step phase by phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "system.h"
#include "vec.h"

namespace ramet {

// A fixed number of threads, including the caller of `run`.
//
// All threads execute the same function. In it, they take pieces of work from a shared counter (`take`) and wait for
// each other at a barrier after each phase. A waiting thread spins for some tens of microseconds, longer than most
// phases take, and then sleeps in the kernel, so that an idle engine uses no CPU.
class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; ++i) workers_.emplace_back([this, i] { work(i); });
    }

    ~Team() {
        stop_ = true;
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int size() const { return size_; }

    // Run job(thread index) on every thread. Returns when all threads are done.
    template <class Job>
    void run(const Job& job) {
        job_ = [](const void* context, int thread) { (*static_cast<const Job*>(context))(thread); };
        context_ = &job;
        next_.store(0, std::memory_order_relaxed);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        job(0);
        barrier();
    }

    // The number of the next piece of work in this phase, counted from 0.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // End a phase: wait for all threads and reset the counter of pieces.
    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_while(phase_, phase);
        }
    }

  private:
    static void wait_while(std::atomic<int>& value, int old) {
        uint64_t start = ticks();
        while (value.load(std::memory_order_acquire) == old) {
            pause();
            if (ticks() - start > spin_ticks()) value.wait(old, std::memory_order_acquire);
        }
    }

    void work(int thread) {
        begin_thread();
        for (int epoch = 0;; ++epoch) {
            wait_while(epoch_, epoch);
            if (stop_) return;
            job_(context_, thread);
            barrier();
        }
    }

    const int size_;
    bool stop_ = false;
    void (*job_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    std::vector<std::thread> workers_;
    // Each on its own cache line, because all threads write to them.
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

// The phases of a thread: shared with the team, or its own if the thread works alone on its own rows.
class Share {
  public:
    Share(Team& team, bool alone) : team_(team), alone_(alone) {}

    int size() const { return alone_ ? 1 : team_.size(); }
    int64_t take() { return alone_ ? next_++ : team_.take(); }
    void barrier() {
        if (alone_) {
            next_ = 0;
        } else {
            team_.barrier();
        }
    }

  private:
    Team& team_;
    const bool alone_;
    int64_t next_ = 0;
};

}  // namespace ramet
