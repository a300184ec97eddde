// SPDX-License-Identifier: Apache-2.0
//
// One pass: the gradient of each record for every product is stored in bf16. Its norm is that of the rounded values,
// and the rounded values are summed. Takes 2 bytes per record and parameter.
#include <utility>

#include "privacy/kept_rows.hpp"
#include "privacy/modes.hpp"
#include "privacy/record_norms.hpp"

namespace weft::privacy {
namespace {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::bf16;
using kernels::Matrix;
using model::GradientRows;
using Form = GradientRows::Form;

class Materialise final : public Clipping, private model::GradientSink {
 public:
  Materialise(const ClippingContext& context, ClippingBuffers&& buffers)
      : norms_(context, std::move(buffers)),
        kept_(context.execution, norms_.buffers().kept),
        formed_rows_(context.parameters.size()) {
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < formed_rows_.size(); ++i) {
      const model::ParameterSpec& spec = norms_.parameters().specs[i];
      begin_.push_back(elements);
      if (spec.is_matrix() && !spec.frozen && !context.shape.is_table(i))
        elements += padded_rows(spec, spec.rows()) * spec.columns();
    }
  }

  void add(const MicroBatch& batch, Passes& passes) override {
    rows_.clear();
    kept_.free_all_but({});
    norms_.begin(batch);
    pass_over_all(passes, batch, *this, norms_.context().settings.release, kept_);
    norms_.form_factors();
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      rows_[i].form == Form::product ? add_stored(rows_[i]) : norms_.add_clipped(rows_[i]);
      norms_.complete_before(std::span(rows_).subspan(i + 1));
    }
  }

 private:
  void take(const GradientRows& given) override {
    const bool of_tied_table = given.form == Form::lookup && norms_.context().shape.is_tied(given.parameter);
    if (given.form != Form::product && !of_tied_table) {
      norms_.add(given);
      if (given.form == Form::lookup) rows_.push_back(kept_.keep(given));
      return;
    }
    norms_.context().phase("norms of records");
    const GradientRows rows = norms_.as_stored(given);
    norms_.cover(rows);
    if (of_tied_table) return add_to_stored(rows);
    store(rows);
    if (rows.first_example == 0) rows_.push_back(rows);  // the first of those of the micro-batch
  }
  bool takes_sums() const override { return true; }

  /// Gradients of a parameter, of all records.
  Matrix<bf16> stored(std::size_t parameter) const {
    const std::int64_t elements = formed_rows_[parameter] * norms_.parameters().specs[parameter].columns();
    return {norms_.buffers().stored.data + begin_[parameter] * norms_.context().shape.examples.examples,
            norms_.batch().examples.count(), elements, elements};
  }

  void store(const GradientRows& rows) {
    const AnyMatrix gradients = norms_.output_gradients(rows);
    formed_rows_[rows.parameter] = gradients.columns;
    const Matrix<bf16> all = stored(rows.parameter);
    // The norm of a tied matrix is formed after the lookup has been added.
    const bool tied = norms_.context().shape.is_tied(rows.parameter);
    kernels::form_examples(norms_.context().execution, rows.inputs, gradients, rows.examples,
                           {all.row(rows.first_example), rows.examples.count(), all.columns, all.stride},
                           tied ? Array<double>{} : norms_.squares(rows), norms_.buffers().workspace);
  }

  void add_to_stored(const GradientRows& rows) {
    const Matrix<bf16> all = stored(rows.parameter);
    // Ids of other ranks are not those of the rows of zeros.
    const Matrix<bf16> table{all.data, all.rows, norms_.held_by(rows) * rows.gradients.columns, all.stride};
    kernels::add_lookup_to_examples(norms_.context().execution, rows.ids, rows.gradients, norms_.first_row(rows),
                                    rows.examples, table, norms_.buffers().workspace);
    kernels::add_stored_norms(norms_.context().execution, view(all), norms_.squares(rows), norms_.buffers().workspace);
  }

  void add_stored(const GradientRows& rows) {
    norms_.context().phase("clipped sums");
    const Matrix<bf16> all = stored(rows.parameter);
    kernels::add_clipped_examples(norms_.context().execution, view(all), norms_.factors(rows.parameter, 0, all.rows),
                                  {norms_.context().sum.begin_sum(rows.parameter, rows.count).data, all.columns});
  }

  RecordNorms norms_;
  KeptRows kept_;
  std::vector<std::int64_t> formed_rows_, begin_;  // by parameter: of stored gradients; in the elements of a record
  std::vector<GradientRows> rows_;                 // whose sums are still to be formed
};

}  // namespace

std::unique_ptr<Clipping> make_materialise(const ClippingContext& context, ClippingBuffers&& buffers) {
  return std::make_unique<Materialise>(context, std::move(buffers));
}

}  // namespace weft::privacy
