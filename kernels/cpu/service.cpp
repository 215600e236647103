// Experts for another processor: a GPU in the middle of a captured step rings, the pool computes.
//
// The thread never calls the GPU's driver. It spins on the bell while a step is expected, and the
// pool with it; it pauses between looks where nobody has rung for long, and sleeps on a futex when
// no step is under way.
#include <pthread.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "ops.h"

using namespace ftd;

namespace {

// Some milliseconds: between questions lie layers that ask nothing, for longer than the pool spins
// by itself, and waking it costs 50 µs.
constexpr int kSpins = 1 << 17;
constexpr long kPauseNs = 50 * 1000;  // then a look each 50 µs: a prompt may be computing

uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

}  // namespace

struct FtdService {
  FtdService(FtdOps* ops, const FtdMailbox& mailbox)
      : ops_(ops), box_(mailbox), answered_(load(mailbox.bell)), thread_([this] { run(); }) {
    pthread_setname_np(thread_.native_handle(), "ftd-experts");
  }

  ~FtdService() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    thread_.join();
  }

  void expect() {
    if (expected_.fetch_add(1) == 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }  // it is asleep or has not looked yet
      wake_.notify_all();
    }
    ops_->pool.wake();
  }

  void done() { expected_.fetch_sub(1); }
  int32_t fault() const { return fault_.load(); }
  void stick() { stuck_.store(true); }

 private:
  void run() {
    while (wait_for_bell()) {
      if (stuck_.load()) {
        keep_awake(false);
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_.load(); });
        return;
      }
      const int32_t layer = box_.head[0], tokens = box_.head[1];
      int32_t fault = FTD_BAD_SHAPE;
      if (layer >= 0 && layer < box_.layers && tokens >= 0 && tokens <= box_.most_tokens) {
        const Part part = {box_.head[2], box_.head[3]};
        fault = moe(ops_, box_.x, box_.act, box_.ids, nullptr,
                    box_.address + int64_t(layer) * box_.experts, &box_.layout, &box_.activation,
                    box_.y, tokens, box_.routes, box_.experts, part);
      }
      if (fault) fault_.store(fault);  // answered all the same: whoever asked must not wait
      __atomic_store_n(box_.answer, answered_, __ATOMIC_RELEASE);
    }
    keep_awake(false);
  }

  // False: stop. A number is answered once, and the bell's last one counts.
  bool wait_for_bell() {
    for (int spins = 0;; ++spins) {
      if (stop_.load(std::memory_order_relaxed)) return false;
      const uint32_t bell = load(box_.bell);
      if (bell != answered_) {
        answered_ = bell;
        return true;
      }
      if (expected_.load(std::memory_order_relaxed) <= 0) {
        keep_awake(false);
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_.load() || expected_.load() > 0; });
        spins = 0;
      } else if (spins >= kSpins) {
        keep_awake(false);
        const timespec pause = {0, kPauseNs};
        nanosleep(&pause, nullptr);
      } else {
        keep_awake(true);
        relax();
      }
    }
  }

  void keep_awake(bool awake) {
    if (awake != awake_) ops_->pool.keep_awake(awake);
    awake_ = awake;
  }

  FtdOps* ops_;
  const FtdMailbox box_;
  uint32_t answered_;
  bool awake_ = false;  // the pool is kept so
  std::atomic<int32_t> expected_{0}, fault_{0};
  std::atomic<bool> stop_{false}, stuck_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;  // the last member: it runs when all others exist
};

extern "C" {

FtdService* ftd_service_start(FtdOps* ops, const FtdMailbox* mailbox) {
  try {
    return new FtdService(ops, *mailbox);
  } catch (...) {  // memory, or the machine's limit on threads
    return nullptr;
  }
}

void ftd_service_stop(FtdService* service) { delete service; }
void ftd_service_expect(FtdService* service) { service->expect(); }
void ftd_service_done(FtdService* service) { service->done(); }
int32_t ftd_service_fault(FtdService* service) { return service->fault(); }
void ftd_service_stick(FtdService* service) { service->stick(); }

}  // extern "C"
