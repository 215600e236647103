// A persistent pool of threads that share jobs with their caller.
//
// A job is a number of units. Each thread has a run of them, which it claims one by one, and then
// helps the others. A job is over when every unit is finished, not when every thread has come by:
// so a worker that sleeps or was preempted between units delays nobody, as the others do its work.
// Workers spin for a while after a job, then sleep on a futex.
//
// Fork and join cost about 1 µs while workers spin; waking sleepers costs the caller a system call.
#pragma once

#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "ftd_cpu.h"

namespace ftd {

constexpr int kCacheLine = 64;

// One turn of a loop that waits for another core.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Memory that an operation takes piecewise and gives back as a whole. Grows to what the largest
// operation needed and then allocates no more.
class Arena {
 public:
  ~Arena();
  void reset();
  void* take(size_t bytes);  // aligned to a cache line, contents undefined
  template <class T>
  T* take(size_t count) {
    return static_cast<T*>(take(count * sizeof(T)));
  }

 private:
  struct Chunk {
    char* data;
    size_t bytes;
  };
  std::vector<Chunk> chunks_;
  size_t used_ = 0;  // of the last chunk
};

class Pool {
 public:
  using Body = void (*)(void* context, int64_t unit, int64_t next, int thread);

  explicit Pool(const FtdPoolPlan& plan);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  int nodes() const { return nodes_; }

  // Memory that a thread will read next: so many pieces, each ``stride`` bytes behind the last.
  struct Ahead {
    const char* from = nullptr;
    int64_t pieces = 0, stride = 0, bytes = 0;
  };
  // Units [first, end) of a job.
  struct Run {
    int64_t first, end;
  };

  // Runs work(unit, thread), or work(unit, next, thread) if it takes that, for every unit in [0,
  // units). With ends, node n's threads start with units [ends[n-1], ends[n]) and help the others
  // afterwards; without, nodes get shares by their threads. next: the unit that this thread will
  // most likely have after this one, or -1. ahead: for each thread, what it fetches into its cache
  // when it finds no more units, until the next job comes.
  template <class Work>
  void run(int64_t units, Work&& work, const int64_t* ends = nullptr,
           const Ahead* ahead = nullptr) {
    using Plain = std::remove_reference_t<Work>;
    start(
        units,
        [](void* c, int64_t unit, int64_t next, int thread) {
          (void)next;
          if constexpr (std::is_invocable_v<Plain&, int64_t, int64_t, int>) {
            (*static_cast<Plain*>(c))(unit, next, thread);
          } else {
            (*static_cast<Plain*>(c))(unit, thread);
          }
        },
        const_cast<void*>(static_cast<const void*>(&work)), ends, ahead);
  }
  // The run that each thread begins with.
  void deal(int64_t units, const int64_t* ends, Run* runs) const;

  void wake();
  void keep_awake(bool awake);  // whether workers that have nothing to do go on spinning
  int64_t finished() const { return finished_.load(std::memory_order_relaxed); }
  int parked() const { return parked_.load(std::memory_order_relaxed); }

  void place(int64_t begin, int64_t bytes, int node);
  int node_of(int64_t address) const;  // 0 where nobody said

  // Held for the length of an operation: scratch memory belongs to it alone.
  std::mutex& turn() { return turn_; }
  Arena& shared() { return shared_; }
  Arena& fresh(int thread) {  // the thread's own, empty: for one unit
    own_[thread].arena.reset();
    return own_[thread].arena;
  }

 private:
  // A thread's run of units. Generation of the job in the high half, next unit in the low half: a
  // thread that comes late cannot claim from a job it has not read.
  struct alignas(kCacheLine) Queue {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> end{0};
    std::atomic<const char*> from{nullptr};
    std::atomic<int64_t> pieces{0}, stride{0}, bytes{0};
  };
  struct alignas(kCacheLine) Own {
    Arena arena;
  };
  struct Range {
    int64_t begin, end;
    int node;
  };

  void start(int64_t units, Body body, void* context, const int64_t* ends, const Ahead* ahead);
  void publish(int64_t units, Body body, void* context, const int64_t* ends, const Ahead* ahead);
  template <class Over>
  void fetch(const Queue& queue, Over&& over);
  void work(uint32_t generation, int thread);
  void work_off(Queue& queue, uint32_t generation, int thread);
  void worker(int thread);
  bool wait_for_job(uint32_t seen);
  void stop();

  int threads_, nodes_;
  int64_t park_after_ns_;
  std::vector<int> node_;          // of each thread
  std::vector<int> node_threads_;  // threads up to and including each node
  std::unique_ptr<Run[]> runs_;
  std::unique_ptr<Queue[]> queues_;
  std::unique_ptr<Own[]> own_;
  std::vector<Range> ranges_;
  std::mutex turn_;
  Arena shared_;
  int64_t target_ = 0;  // finished_ when the running job is over

  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(kCacheLine) std::atomic<int64_t> finished_{0};
  alignas(kCacheLine) std::atomic<uint32_t> signal_{0};  // futex: changes with every reason to wake
  std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false}, kept_awake_{false};
  std::vector<std::thread> workers_;
};

}  // namespace ftd
