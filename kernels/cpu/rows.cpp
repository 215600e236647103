// Row-wise and element-wise operations, and the plain read they are all measured against.
#include <string.h>

#include "ops.h"

using namespace ftd;

extern "C" int32_t ftd_write_kv(FtdOps* ops, const void* k, const void* v, const int64_t* place,
                                void* k_pages, void* v_pages, int64_t rows, int64_t places,
                                int64_t row_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    if (place[r] < 0 || place[r] >= places) return FTD_BAD_INDEX;
  }
  const Turn turn(ops->pool);
  split(ops->pool, rows, 1, 2 * row_bytes, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; ++r) {
      memcpy(offset(k_pages, place[r] * row_bytes), offset(k, r * row_bytes), size_t(row_bytes));
      memcpy(offset(v_pages, place[r] * row_bytes), offset(v, r * row_bytes), size_t(row_bytes));
    }
  });
  return 0;
}

extern "C" int32_t ftd_rms_norm(FtdOps* ops, const void* x, int32_t type, const void* weight,
                                int32_t weight_type, void* y, int32_t out, int64_t rows,
                                int64_t width, float eps) {
  if (!known(type) || !known(weight_type) || !known(out)) return FTD_BAD_TYPE;
  const Turn turn(ops->pool);
  float* wide = ops->pool.shared().take<float>(size_t(width));
  ops->kernels.widen(weight, weight_type, wide, width);
  split(ops->pool, rows, 1, 2 * width, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; ++r) {
      ops->kernels.rms_norm(offset(x, r * width * type_bytes(type)), type, wide,
                            offset(y, r * width * type_bytes(out)), out, width, eps);
    }
  });
  return 0;
}

extern "C" int32_t ftd_rope(FtdOps* ops, void* x, int32_t act, const float* cos, const float* sin,
                            int64_t rows, int64_t heads, int64_t head_dim, int64_t half,
                            int32_t interleaved) {
  if (!known(act)) return FTD_BAD_TYPE;
  if (2 * half > head_dim) return FTD_BAD_SHAPE;
  const Turn turn(ops->pool);
  split(ops->pool, rows, 1, 4 * heads * half, [&](int64_t first, int64_t last, int) {
    for (int64_t h = first * heads; h < last * heads; ++h) {
      ops->kernels.rope(offset(x, h * head_dim * type_bytes(act)), act, cos + h / heads * half,
                        sin + h / heads * half, half, interleaved);
    }
  });
  return 0;
}

extern "C" int32_t ftd_silu_mul(FtdOps* ops, const void* gate, const void* up, void* y, int32_t act,
                                int64_t count) {
  if (!known(act)) return FTD_BAD_TYPE;
  const Turn turn(ops->pool);
  split(ops->pool, count, 64, 8, [&](int64_t first, int64_t last, int) {
    const int64_t at = first * type_bytes(act);
    ops->kernels.silu_mul(offset(gate, at), offset(up, at), offset(y, at), last - first, act);
  });
  return 0;
}

extern "C" int32_t ftd_delta_scan(FtdOps* ops, const float* q, const float* k, const float* v,
                                  const float* decay, const float* beta, const float* source,
                                  float* target, float* out, int64_t rows, int64_t heads,
                                  int64_t key_dim, int64_t value_dim) {
  if (rows < 0 || heads < 1 || key_dim < 1 || value_dim < 1) return FTD_BAD_SHAPE;
  const Turn turn(ops->pool);
  const DeltaScan scan = {q,      k,   v,    decay, beta,    source,
                          target, out, rows, heads, key_dim, value_dim};
  const int64_t blocks = (value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const int64_t state = heads * key_dim * value_dim;
  share(ops->pool, heads * blocks, cost_of(8 * state, 3 * rows * state),
        [&](int64_t unit, int thread) {
          float* stage = ops->pool.fresh(thread).take<float>(size_t(key_dim * kDeltaColumns));
          ops->kernels.delta(scan, unit / blocks, unit % blocks * kDeltaColumns, stage);
        });
  return 0;
}

extern "C" int64_t ftd_read(FtdOps* ops, const int64_t* address, int64_t count, int64_t bytes) {
  constexpr int64_t kPiece = 1 << 19;
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;  // of one address
  const Turn turn(ops->pool);
  std::atomic<int64_t> check{0};
  ops->pool.run(count * pieces, [&](int64_t unit, int) {
    const int64_t at = unit % pieces * kPiece;
    const void* data = reinterpret_cast<const char*>(address[unit / pieces]) + at;
    check.fetch_xor(ops->kernels.read(data, least(kPiece, bytes - at)), std::memory_order_relaxed);
  });
  return check.load();
}
