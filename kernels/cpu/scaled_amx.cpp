// AMX: int4, and FP8 whose scales change along a row, times bf16 activations, for several tokens.
//
// 32 inputs of 16 weight rows are unpacked into the left tile, whose products with the tokens are
// exact. A tile of sums belongs to inputs that share a scale in each row: it is stored, and goes,
// times these scales, into sums in registers.
//
// Unpacking, multiplying, storing and adding go through a block of rows one behind the other: what
// a tile or a vector is loaded from has then reached the cache, and none waits for the one before
// it.
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
#include "int4_amx.h"

// Steps behind unpacking, and the left tiles that are kept meanwhile.
constexpr int kMultiply = 3, kStore = 4, kAdd = 7;
constexpr int kSlots = 4;
constexpr int kPeriod = 2 * kTiles;

template <class F, int kLanes, int kGroups>
struct Product {
  static constexpr int kSums = kRows * kLanes;  // of a tile
  static constexpr int kVectors = kSums / 16;
  static constexpr int kInTurn = F::kTilesOfSum == 1 ? 4 : 2;  // sums that wait

  alignas(64) uint8_t weights[kSlots * kTileBytes];
  alignas(64) float sums[kInTurn * kGroups * kSums];
  __m512 acc[kGroups][kVectors];
  const uint8_t* rows[kRows];
  F format;

  // Of left tile t of kPeriod, by tokens of group g.
  template <int t, int g>
  static constexpr int sum_tile() {
    return (t / F::kTilesOfSum * kGroups + g) % 4;
  }
  template <int t>
  float* stored() {
    return sums + t / F::kTilesOfSum % kInTurn * kGroups * kSums;
  }
  template <int t, int g>
  static void multiply(const uint8_t* const* x, int64_t tile) {
    constexpr int kTokens = kGroups == 1 ? 6 + t % 2 : 6 + g, kSum = sum_tile<t, g>();
    load_tile<kTokens>(x[g] + tile * kSums * 4, kLanes * 4);
    if constexpr (t % F::kTilesOfSum == 0) zero_tile<kSum>();
    multiply_tiles<kSum, 4 + t % 2, kTokens>();
  }
  template <int t>
  void multiply(const uint8_t* const* x, int64_t tile) {
    load_tile<4 + t % 2>(weights + t % kSlots * kTileBytes, 64);
    multiply<t, 0>(x, tile);
    if constexpr (kGroups > 1) multiply<t, 1>(x, tile);
  }
  template <int t>
  void store() {
    store_tile<sum_tile<t, 0>()>(stored<t>(), kLanes * 4);
    if constexpr (kGroups > 1) store_tile<sum_tile<t, 1>()>(stored<t>() + kSums, kLanes * 4);
  }
  template <int t>
  void add(const Block& block, int64_t tile) {
    const __m512 scale = format.template scale<t>(block, tile / kTiles);
    alignas(64) float scales[kRows];
    if (kLanes == 16) _mm512_store_ps(scales, scale);
    for (int v = 0; v < kVectors; ++v) {
      const __m512 here = scales_of<kLanes>(scale, scales, v);
      for (int g = 0; g < kGroups; ++g) {
        const float* from = stored<t>() + g * kSums + v * 16;
        acc[g][v] = _mm512_fmadd_ps(here, _mm512_load_ps(from), acc[g][v]);
      }
    }
  }

  template <int t>  // step % kPeriod
  void step(const Block& block, int64_t step, int64_t inputs, const uint8_t* const* x,
            const uint8_t* ahead) {
    const int64_t tiles = F::tiles(inputs);
    auto within = [&](int64_t tile) { return uint64_t(tile) < uint64_t(tiles); };
    auto ends_sum = [&](int t_of_tile, int64_t tile) {
      return within(tile) && ((t_of_tile + 1) % F::kTilesOfSum == 0 || tile + 1 == tiles);
    };
    constexpr int kMultiplied = (t + kPeriod - kMultiply) % kPeriod;
    constexpr int kStored = (t + kPeriod - kStore) % kPeriod;
    constexpr int kAdded = (t + kPeriod - kAdd) % kPeriod;
    if (step < tiles) {
      format.template unpack<t>(rows, step, inputs, weights + t % kSlots * kTileBytes);
      for (int line = 0; ahead && line < F::kLines; ++line)
        __builtin_prefetch(ahead + (step * F::kLines + line) * 64, 0, 2);
    }
    if (ends_sum(kStored, step - kStore)) store<kStored>();
    if (within(step - kMultiply)) multiply<kMultiplied>(x, step - kMultiply);
    if (ends_sum(kAdded, step - kAdd)) add<kAdded>(block, step - kAdd);
  }

  // x: a group's tokens; ahead: the bytes to ask for meanwhile, in their order.
  void run(const Block& block, int64_t inputs, const void* const* groups, const uint8_t* ahead) {
    for (int r = 0; r < kRows; ++r)
      rows[r] = block.numbers + least(r, block.last) * block.number_bytes;
    const uint8_t* x[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      x[g] = static_cast<const uint8_t*>(groups[g]);
      for (int v = 0; v < kVectors; ++v) acc[g][v] = _mm512_setzero_ps();
    }
    const int64_t tiles = F::tiles(inputs);
    for (int64_t s = 0; s < tiles + kAdd; s += kPeriod) {
      if (s < tiles) format.prepare(block, s / kTiles);
      step<0>(block, s, inputs, x, ahead);
      step<1>(block, s + 1, inputs, x, ahead);
      step<2>(block, s + 2, inputs, x, ahead);
      step<3>(block, s + 3, inputs, x, ahead);
      step<4>(block, s + 4, inputs, x, ahead);
      step<5>(block, s + 5, inputs, x, ahead);
      step<6>(block, s + 6, inputs, x, ahead);
      step<7>(block, s + 7, inputs, x, ahead);
    }
  }

  const __m512* sums_of(int group) const { return acc[group]; }
};

}  // namespace

void use_amx_scaled(Kernels& kernels) {
  use<Product, Int4>(kernels, FTD_INT4);
  use<Product, Fp8<128>>(kernels, FTD_FP8);
}

}  // namespace ftd

#endif
