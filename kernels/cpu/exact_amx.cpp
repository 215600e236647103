// AMX: weights whose products with their scales a bf16 holds, for several tokens.
//
// A number of MXFP4 or NVFP4 times its block's scale has at most six bits, and FP8 with a scale for
// each row has one that can wait until the end. So the left tile, 16 weight rows by 32 inputs, is
// unpacked with scales in it, its products with the tokens are exact, and sums stay in tiles from
// one end of the rows to the other: storing those of each tile had cost more than all else. Tiles
// are unpacked some steps before they are multiplied: what a tile is loaded from has then reached
// the cache.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 warns of its own undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace ftd {
namespace {

#include "inputs_avx512bf16.h"
#include "tiles_amx.h"
#include "unpack_four_bits.h"
#include "unpack_fp8.h"
// needs those above
#include "blocks_amx.h"
#include "fp8_amx.h"

constexpr int kBehind = 3;  // steps from unpacking to multiplying
constexpr int kSlots = 4;   // left tiles that are kept meanwhile

constexpr float kMxfp4Unit = 8.0f;  // so that no product is too large

// What 16 codes stand for under each scale there can be, times 1 / unit.
struct Tables {
  alignas(64) uint16_t at[256][16];

  template <class Scale>
  Tables(float unit, Scale&& scale) {
    for (int s = 0; s < 256; ++s) {
      for (int code = 0; code < 16; ++code) {
        bf16 number;
        narrow(float_of(uint32_t(kFp4Bits[code]) << 16) / unit * scale(uint8_t(s)), number);
        at[s][code] = number.bits;
      }
    }
  }
};
const Tables& mxfp4_tables() {
  static const Tables tables(kMxfp4Unit, widen_e8m0);
  return tables;
}
const Tables& nvfp4_tables() {
  static const Tables tables(1.0f, widen_e4m3);
  return tables;
}

// Keeps the compiler from finding all rows' addresses beforehand, for which it has no registers.
void step_to_next(const uint8_t*& row, int64_t bytes) {
  row += bytes;
  asm("" : "+r"(row));
}

template <const Tables& (*kTables)(), int kColumns>
struct FourBits {
  static constexpr int kLines = 4;  // of 64 bytes in a left tile's codes
  static constexpr float kUnit = kColumns == 32 ? kMxfp4Unit : 1.0f;

  const Tables& tables = kTables();

  static int64_t number_bytes(int64_t inputs) { return inputs / 2; }
  static int64_t scale_bytes(int64_t inputs) { return inputs / kColumns; }
  static const uint8_t* first_scales(const Matrix& m, int64_t row) {
    return m.scales + row * scale_bytes(m.inputs);
  }
  static int64_t tiles(int64_t inputs) { return inputs / kTileInputs; }

  template <int t>
  void unpack(const Block& block, const uint8_t* const*, int64_t tile, int64_t, uint8_t* to) {
    if (block.last + 1 < kRows) return unpack_last(block, tile, to);
    const uint8_t* numbers = block.numbers + 16 * tile;
    const uint8_t* scales = block.scales + kTileInputs / kColumns * tile;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      _mm512_store_si512(to + r * 64, numbers_of(numbers, scales));
      step_to_next(numbers, block.number_bytes);
      step_to_next(scales, block.scale_bytes);
    }
  }
  __attribute__((noinline)) void unpack_last(const Block& block, int64_t tile, uint8_t* to) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = least(r, block.last);
      _mm512_store_si512(
          to + r * 64,
          numbers_of(block.numbers + 16 * tile + row * block.number_bytes,
                     block.scales + kTileInputs / kColumns * tile + row * block.scale_bytes));
    }
  }
  __m512i numbers_of(const uint8_t* numbers, const uint8_t* scales) const {
    auto table = [&](int i) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables.at[scales[i]]));
    };
    const __m512i codes = codes_of(numbers);
    if constexpr (kColumns == 32) {  // five bits count, so the table is there twice
      return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(table(0)));
    } else {  // the fifth chooses the table
      const __m512i second = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0x100010, 0x100010));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(table(0)), table(1), 1);
      return _mm512_permutexvar_epi16(
          _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), second, 0xea), both);
    }
  }

  static void announce_scales(const Block& block) {  // of the next rows
    ask_for(block.scales + kRows * block.scale_bytes, kRows * block.scale_bytes);
  }
  static __m512 scale(const Block&) { return _mm512_set1_ps(1.0f); }  // what a row still lacks

  template <int kLanes>
  static void place(__m512i in, int64_t k, __m512i pairs, int32_t* to) {
    _mm512_i32scatter_epi32(to + k / kTileInputs * 16 * kLanes, pairs, by_nibble(in), 4);
  }
};

