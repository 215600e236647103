// The instruction sets that kernels are written for, from worst to best.
#pragma once

#include "kernels.h"

namespace ftd {

// Null past the end.
const char* isa_name(int index);
// Null where the processor or the system does not have it, or the index is past the end.
const Kernels* isa_kernels(int index);

}  // namespace ftd
