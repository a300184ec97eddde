// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/frozen_pass.hpp"

#include "kernels/convert/convert_rows.hpp"
#include "kernels/language/norm/frozen_norm.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;

namespace {

std::int64_t width_of(const TransformerSettings& settings) {
  return settings.architecture.query_width() + settings.architecture.key_width();
}
std::int64_t projection_bytes(const TransformerSettings& settings, std::int64_t rows) {
  return settings.architecture.model.layers * rows * width_of(settings) * kernels::bytes_of(settings.type);
}
/// Number of inverse denominators that are kept: of up to four norms per block, and the final one.
std::int64_t n_inverses(const TransformerSettings& settings, std::int64_t rows) {
  return (4 * settings.architecture.model.layers + 1) * rows;
}

}  // namespace

FrozenPass::FrozenPass(const TransformerSettings& settings, std::int64_t rows, Transformer& transformer,
                       const kernels::Execution& execution)
    : width_(width_of(settings)),
      rows_(rows),
      type_(settings.type),
      transformer_(transformer),
      execution_(execution),
      queries_and_keys_(projection_bytes(settings, rows)),
      inverses_(n_inverses(settings, rows)) {}

std::int64_t FrozenPass::bytes(const TransformerSettings& settings, std::int64_t rows) {
  return projection_bytes(settings, rows) + 4 * n_inverses(settings, rows);
}

AnyMatrix FrozenPass::queries_and_keys(std::int64_t layer, std::int64_t rows) const {
  return {queries_and_keys_.data() + layer * rows_ * width_ * kernels::bytes_of(type_), type_, rows, width_, width_};
}

kernels::Array<float> FrozenPass::next_inverse(std::int64_t rows) {
  return {inverses_.data() + norms_++ * rows_, rows};
}

void FrozenPass::record() {
  norms_ = 0;
  transformer_.hook_norms([this](const kernels::NormWeights& weights, const AnyMatrix& x, const AnyMatrix& addend,
                                 const AnyMatrix& sum, const AnyMatrix& y, const kernels::NormStatistics& statistics) {
    kernels::norm_forward(execution_, weights, x, addend, sum, y, statistics);
    device::copy(execution_, next_inverse(x.rows).data, statistics.inverse.data, 4 * x.rows,
                 device::Direction::on_device);
  });
  transformer_.hook_attention([this](std::int64_t layer, const AnyMatrix& packed, const AnyMatrix&) {
    kernels::copy_rows(execution_, packed.columns_from(0, width_), queries_and_keys(layer, packed.rows));
    return false;
  });
}

void FrozenPass::apply() {
  norms_ = 0;
  transformer_.hook_norms([this](const kernels::NormWeights& weights, const AnyMatrix& x, const AnyMatrix& addend,
                                 const AnyMatrix& sum, const AnyMatrix& y, const kernels::NormStatistics&) {
    const bool adds = addend.data != nullptr;
    if (adds) kernels::add_rows(execution_, x, addend, sum);
    const kernels::Array<float> inverse = next_inverse(x.rows);
    kernels::frozen_norm_forward(execution_, weights, {inverse.data, inverse.size}, adds ? sum : x, y);
  });
  transformer_.hook_attention([this](std::int64_t layer, const AnyMatrix& packed, const AnyMatrix&) {
    kernels::copy_rows(execution_, queries_and_keys(layer, packed.rows), packed.columns_from(0, width_));
    return false;
  });
}

void FrozenPass::release() {
  transformer_.hook_norms({});
  transformer_.hook_attention({});
}

}  // namespace weft::language_model
