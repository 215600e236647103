// In place of kernels/cpu/isas.cpp: the kernels that only newer processors can
// run, on emulated instructions; what they take from lesser ones is portable.
#include "isas.h"

namespace ftd {

const Kernels *avx512_kernels() { return portable_kernels(); }

const char *isa_name(int index) {
  constexpr const char *kNames[] = {"avx512bf16", "amx"};
  return index >= 0 && index < 2 ? kNames[index] : nullptr;
}

const Kernels *isa_kernels(int index) {
  return index == 0   ? avx512bf16_kernels()
         : index == 1 ? amx_kernels()
                      : nullptr;
}

} // namespace ftd
