// y[T, O] = x[T, K] · W[O, K]ᵀ + bias. Reads the weights once for any number of tokens.
#include "ops.h"

using namespace ftd;

namespace {

constexpr int64_t kRowAlign = 16;
constexpr int64_t kTileFloats =
    1 << 15;  // of results a thread holds back before rounding them: 128 KiB

}  // namespace

extern "C" int32_t ftd_linear(FtdOps* ops, const void* x, int32_t act, const void* record,
                              const FtdMatrix* matrix, const void* bias, int32_t bias_type, void* y,
                              int32_t out, int64_t tokens, int64_t outputs, int64_t inputs) {
  const int32_t format = matrix->format;
  if (!known(act) || !known_format(format) || !known(out) || (bias && !known(bias_type)))
    return FTD_BAD_TYPE;
  if (tokens < 0 || outputs < 0 || inputs < 1) return FTD_BAD_SHAPE;
  if (tokens == 0 || outputs == 0) return 0;
  Pool& pool = ops->pool;
  const Kernels& kernels = ops->kernels;
  const Turn turn(pool);

  const Matrix weight(record, *matrix, inputs);
  const Matmul& matmul = choose(kernels, format, act, tokens);
  const Packed packed = packed_groups(pool.shared(), matmul, tokens, inputs);
  split(pool, tokens, matmul.group, inputs * 4, [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      matmul.pack(offset(x, t * inputs * type_bytes(act)), act, 0, inputs, inputs,
                  int(t % matmul.group), const_cast<void*>(packed.groups[t / matmul.group]));
    }
  });
  float* bias_floats = nullptr;
  if (bias) {
    bias_floats = pool.shared().take<float>(size_t(outputs));
    kernels.widen(bias, bias_type, bias_floats, outputs);
  }

  const int64_t tile_rows = greatest(kRowAlign, kTileFloats / tokens / kRowAlign * kRowAlign);
  split(pool, outputs, kRowAlign, cost_of(row_bytes(format, inputs), inputs * tokens),
        [&](int64_t first, int64_t last, int thread) {
          float* tile =
              pool.fresh(thread).take<float>(size_t(least(tile_rows, last - first) * tokens));
          for (int64_t row = first; row < last; row += tile_rows) {
            const int64_t rows = least(tile_rows, last - row);
            matmul.run({weight, row, rows, packed.groups, tokens, tile, rows,
                        ops->prefetch_bytes[format][tokens > 1]});
            for (int64_t t = 0; t < tokens; ++t) {
              kernels.narrow(tile + t * rows, bias ? bias_floats + row : nullptr,
                             offset(y, (t * outputs + row) * type_bytes(out)), out, rows);
            }
          }
        });
  return 0;
}
