// Making and freeing what the operations work with.
#include "isas.h"
#include "ops.h"

using namespace ftd;

namespace {

// Full speed on Sapphire Rapids, where none costs a fifth, and 94 % of the best on Zen 4;
// calibration finds what suits this machine.
constexpr int64_t kPrefetchBytes = 8192;

}  // namespace

extern "C" {

int32_t ftd_abi(void) { return FTD_CPU_ABI; }

const char* ftd_isa_name(int32_t index) { return isa_name(index); }

int32_t ftd_isa_supported(int32_t index) { return isa_kernels(index) != nullptr; }

FtdPool* ftd_pool_create(const FtdPoolPlan* plan) {
  try {
    return new FtdPool(*plan);
  } catch (...) {  // memory, or the machine's limit on threads: the caller reports it
    return nullptr;
  }
}

void ftd_pool_destroy(FtdPool* pool) { delete pool; }
void ftd_pool_wake(FtdPool* pool) { pool->pool.wake(); }
int64_t ftd_pool_finished(FtdPool* pool) { return pool->pool.finished(); }
int32_t ftd_pool_parked(FtdPool* pool) { return pool->pool.parked(); }
void ftd_pool_place(FtdPool* pool, int64_t begin, int64_t bytes, int32_t node) {
  pool->pool.place(begin, bytes, node);
}

FtdOps* ftd_ops_create(FtdPool* pool, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (!kernels) return nullptr;
  FtdOps* ops = new FtdOps{pool->pool, *kernels, {}};
  for (auto& format : ops->prefetch_bytes)
    for (int64_t& bytes : format) bytes = kPrefetchBytes;
  return ops;
}

void ftd_ops_destroy(FtdOps* ops) { delete ops; }

void ftd_ops_prefetch(FtdOps* ops, int32_t format, int32_t several, int32_t bytes) {
  if (known_format(format)) ops->prefetch_bytes[format][several != 0] = bytes;
}

}  // extern "C"
