// SPDX-License-Identifier: Apache-2.0
//
// Norms in one backward pass, the clipped sums in a second one that repeats its bits. Takes the least memory.
#include <utility>

#include "privacy/kept_rows.hpp"
#include "privacy/modes.hpp"
#include "privacy/record_norms.hpp"

namespace weft::privacy {
namespace {

class NormsOfPass final : public model::GradientSink {
 public:
  explicit NormsOfPass(RecordNorms& norms) : norms_(norms) {}
  void take(const model::GradientRows& rows) override { norms_.add(rows); }
  bool takes_sums() const override { return true; }

 private:
  RecordNorms& norms_;
};

/// Sink of the second pass. The sums of vectors have already been formed, with the factors.
class SumsOfPass final : public model::GradientSink {
 public:
  explicit SumsOfPass(RecordNorms& norms) : norms_(norms) {}
  void take(const model::GradientRows& rows) override {
    if (rows.form == model::GradientRows::Form::product || rows.form == model::GradientRows::Form::lookup)
      norms_.add_clipped(rows);
  }
  void complete_from(std::size_t first) override { norms_.context().sum.complete_from(first); }

 private:
  RecordNorms& norms_;
};

class TwoPass final : public Clipping {
 public:
  TwoPass(const ClippingContext& context, ClippingBuffers&& buffers) : norms_(context, std::move(buffers)) {}

  void add(const MicroBatch& batch, Passes& passes) override {
    KeptRows kept(norms_.context().execution, norms_.buffers().kept);
    NormsOfPass first(norms_);
    SumsOfPass second(norms_);
    norms_.begin(batch);
    pass_over_all(passes, batch, first, norms_.context().settings.release, kept);
    norms_.form_factors();
    passes.pass(batch.all(), second);
  }

 private:
  RecordNorms norms_;
};

}  // namespace

std::unique_ptr<Clipping> make_two_pass(const ClippingContext& context, ClippingBuffers&& buffers) {
  return std::make_unique<TwoPass>(context, std::move(buffers));
}

}  // namespace weft::privacy
