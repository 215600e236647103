// Scales of four-bit formats, and how a kernel of AVX-512 walks through rows of them. Included by
// each file within its own unnamed namespace, after inputs_avx512bf16.h.

constexpr int kStep = 128;        // inputs of 64 bytes
constexpr int kSpan = 4 * kStep;  // inputs whose scales are widened at a time

// Scales of a span, and those of one of its steps: each for the sums of its inputs.

// Sixteen of 32 inputs.
struct Of32Inputs {
  static constexpr int kColumns = 32;
  __m512 scales;
  __m512 spread(int step) const {
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(4 * step)), scales);
  }
};

struct Mxfp4 : Of32Inputs {
  static constexpr int kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  void load(const uint8_t* p, int64_t count, float) {
    const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), p);
    scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
  }
};

struct Nvfp4 {
  static constexpr int kColumns = 16, kScaleBytes = 1;
  static constexpr const uint16_t (&kBits)[16] = kFp4Bits;
  __m512 scales[2];
  void load(const uint8_t* p, int64_t count, float factor) {
    const uint32_t some = count == 32 ? 0xffffffff : (1u << count) - 1;
    // as float16, whose exponent has a bias of 15, not 7; the sign comes to bit 14, too
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, p));
    const __m512i half =
        _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(int16_t(0xbf80)));
    const __m512 unit = _mm512_set1_ps(factor * 256.0f);
    scales[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), unit);
    scales[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), unit);
  }
  __m512 spread(int step) const {
    const __m512i which = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(which, _mm512_set1_epi32(8 * (step % 2))),
                                 scales[step / 2]);
  }
};

struct Int4 : Of32Inputs {
  static constexpr int kScaleBytes = 2;
  static constexpr const uint16_t (&kBits)[16] = kInt4Bits;
  void load(const uint8_t* p, int64_t count, float) {
    const __m256i words = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
    scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
};

struct Rows {
  const uint8_t* numbers;
  const uint8_t* scales;
  int64_t number_bytes, scale_bytes;  // of a row
  float factor;
  int64_t inputs;
};

// step(k, place in its span, which of its bytes there are) for all inputs of R rows, whose scales
// it finds widened; asks for the numbers and the scales that lie ahead.
template <class F, int R, class Step>
void in_spans(const Rows& rows, F (&scales)[R], const uint8_t* ahead, const uint8_t* scales_ahead,
              Step&& step) {
  auto load_scales = [&](int64_t k, int64_t count) {
    for (int r = 0; r < R; ++r) {
      scales[r].load(rows.scales + r * rows.scale_bytes + k / F::kColumns * F::kScaleBytes, count,
                     rows.factor);
    }
  };
  auto prefetch = [&] {
    for (int r = 0; r < R; ++r) __builtin_prefetch(ahead + 64 * r, 0, 2);
    ahead += 64 * R;
  };

  for (int r = 0; r < R; ++r)
    for (int64_t at = 0; at < rows.scale_bytes; at += 64)
      __builtin_prefetch(scales_ahead + r * rows.scale_bytes + at, 0, 2);
  int64_t k = 0;
  for (; k + kSpan <= rows.inputs; k += kSpan) {
    load_scales(k, kSpan / F::kColumns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      prefetch();
      step(k + i * kStep, i, ~0ull);
    }
  }
  if (k < rows.inputs) {
    load_scales(k, (rows.inputs - k) / F::kColumns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t left = rows.inputs - k - i * kStep;
      if (left <= 0) break;
      prefetch();
      step(k + i * kStep, i, left >= kStep ? ~0ull : (1ull << left / 2) - 1);
    }
  }
}

// dot(rows, first row, numbers ahead, scales ahead) for R rows at a time; returns the first of
// those that are left.
template <class F, int R, class Dot>
int64_t each_row(const MatmulCall& call, int64_t row, int64_t end, bool from_memory, Dot&& dot) {
  const int64_t number_bytes = call.inputs / 2;
  const int64_t scale_bytes = call.inputs / F::kColumns * F::kScaleBytes;
  for (; row + R <= end; row += R) {
    const int64_t first = call.first_row + row;
    const Rows rows = {call.weight + row * number_bytes,
                       call.matrix->scales + first * scale_bytes,
                       number_bytes,
                       scale_bytes,
                       call.matrix->factor,
                       call.inputs};
    const int64_t ahead = from_memory ? prefetch_after(call, row, R, number_bytes) : 0;
    dot(rows, row, rows.numbers + ahead,
        rows.scales + least(ahead, call.prefetch_bytes) / number_bytes * scale_bytes);
  }
  return row;
}
