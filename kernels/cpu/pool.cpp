#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <new>

namespace ftd {
namespace {

constexpr uint64_t kNoUnits = 0xffffffffu;  // low half of a ticket nobody can claim
constexpr int kLinesPerLook = 8;            // asked for between two looks whether a job is over
constexpr int kSpinsPerClock = 64;          // looking at the clock costs more than a pause
constexpr int kSpinsBeforeYield = 1 << 14;  // some 200 µs: the thread we wait for may need our core

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr,
          nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr,
          nullptr, 0);
}

void pin(std::thread& thread, const int32_t* begin, const int32_t* end) {
  if (begin == end) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t* cpu = begin; cpu != end; ++cpu) {
    if (*cpu >= 0 && *cpu < CPU_SETSIZE) CPU_SET(*cpu, &set);
  }
  pthread_setaffinity_np(thread.native_handle(), sizeof set,
                         &set);  // a wish: a refusal changes no result
}

}  // namespace

Arena::~Arena() {
  for (Chunk& chunk : chunks_) std::free(chunk.data);
}

void Arena::reset() {
  used_ = 0;
  if (chunks_.size() < 2) return;
  size_t total = 0;
  for (Chunk& chunk : chunks_) {
    total += chunk.bytes;
    std::free(chunk.data);
  }
  chunks_.clear();
  take(total);  // one chunk for everything next time
  used_ = 0;
}

void* Arena::take(size_t bytes) {
  bytes = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) {
    const size_t size = bytes < (64 << 10) ? (64 << 10) : bytes;
    char* data = static_cast<char*>(std::aligned_alloc(kCacheLine, size));
    if (!data) throw std::bad_alloc();
    chunks_.push_back({data, size});
    used_ = 0;
  }
  void* piece = chunks_.back().data + used_;
  used_ += bytes;
  return piece;
}

Pool::Pool(const FtdPoolPlan& plan)
    : threads_(plan.threads),
      nodes_(plan.nodes),
      park_after_ns_(int64_t(plan.park_after_us) * 1000),
      node_(plan.node, plan.node + plan.threads),
      node_threads_(plan.nodes, 0),
      runs_(new Run[plan.threads]),
      queues_(new Queue[plan.threads]),
      own_(new Own[plan.threads]) {
  for (int node : node_) ++node_threads_[node];
  for (int n = 1; n < nodes_; ++n) node_threads_[n] += node_threads_[n - 1];
  for (int t = 0; t < threads_; ++t) queues_[t].ticket.store(kNoUnits);
  try {
    for (int t = 1; t < threads_; ++t) {
      workers_.emplace_back([this, t] { worker(t); });
      char name[16];  // the kernel's limit
      snprintf(name, sizeof name, "ftd-cpu-%hd", short(t));
      pthread_setname_np(workers_.back().native_handle(), name);
      pin(workers_.back(), plan.cpus + plan.cpu_end[t - 1], plan.cpus + plan.cpu_end[t]);
    }
  } catch (...) {  // the machine's limit on threads
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_.store(true);
  wake();
  for (std::thread& thread : workers_) thread.join();
}

void Pool::wake() {
  signal_.fetch_add(1);
  if (parked_.load() > 0) futex_wake_all(signal_);
}

void Pool::keep_awake(bool awake) {
  kept_awake_.store(awake);
  if (awake) wake();
}

void Pool::place(int64_t begin, int64_t bytes, int node) {
  std::lock_guard<std::mutex> lock(turn_);
  ranges_.push_back({begin, begin + bytes, node});
}

int Pool::node_of(int64_t address) const {
  // the newest first: memory that was freed and placed again
  for (size_t i = ranges_.size(); i-- > 0;) {
    if (ranges_[i].begin <= address && address < ranges_[i].end) return ranges_[i].node;
  }
  return 0;
}

void Pool::start(int64_t units, Body body, void* context, const int64_t* ends, const Ahead* ahead) {
  if (threads_ == 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit)
      body(context, unit, unit + 1 < units ? unit + 1 : -1, 0);
    finished_.fetch_add(units, std::memory_order_relaxed);
    target_ += units;
    return;
  }
  target_ += units;
  publish(units, body, context, ends, ahead);
  work(generation_.load(std::memory_order_relaxed), 0);
  if (ahead)
    fetch(queues_[0], [&] { return finished_.load(std::memory_order_relaxed) == target_; });
  for (int spins = 0; finished_.load(std::memory_order_acquire) != target_; ++spins) {
    if (spins < kSpinsBeforeYield) {
      relax();
    } else {
      sched_yield();
    }
  }
}

