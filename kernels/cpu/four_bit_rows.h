// Rows of four bits against a few tokens. Included by each file within its own unnamed namespace,
// behind its dot<F, R, C> and ``Input``, as which its inputs are packed.

template <class F, int R, int C>
void dot_rows(const MatmulCall& call, int64_t row, int64_t end, int64_t token, bool from_memory) {
  const Input* x[C];
  for (int c = 0; c < C; ++c) x[c] = static_cast<const Input*>(call.x[token + c]);
  row = each_row<F, R>(
      call, row, end, from_memory,
      [&](const Rows& rows, int64_t at, const uint8_t* ahead, const uint8_t* scales_ahead) {
        dot<F, R, C>(rows, x, call.out + token * call.out_stride + at, call.out_stride, ahead,
                     scales_ahead);
      });
  if constexpr (R > 1) {
    if (row < end) dot_rows<F, 1, C>(call, row, end, token, false);
  }
}

#include "rows_avx512bf16.h"
