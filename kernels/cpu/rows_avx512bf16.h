// How rows meet tokens in kernels of AVX512-BF16 that take a few of each at a time. Included by
// each file within its own unnamed namespace, behind its dot_rows<F, R, C>: R rows at a time, C
// tokens.

constexpr int kRowTokens = 4;

template <class F, int C>
void dot_tile(const MatmulCall& call, int64_t row, int64_t end, int64_t token, int64_t tokens,
              bool from_memory) {
  if constexpr (C > 1) {
    if (tokens < C) return dot_tile<F, C - 1>(call, row, end, token, tokens, from_memory);
  }
  constexpr int kRows = C <= 2 ? 1 : 2;  // memory likes one row after the other best
  dot_rows<F, kRows, C>(call, row, end, token, from_memory);
}

// As in scaled_kernels.h: rows in the order of their addresses, blocks of them for many tokens.
template <class F>
void matmul(const MatmulCall& call) {
  const int64_t block = call.tokens <= kRowTokens ? call.rows : 16;
  const int64_t tiles = (call.tokens + kRowTokens - 1) / kRowTokens;
  for (int64_t row = 0; row < call.rows; row += block) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = call.tokens * tile / tiles, next = call.tokens * (tile + 1) / tiles;
      dot_tile<F, kRowTokens>(call, row, least(call.rows, row + block), token, next - token,
                              tile == 0);
    }
  }
}
