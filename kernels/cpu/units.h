// Rows of experts' matrices, dealt out to threads in units.
#pragma once

#include "kernels.h"

namespace ftd {

// Rows [first, first + rows) of one group's matrix.
struct Unit {
  int32_t group;
  int32_t first, rows;
};

constexpr int64_t kMostUnitRows = 8 * kPackAlign;
constexpr int64_t kLeastUnitBytes = 32 << 10;  // a thread reads them in some microseconds

// Deals out a matrix of each group; each unit begins at a multiple of ``piece``, a divisor of
// kPackAlign. row_bytes: what a row of a unit reads.
class Deal {
 public:
  // A dozen units a thread end together, more or less. Of a lone expert there are not so many rows,
  // and its units are as small as is read at full speed.
  Deal(int64_t groups, int64_t rows, int threads, int64_t piece, int64_t row_bytes)
      : groups_(groups), rows_(rows) {
    const int64_t dozen = rows * groups / (12 * threads) / piece * piece;
    const int64_t lone = round_up((kLeastUnitBytes + row_bytes - 1) / row_bytes, piece);
    unit_rows_ = least(kMostUnitRows, greatest(dozen, least(kPackAlign, lone)));
  }

  int64_t most_units() const { return groups_ * ((rows_ + unit_rows_ - 1) / unit_rows_); }
  // The first ``rows`` of a group.
  Unit* out(Unit* to, int64_t group, int64_t rows) const {
    for (int64_t first = 0; first < rows; first += unit_rows_)
      *to++ = {int32_t(group), int32_t(first), int32_t(least(unit_rows_, rows - first))};
    return to;
  }

 private:
  int64_t groups_, rows_, unit_rows_;
};

}  // namespace ftd
