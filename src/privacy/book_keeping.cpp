// SPDX-License-Identifier: Apache-2.0
//
// One pass: inputs and output gradients of products and lookups are kept until the factors are known (Bu et al. 2022,
// arXiv:2210.00038). Those that the backward pass writes over are copied. With parts that are clipped by themselves
// (privacy.scheme) the sums of a block are formed when the backward pass leaves it.
#include <algorithm>
#include <utility>

#include "privacy/kept_rows.hpp"
#include "privacy/modes.hpp"
#include "privacy/record_norms.hpp"

namespace weft::privacy {
namespace {

using model::GradientRows;

class BookKeeping final : public Clipping, private model::GradientSink {
 public:
  BookKeeping(const ClippingContext& context, ClippingBuffers&& buffers)
      : norms_(context, std::move(buffers)), kept_(context.execution, norms_.buffers().kept) {}

  void add(const MicroBatch& batch, Passes& passes) override {
    rows_.clear();
    kept_.free_all_but({});
    norms_.begin(batch);
    pass_over_all(passes, batch, *this, norms_.context().settings.release, kept_);
    norms_.form_factors();
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      norms_.add_clipped(rows_[i]);
      norms_.complete_before(std::span(rows_).subspan(i + 1));
    }
  }

 private:
  void take(const GradientRows& rows) override {
    norms_.add(rows);
    if (rows.form == GradientRows::Form::product || rows.form == GradientRows::Form::lookup)
      rows_.push_back(kept_.keep(rows));
  }
  bool takes_sums() const override { return true; }

  /// The backward pass has left the parameters from `first` on: their parts need not wait for the others.
  void complete_from(std::size_t first) override {
    if (!norms_.context().settings.sums_by_part()) return;
    first = norms_.whole_parts_from(first);
    if (first == norms_.open()) return;
    norms_.form_factors(first);
    const auto closed = std::stable_partition(rows_.begin(), rows_.end(),
                                              [first](const GradientRows& rows) { return rows.parameter < first; });
    for (auto rows = closed; rows != rows_.end(); ++rows) norms_.add_clipped(*rows);
    rows_.erase(closed, rows_.end());
    kept_.free_all_but(rows_);
    norms_.context().sum.complete_from(first);
  }

  RecordNorms norms_;
  KeptRows kept_;
  std::vector<GradientRows> rows_;  // whose sums are still to be formed
};

}  // namespace

std::unique_ptr<Clipping> make_book_keeping(const ClippingContext& context, ClippingBuffers&& buffers) {
  return std::make_unique<BookKeeping>(context, std::move(buffers));
}

}  // namespace weft::privacy
