#include "isas.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ftd {
namespace {

struct Isa {
  const char* name;
  bool (*here)();
  const Kernels* (*kernels)();
};

bool always() { return true; }

#if defined(__x86_64__)

// __builtin_cpu_supports also asks whether the system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Tiles for bf16, which Linux gives to those who ask: a permission of the process, for all its
// threads.
bool has_amx() {
  unsigned a, b, c, d;
  if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return (d & kBf16) && (d & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

constexpr Isa kIsas[] = {
    {"portable", always, portable_kernels},
#if defined(__x86_64__)
    {"avx2", has_avx2, avx2_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avx512bf16", has_avx512bf16, avx512bf16_kernels},
    {"amx", has_amx, amx_kernels},
#endif
};
constexpr int kNumIsas = sizeof kIsas / sizeof *kIsas;

}  // namespace

const char* isa_name(int index) {
  return index >= 0 && index < kNumIsas ? kIsas[index].name : nullptr;
}

const Kernels* isa_kernels(int index) {
  return index >= 0 && index < kNumIsas && kIsas[index].here() ? kIsas[index].kernels() : nullptr;
}

}  // namespace ftd
