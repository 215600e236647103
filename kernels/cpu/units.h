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

// Deals out a matrix of each group; each unit begins at a multiple of kPackAlign.
class Deal {
 public:
  // A dozen units a thread end together, more or less; below 32 rows reading suffers.
  Deal(int64_t groups, int64_t rows, int threads)
      : groups_(groups),
        rows_(rows),
        unit_rows_(greatest(kPackAlign, least(kMostUnitRows, rows * groups / (12 * threads) /
                                                                 kPackAlign * kPackAlign))) {}

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
