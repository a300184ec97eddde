// SPDX-License-Identifier: Apache-2.0
#include "privacy/kept_rows.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "kernels/convert/convert_rows.hpp"

namespace weft::privacy {

using kernels::AnyMatrix;
using model::GradientRows;
using model::GradientSink;
using Form = GradientRows::Form;

/// Offset of the first byte after a copy; 0 for a matrix that is not a copy.
std::int64_t KeptRows::end_of(const AnyMatrix& matrix) const {
  const auto* const data = static_cast<const std::byte*>(matrix.data);
  if (data < memory_.data || data >= memory_.data + memory_.size) return 0;
  const std::int64_t bytes = matrix.rows * matrix.columns * kernels::bytes_of(matrix.type),
                     end = data - memory_.data + (bytes + kKeptAlignment - 1) / kKeptAlignment * kKeptAlignment;
  return std::min(end, memory_.size);
}

AnyMatrix KeptRows::copied(const AnyMatrix& rows) {
  const std::int64_t bytes = rows.rows * rows.columns * kernels::bytes_of(rows.type);
  if (size_ + bytes > memory_.size)
    throw error(ExitCode::internal, "{} bytes of kept rows do not fit the planned {}", size_ + bytes, memory_.size);
  const AnyMatrix copy{memory_.data + size_, rows.type, rows.rows, rows.columns, rows.columns};
  kernels::copy_rows(execution_, rows, copy);
  size_ = end_of(copy);
  return copy;
}

void KeptRows::free_all_but(std::span<const GradientRows> rows) {
  size_ = 0;
  for (const GradientRows& one : rows) size_ = std::max({size_, end_of(one.inputs), end_of(one.gradients)});
}

GradientRows KeptRows::keep(GradientRows rows) {
  if (!rows.gradients_stay) rows.gradients = copied(rows.gradients);
  if (rows.form == Form::product && !rows.inputs_stay) rows.inputs = copied(rows.inputs);
  rows.gradients_stay = rows.inputs_stay = true;
  return rows;
}

namespace {

class UntilTheEnd final : public GradientSink {
 public:
  UntilTheEnd(GradientSink& to, KeptRows& kept) : to_(to), kept_(kept) {}
  void take(const GradientRows& rows) override {
    if (rows.form == Form::product || rows.form == Form::lookup)
      rows_.push_back(kept_.keep(rows));
    else
      to_.take(rows);
  }
  bool takes_sums() const override { return to_.takes_sums(); }
  void hand_over() {
    for (const GradientRows& rows : rows_) to_.take(rows);
  }

 private:
  GradientSink& to_;
  KeptRows& kept_;
  std::vector<GradientRows> rows_;
};

}  // namespace

void pass_over_all(Passes& passes, const MicroBatch& batch, GradientSink& sink, Release release, KeptRows& kept) {
  if (release == Release::eager) return passes.pass(batch.all(), sink);
  UntilTheEnd until_the_end(sink, kept);
  passes.pass(batch.all(), until_the_end);
  until_the_end.hand_over();
}

}  // namespace weft::privacy