void Pool::deal(int64_t units, const int64_t* ends, Run* runs) const {
  int64_t begin = 0;
  for (int t = 0; t < threads_; ++t) runs[t] = {0, 0};
  for (int n = 0; n < nodes_; ++n) {
    const int64_t threads = node_threads_[n] - (n ? node_threads_[n - 1] : 0);
    if (threads == 0) continue;  // its units go with the next node's, or with the last one's
    const int64_t end = node_threads_[n] == threads_ ? units
                        : ends                       ? ends[n]
                                                     : units * node_threads_[n] / threads_;
    for (int64_t t = 0, i = 0; t < threads_; ++t) {
      if (node_[t] != n) continue;
      runs[t].first = begin + (end - begin) * i / threads;
      runs[t].end = begin + (end - begin) * ++i / threads;
    }
    begin = end;
  }
}

void Pool::publish(int64_t units, Body body, void* context, const int64_t* ends,
                   const Ahead* ahead) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  const uint64_t high = uint64_t(generation) << 32;
  // A late thread of the job before must not pair the old ticket with the new description: close
  // the tickets first; every load of the description in work() acquires that.
  for (int t = 0; t < threads_; ++t)
    queues_[t].ticket.store(high | kNoUnits, std::memory_order_relaxed);
  body_.store(body, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  deal(units, ends, runs_.get());
  for (int t = 0; t < threads_; ++t) {
    Queue& queue = queues_[t];
    const Ahead next = ahead ? ahead[t] : Ahead();
    queue.from.store(next.from, std::memory_order_relaxed);
    queue.pieces.store(next.pieces, std::memory_order_relaxed);
    queue.stride.store(next.stride, std::memory_order_relaxed);
    queue.bytes.store(next.bytes, std::memory_order_relaxed);
    queue.end.store(runs_[t].end, std::memory_order_release);
    queue.ticket.store(high | uint64_t(runs_[t].first), std::memory_order_release);
  }
  generation_.store(generation, std::memory_order_release);
  wake();
}

// Its own run, then those of its node's threads, then the others'.
void Pool::work(uint32_t generation, int thread) {
  work_off(queues_[thread], generation, thread);
  for (const bool near : {true, false}) {
    for (int i = 1; i < threads_; ++i) {
      const int other = (thread + i) % threads_;
      if ((node_[other] == node_[thread]) == near) work_off(queues_[other], generation, thread);
    }
  }
}

void Pool::work_off(Queue& queue, uint32_t generation, int thread) {
  const Body body = body_.load(std::memory_order_acquire);
  void* context = context_.load(std::memory_order_acquire);
  const int64_t end = queue.end.load(std::memory_order_acquire);
  uint64_t ticket = queue.ticket.load(std::memory_order_acquire);
  while (uint32_t(ticket >> 32) == generation && int64_t(ticket & kNoUnits) < end) {
    if (queue.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      const int64_t unit = int64_t(ticket & kNoUnits);
      const bool own = &queue == &queues_[thread];
      body(context, unit, own && unit + 1 < end ? unit + 1 : -1, thread);
      finished_.fetch_add(1, std::memory_order_release);
      ticket = queue.ticket.load(std::memory_order_acquire);
    }
  }
}

// What is read here may belong to a later job: asking for memory in vain does no harm.
template <class Over>
void Pool::fetch(const Queue& queue, Over&& over) {
  const char* from = queue.from.load(std::memory_order_relaxed);
  const int64_t pieces = queue.pieces.load(std::memory_order_relaxed);
  const int64_t stride = queue.stride.load(std::memory_order_relaxed);
  const int64_t bytes = queue.bytes.load(std::memory_order_relaxed);
  for (int64_t piece = 0, line = 0; piece < pieces; ++piece, from += stride) {
    for (int64_t at = 0; at < bytes; at += kCacheLine) {
      if (line++ % kLinesPerLook == 0 && over()) return;
      __builtin_prefetch(from + at, 0, 2);
    }
  }
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (wait_for_job(seen)) {
    seen = generation_.load(std::memory_order_acquire);
    work(seen, thread);
    fetch(queues_[thread], [&] { return generation_.load(std::memory_order_relaxed) != seen; });
  }
}

bool Pool::wait_for_job(uint32_t seen) {
  for (;;) {
    const uint32_t signal = signal_.load();
    const int64_t deadline = now_ns() + park_after_ns_;
    for (int spins = 1; spins % kSpinsPerClock || now_ns() < deadline; ++spins) {
      if (stop_.load(std::memory_order_relaxed)) return false;
      if (generation_.load(std::memory_order_acquire) != seen) return true;
      relax();
    }
    if (kept_awake_.load()) continue;
    parked_.fetch_add(1);
    if (!stop_.load())
      futex_wait(signal_, signal);  // returns at once if anything was signalled meanwhile
    parked_.fetch_sub(1);
  }
}

}  // namespace ftd
