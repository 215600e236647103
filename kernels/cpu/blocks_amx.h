// How blocks of 16 rows meet tokens in kernels of AMX for scaled formats. Included by each file
// within its own unnamed namespace, after tiles_amx.h and inputs_avx512bf16.h.
//
// Tokens lie in groups of 4 or 16, inputs in pairs, in the order in which unpacking hands out
// weights: [tile][16 pairs][tokens][2]. Product<F, tokens of a group, groups>::run multiplies a
// block, for which sums_of(group) then has 16 rows times tokens.

// 16 rows of a matrix, or the last ones: the last then stands for those that are missing.
struct Block {
  const uint8_t* numbers;
  const uint8_t* scales;
  int64_t number_bytes, scale_bytes;  // of a row
  int64_t last;                       // row
  int64_t first_row;                  // in the matrix
};

void ask_for(const uint8_t* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

// 32 codes in 16 bytes, one in the low bits of each word, in the order of by_nibble.
__m512i codes_of(const uint8_t* p) {
  const __m512i words =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i shifts =
      _mm512_setr_epi32(0, 0, 0, 0, 0x40004, 0x40004, 0x40004, 0x40004, 0x80008, 0x80008, 0x80008,
                        0x80008, 0xc000c, 0xc000c, 0xc000c, 0xc000c);
  return _mm512_srlv_epi16(words, shifts);
}

// Scales of rows for vector v of 16 sums [16 rows][kLanes]; they lie in memory, too.
template <int kLanes>
__m512 scales_of(__m512 scale, const float (&scales)[kRows], int v) {
  if constexpr (kLanes == 16) return _mm512_set1_ps(scales[v]);
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(4 * v)), scale);
}

// out[token * stride + row], so many rows of each
template <int kLanes>
void write_sums(const __m512* sums, int64_t rows, int64_t tokens, float unit, float* out,
                int64_t stride) {
  const __m512 times = _mm512_set1_ps(unit);
  if constexpr (kLanes == 4) {
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int v = 0; v < kLanes; ++v) {
      const __m512 four = _mm512_permutexvar_ps(turned, _mm512_mul_ps(sums[v], times));
      const int64_t left = greatest(0, least(4, rows - 4 * v));
      const __mmask8 here = __mmask8((1u << left) - 1);
      float* to = out + 4 * v;
      _mm_mask_storeu_ps(to, here, _mm512_castps512_ps128(four));
      if (tokens > 1) _mm_mask_storeu_ps(to + stride, here, _mm512_extractf32x4_ps(four, 1));
      if (tokens > 2) _mm_mask_storeu_ps(to + 2 * stride, here, _mm512_extractf32x4_ps(four, 2));
      if (tokens > 3) _mm_mask_storeu_ps(to + 3 * stride, here, _mm512_extractf32x4_ps(four, 3));
    }
  } else {
    alignas(64) float all[kRows][kLanes];
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(all[r], _mm512_mul_ps(sums[r], times));
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t r = 0; r < rows; ++r) out[t * stride + r] = all[r][t];
  }
}

// All rows for kGroups groups of tokens from token on.
template <template <class, int, int> class Product, class F, int kLanes, int kGroups>
void block_times_tokens(const MatmulCall& call, int64_t row, int64_t token, const uint8_t* ahead) {
  const int64_t first = call.first_row + row, rows = least(kRows, call.rows - row);
  const int64_t number_bytes = F::number_bytes(call.inputs);
  const Block block = {call.weight + row * number_bytes,
                       F::first_scales(*call.matrix, first),
                       number_bytes,
                       F::scale_bytes(call.inputs),
                       rows - 1,
                       first};
  if (ahead) F::announce_scales(block);
  Product<F, kLanes, kGroups> product;
  product.run(block, call.inputs, call.x + token / kLanes, ahead);
  for (int g = 0; g < kGroups; ++g) {
    const int64_t at = token + g * kLanes;
    write_sums<kLanes>(product.sums_of(g), rows, least(kLanes, call.tokens - at),
                       call.matrix->factor * F::kUnit, call.out + at * call.out_stride + row,
                       call.out_stride);
  }
}

template <template <class, int, int> class Product, class F, int kLanes>
void matmul(const MatmulCall& call) {
  const TileConfig<kLanes> config;
  _tile_loadconfig(&config);
  constexpr int kMost = kLanes == 4 ? 2 : 1;  // groups at a time
  if (!call.announced) ask_for(call.weight, least(kRows, call.rows) * F::number_bytes(call.inputs));
  for (int64_t row = 0; row < call.rows; row += kRows) {
    const uint8_t* after = call.weight + (row + kRows) * F::number_bytes(call.inputs);
    const uint8_t* ahead = row + 2 * kRows <= call.rows ? after
                           : row + kRows >= call.rows   ? call.then
                                                        : nullptr;
    for (int64_t token = 0; token < call.tokens; token += kMost * kLanes) {
      if (kMost == 2 && call.tokens - token > kLanes) {
        block_times_tokens<Product, F, kLanes, kMost>(call, row, token, token ? nullptr : ahead);
      } else {
        block_times_tokens<Product, F, kLanes, 1>(call, row, token, token ? nullptr : ahead);
      }
    }
  }
  _tile_release();
}

template <class F, int kLanes>
void pack(const void* x, int type, int64_t first, int64_t count, int64_t inputs, int lane,
          void* group) {
  const __m512i pairs =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(kLanes));
  int32_t* to = static_cast<int32_t*>(group) + lane;
  const int64_t end = first + count == inputs ? round_up(inputs, kChunk) : first + count;
  for (int64_t k = first; k < end; k += kPiece)
    F::template place<kLanes>(load_inputs(x, type, k - first, count), k, pairs, to);
}

constexpr int64_t kFrom = 3;  // tokens: fewer are faster row by row

template <template <class, int, int> class Product, class F, int kLanes>
constexpr Matmul kMatmul = {kLanes,
                            kChunk,
                            sizeof(bf16),
                            pack<F, kLanes>,
                            matmul<Product, F, kLanes>,
                            kLanes == 4 ? kFrom : 9};

template <template <class, int, int> class Product, class F>
void use(Kernels& kernels, int format) {
  kernels.grouped[0][format][FTD_BF16] = &kMatmul<Product, F, 4>;
  kernels.grouped[1][format][FTD_BF16] = &kMatmul<Product, F, 16>;
}
