// FP8 weights as bf16, in registers, and inputs in the same order. Included as inputs_avx512bf16.h
// is.

constexpr float kFp8Unit = 256.0f;  // what numbers are divided by

// Where bits 8..15 of a word are a code, its number, but for subnormal codes: exponent and mantissa
// four bits further left are those of a bf16 with another bias. The bits below do not matter.
__m512i normal_fp8(__m512i codes) {
  return _mm512_ternarylogic_epi32(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16(int16_t(0x87f0)),
                                   _mm512_set1_epi16(0x3800), 0xea);  // (a & b) | c
}

// The same for all codes. Subnormal ones come from a table: the mantissa times 2^-9 / 2^8.
__m512i any_fp8(__m512i codes) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
  const __m512i numbers = normal_fp8(codes);
  const __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
  const __m512i sign = _mm512_and_si512(numbers, _mm512_set1_epi16(int16_t(0x8000)));
  const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x7800));
  return _mm512_mask_mov_epi16(numbers, small, _mm512_or_si512(sign, found));
}

// Codes of a byte: the even ones, then the odd ones.
__m512i by_byte(__m512i inputs) {
  const __m512i which = _mm512_setr_epi32(
      0x020000, 0x060004, 0x0a0008, 0x0e000c, 0x120010, 0x160014, 0x1a0018, 0x1e001c, 0x030001,
      0x070005, 0x0b0009, 0x0f000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d);
  return _mm512_permutexvar_epi16(which, inputs);
}
