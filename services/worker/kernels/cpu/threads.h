// A pool whose threads run one function together and meet at barriers inside it: one wake-up a step, not one a kernel.
// Waiting spins briefly, then sleeps in the kernel, so a busy machine is not made busier.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <immintrin.h>

namespace mr {

constexpr int SPINS = 600;

static inline void wait_change(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < SPINS; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Pool {
  public:
    explicit Pool(int threads) : size_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { loop(i); });
    }
    ~Pool() {
        stop_ = true;
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int size() const { return size_; }

    // Runs `body(thread)` on every thread, the caller being thread 0, or on the caller alone; returns when all are done.
    void run(bool alone, const std::function<void(int)>& body) {
        alone_ = alone || size_ == 1;
        if (alone_) return body(0);
        body_ = &body;
        running_.store(size_ - 1, std::memory_order_relaxed);
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
        body(0);
        for (uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;) wait_change(running_, left);
    }
    // Called by all threads inside `run`.
    void barrier() {
        if (alone_) return;
        uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)size_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_change(phase_, phase);
        }
    }

  private:
    void loop(int index) {
        uint32_t seen = 0;
        for (;;) {
            wait_change(start_, seen);
            seen++;
            if (stop_) return;
            (*body_)(index);
            if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
        }
    }
    int size_;
    bool alone_ = false;  // read by the caller, or by others between its store to `start_` and their last to `running_`
    std::atomic<bool> stop_{false};
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<uint32_t> running_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::vector<std::thread> workers_;
};

// Hands out task numbers of successive phases; threads must meet at a barrier between `reset` and use.
class Tasks {
  public:
    explicit Tasks(int phases) : next_(phases) {}
    void reset() {
        for (auto& slot : next_) slot.value.store(0, std::memory_order_relaxed);
    }
    template <typename F>
    void each(int phase, int count, F body) {
        auto& next = next_[phase].value;
        for (int task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(task);
    }

  private:
    struct alignas(64) Slot {
        std::atomic<int> value{0};
    };
    std::vector<Slot> next_;
};

// Whether a call with few rows runs on the caller alone: what comes from memory is soon all that one thread can draw,
// and a barrier waits for whoever else's work has pushed a thread aside. Which is faster depends on the machine and on
// what else it does, so calls are timed both ways, all along. Bits do not depend on it.
class Alone {
  public:
    template <typename F>
    void timed(int rows, const Pool& pool, F call) {
        if (rows >= MANY || pool.size() == 1) return call(false);
        Class& of = classes_[std::bit_width((unsigned)rows)];
        const uint32_t turn = of.calls++;
        const bool probes = turn < 2 * KEPT_TIMES ? turn % 2 : turn % PROBE_EVERY == 0;
        const bool alone = probes != (turn >= 2 * KEPT_TIMES && of.typical(true) < of.typical(false));
        const auto start = std::chrono::steady_clock::now();
        call(alone);
        of.note(alone, std::chrono::duration<float>(std::chrono::steady_clock::now() - start).count());
    }

  private:
    static constexpr int MANY = 8, KEPT_TIMES = 8, TYPICAL = 6, PROBE_EVERY = 32;
    struct Class {
        uint32_t calls = 0, noted[2] = {};
        float times[2][KEPT_TIMES] = {};
        void note(bool alone, float seconds) { times[alone][noted[alone]++ % KEPT_TIMES] = seconds; }
        // The mean of the last times without the longest, which are somebody else's.
        float typical(bool alone) const {
            float sorted[KEPT_TIMES], sum = 0.0f;
            std::copy_n(times[alone], KEPT_TIMES, sorted);
            std::sort(sorted, sorted + KEPT_TIMES);
            for (int i = 0; i < TYPICAL; i++) sum += sorted[i];
            return sum;
        }
    };
    Class classes_[std::bit_width((unsigned)MANY)];
};

}  // namespace mr