struct Fp8Rows : Fp8<0> {
  template <int t>
  void unpack(const Block&, const uint8_t* const* rows, int64_t tile, int64_t inputs, uint8_t* to) {
    Fp8<0>::unpack<t>(rows, tile, inputs, to);
  }
  __m512 scale(const Block& block) const { return Fp8<0>::scale<0>(block, 0); }
};

template <class F, int kLanes, int kGroups>
struct Product {
  static constexpr int kSums = kRows * kLanes;  // of a tile

  alignas(64) uint8_t weights[kSlots * kTileBytes];
  __m512 acc[kGroups][kLanes];
  const uint8_t* rows[kRows];
  F format;

  // Even and odd left tiles have sums of their own: products do not wait for those before them.
  template <int t, int g>
  static void multiply(const uint8_t* const* x, int64_t tile) {
    constexpr int kSum = t % 2 * kGroups + g;
    load_tile<6 + kSum % 2>(x[g] + tile * kSums * 4, kLanes * 4);
    multiply_tiles<kSum, 4 + t % 2, 6 + kSum % 2>();
  }
  template <int t>  // step % 4
  void step(const Block& block, int64_t step, int64_t inputs, const uint8_t* const* x,
            const uint8_t* ahead) {
    const int64_t tiles = F::tiles(inputs), tile = step - kBehind;
    if (step < tiles) {
      format.template unpack<t>(block, rows, step, inputs, weights + t * kTileBytes);
      for (int line = 0; ahead && line < F::kLines; ++line)
        __builtin_prefetch(ahead + (step * F::kLines + line) * 64, 0, 2);
    }
    if (tile < 0 || tile >= tiles) return;
    constexpr int kTile = (t + kSlots - kBehind) % kSlots;
    load_tile<4 + kTile % 2>(weights + kTile * kTileBytes, 64);
    multiply<kTile, 0>(x, tile);
    if constexpr (kGroups > 1) multiply<kTile, 1>(x, tile);
  }

  template <int g>
  void add(__m512 scale) {
    alignas(64) float sums[2][kSums], scales[kRows];
    store_tile<g>(sums[0], kLanes * 4);
    store_tile<kGroups + g>(sums[1], kLanes * 4);
    _mm512_store_ps(scales, scale);
    for (int v = 0; v < kLanes; ++v) {
      const __m512 both =
          _mm512_add_ps(_mm512_load_ps(sums[0] + v * 16), _mm512_load_ps(sums[1] + v * 16));
      acc[g][v] = _mm512_mul_ps(both, scales_of<kLanes>(scale, scales, v));
    }
  }

  // x: a group's tokens; ahead: the bytes to ask for meanwhile, in their order.
  void run(const Block& block, int64_t inputs, const void* const* groups, const uint8_t* ahead) {
    for (int r = 0; r < kRows; ++r)
      rows[r] = block.numbers + least(r, block.last) * block.number_bytes;
    const uint8_t* x[kGroups];
    for (int g = 0; g < kGroups; ++g) x[g] = static_cast<const uint8_t*>(groups[g]);
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (kGroups > 1) zero_tile<2>(), zero_tile<3>();
    const int64_t tiles = F::tiles(inputs);
    for (int64_t s = 0; s < tiles + kBehind; s += kSlots) {
      step<0>(block, s, inputs, x, ahead);
      step<1>(block, s + 1, inputs, x, ahead);
      step<2>(block, s + 2, inputs, x, ahead);
      step<3>(block, s + 3, inputs, x, ahead);
    }
    add<0>(format.scale(block));
    if constexpr (kGroups > 1) add<1>(format.scale(block));
  }
  const __m512* sums_of(int group) const { return acc[group]; }
};

}  // namespace

void use_amx_exact(Kernels& kernels) {
  use<Product, FourBits<mxfp4_tables, 32>>(kernels, FTD_MXFP4);
  use<Product, FourBits<nvfp4_tables, 16>>(kernels, FTD_NVFP4);
  use<Product, Fp8Rows>(kernels, FTD_FP8_ROW);
}

}  // namespace ftd

#endif
