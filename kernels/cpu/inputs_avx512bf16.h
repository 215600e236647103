// bf16 inputs of kernels of scaled formats, 32 at a time. Included by each file of AVX512-BF16 and
// AMX within its own unnamed namespace, after it has chosen its instructions.

constexpr int kPiece = 32;  // inputs of a register

// Inputs [i, i + 32) of a piece of count, zeros past its end. What comes as float32 was rounded to
// bf16 before.
__m512i load_inputs(const void* x, int type, int64_t i, int64_t count) {
  const int64_t left = least(kPiece, count - i);
  if (left <= 0) return _mm512_setzero_si512();
  const uint32_t some = left == kPiece ? 0xffffffff : (1u << left) - 1;
  if (type == FTD_BF16) return _mm512_maskz_loadu_epi16(some, static_cast<const bf16*>(x) + i);
  const float* from = static_cast<const float*>(x) + i;
  const __m512 low = _mm512_maskz_loadu_ps(__mmask16(some), from);
  const __m512 high = _mm512_maskz_loadu_ps(__mmask16(some >> 16), from + 16);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
