// What every operation has at hand: a pool, the kernels of one instruction set, prefetch distances.
#pragma once

#include "kernels.h"
#include "pool.h"

struct FtdPool {
  explicit FtdPool(const FtdPoolPlan& plan) : pool(plan) {}
  ftd::Pool pool;
};

struct FtdOps {
  ftd::Pool& pool;
  const ftd::Kernels& kernels;
  int64_t prefetch_bytes[ftd::kFormats][2] = {};  // [format][several tokens]
};

namespace ftd {

// One operation's turn on the pool, with the shared scratch memory empty.
class Turn {
 public:
  explicit Turn(Pool& pool) : lock_(pool.turn()) { pool.shared().reset(); }

 private:
  std::lock_guard<std::mutex> lock_;
};

inline bool known(int32_t type) { return type >= 0 && type < kTypes; }
inline bool known_format(int32_t format) { return format >= 0 && format < kFormats; }

inline const void* offset(const void* p, int64_t bytes) {
  return static_cast<const char*>(p) + bytes;
}
inline void* offset(void* p, int64_t bytes) { return static_cast<char*>(p) + bytes; }

// Cost of work: bytes read or, where that is more, a quarter of the multiplications. Below the
// first number the caller does it alone, since handing it out costs as much; pieces of the second
// are long enough to read at full speed, and short enough that the threads end together.
constexpr int64_t kWorthSharing = 48 << 10;
constexpr int64_t kPieceCost = 256 << 10;

inline int64_t cost_of(int64_t bytes, int64_t multiplications) {
  return greatest(bytes, multiplications / 4);
}

// Pool::run where the work as a whole is worth it.
template <class Work>
void share(Pool& pool, int64_t units, int64_t cost, Work&& work, const int64_t* ends = nullptr,
           const Pool::Ahead* ahead = nullptr) {
  if (cost >= kWorthSharing) return pool.run(units, work, ends, ahead);
  for (int64_t unit = 0; unit < units; ++unit) {
    if constexpr (std::is_invocable_v<Work&, int64_t, int64_t, int>) {
      work(unit, -1, 0);
    } else {
      work(unit, 0);
    }
  }
}

// Runs work(first, last, thread) over pieces of [0, count), each a multiple of align but for the
// last. cost is that of one item.
template <class Work>
void split(Pool& pool, int64_t count, int64_t align, int64_t cost, Work&& work) {
  const int64_t blocks = (count + align - 1) / align, total = count * cost;
  if (total < kWorthSharing || pool.threads() == 1) return work(0, count, 0);
  // several pieces a thread, so that a thread that was held up leaves its share to others
  const int64_t wanted =
      greatest(total / kPieceCost, least(total / kWorthSharing, 8 * pool.threads()));
  const int64_t pieces = least(blocks, greatest(2, wanted));
  pool.run(pieces, [&](int64_t piece, int thread) {
    work(blocks * piece / pieces * align, least(count, blocks * (piece + 1) / pieces * align),
         thread);
  });
}

// Tokens packed for a Matmul: pointers to groups that lie one after the other.
struct Packed {
  const void** groups;
  int64_t count;
};

inline Packed packed_groups(Arena& arena, const Matmul& matmul, int64_t tokens, int64_t inputs) {
  const int64_t count = (tokens + matmul.group - 1) / matmul.group;
  Packed packed = {arena.take<const void*>(size_t(count)), count};
  char* data = arena.take<char>(size_t(count * matmul.group_bytes(inputs)));
  for (int64_t g = 0; g < count; ++g) packed.groups[g] = data + g * matmul.group_bytes(inputs);
  return packed;
}

// Of one expert only the first rows of gate and up, and the columns of down that go with them.
struct Part {
  int32_t expert = -1;  // none: all are computed whole
  int32_t inner = 0;
};

// ftd_moe, with one expert in part.
int32_t moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids, const float* weights,
            const int64_t* address, const FtdExpertLayout* layout, const FtdActivation* activation,
            float* y, int64_t tokens, int64_t routes, int64_t experts, const Part& part);

}  // namespace ftd
