// Rows of experts' matrices, dealt out to threads in units of falling size.
//
// The first units are long, since reading likes long runs, the last ones short, so that threads end
// together even where one expert is all there is. A thread takes the next unit when it is free.
#pragma once

#include "kernels.h"

namespace ftd {

enum class Stage : int32_t { gate_up, down };

// Rows [first, first + rows) of one group's matrix.
struct Unit {
  Stage stage;
  int32_t group;
  int32_t first, rows;
};

constexpr int64_t kLeastUnitBytes = 16 << 10;  // less, and claiming it costs more than its reading
constexpr int64_t kMostUnitRows = 256;

// The rows of one stage, how they may be cut, and who takes them.
struct Deal {
  Stage stage;
  int64_t align;      // units begin at multiples of so many rows
  int64_t row_bytes;  // that a row reads
  int64_t threads;

  int64_t least_rows() const {
    return round_up(greatest(1, kLeastUnitBytes / greatest(1, row_bytes)), align);
  }
  // Of the groups [begin, end), each of so many rows.
  int64_t most_units(int64_t begin, int64_t end, int64_t rows) const {
    return (end - begin) * (rows / least(least_rows(), kMostUnitRows) + 1);
  }
  Unit* out(Unit* to, int64_t begin, int64_t end, int64_t rows) const {
    int64_t left = (end - begin) * rows;
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t first = 0; first < rows;) {
        const int64_t fair = left / (2 * threads) / align * align;
        const int64_t wanted = greatest(least_rows(), least(kMostUnitRows, fair));
        const int64_t count = least(rows - first, wanted);
        *to++ = {stage, int32_t(group), int32_t(first), int32_t(count)};
        first += count;
        left -= count;
      }
    }
    return to;
  }
};

}  // namespace ftd
