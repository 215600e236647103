// Four-bit weights as bf16, in registers, and inputs in the same order. Included as
// inputs_avx512bf16.h is.

// The instruction that looks numbers up goes by five bits of a word, so the table holds them twice.
inline __m512i number_table(const uint16_t (&bits)[16]) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits)));
}

// Codes of four bits: words 0, 4, 8 .. 28, then 1, 5, 9 .. 29 and so on.
__m512i by_nibble(__m512i inputs) {
  const __m512i which = _mm512_add_epi16(
      _mm512_broadcast_i32x4(_mm_setr_epi16(0, 4, 8, 12, 16, 20, 24, 28)),
      _mm512_setr_epi32(0, 0, 0, 0, 0x10001, 0x10001, 0x10001, 0x10001, 0x20002, 0x20002, 0x20002,
                        0x20002, 0x30003, 0x30003, 0x30003, 0x30003));
  return _mm512_permutexvar_epi16(which, inputs);
}
