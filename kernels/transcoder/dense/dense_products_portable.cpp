// SPDX-License-Identifier: Apache-2.0
// Calls CBLAS directly: gemm divides products among threads differently, which would change the last bits.
#include <cblas.h>

#include "kernels/portable.hpp"
#include "kernels/transcoder/dense/dense_products.hpp"

namespace weft::kernels {
namespace {

enum class Form { plain, transposed };

// out = factor * out + op(a) op(b).
void product(Form a_form, Matrix<const float> a, Form b_form, Matrix<const float> b, float factor, Matrix<float> out) {
  const auto form = [](Form f) { return f == Form::plain ? CblasNoTrans : CblasTrans; };
  const std::int64_t inner = a_form == Form::plain ? a.columns : a.rows;
  cblas_sgemm(CblasRowMajor, form(a_form), form(b_form), static_cast<blasint>(out.rows),
              static_cast<blasint>(out.columns), static_cast<blasint>(inner), 1.0f, a.data,
              static_cast<blasint>(a.stride), b.data, static_cast<blasint>(b.stride), factor, out.data,
              static_cast<blasint>(out.stride));
}

// The last `columns` columns: the targets of a source layer.
template <class T>
Matrix<T> last_columns(Matrix<T> matrix, std::int64_t columns) {
  return {matrix.data + (matrix.columns - columns), matrix.rows, columns, matrix.stride};
}

}  // namespace

void scatter_activations(const Execution& execution, const SparseActivations& activations, Array<const float> value,
                         std::int64_t layer, Matrix<float> dense) {
  const std::int64_t* offsets = activations.row_offsets.data;
  const std::uint32_t* keys = activations.key.data;
  const std::int64_t first_key = layer * activations.n_features;
  for_teams(
      execution, "scatter_activations", dense.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t token = team.league_rank();
        float* row = dense.row(token);
        for_columns(team, static_cast<int>(dense.columns), [&](int c) { row[c] = 0.0f; });
        for (std::int64_t entry = offsets[token]; entry < offsets[token + 1]; ++entry) {
          const std::int64_t feature = static_cast<std::int64_t>(keys[entry]) - first_key;
          if (feature >= 0 && feature < dense.columns) row[feature] = value[entry];
        }
      });
}

void mask_gradient(const Execution& execution, Matrix<const float> activations, Matrix<float> gradient) {
  for_teams(
      execution, "mask_gradient", gradient.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const float* active = activations.row(team.league_rank());
        float* row = gradient.row(team.league_rank());
        for_columns(team, static_cast<int>(gradient.columns),
                    [&](int c) { row[c] = active[c] != 0.0f ? row[c] : 0.0f; });
      });
}

void dense_decode(const Execution&, std::span<const Matrix<const float>> activations,
                  std::span<const Matrix<const float>> decoder, Matrix<float> y) {
  // Layer 0 writes to every target, so its product overwrites y and the others add.
  for (std::size_t s = 0; s < decoder.size(); ++s)
    product(Form::plain, activations[s], Form::plain, decoder[s], s == 0 ? 0.0f : 1.0f,
            last_columns(y, decoder[s].columns));
}

void dense_decoder_gradient(const Execution&, Matrix<const float> activations, Matrix<const float> gradient_rows,
                            Matrix<float> out) {
  product(Form::transposed, activations, Form::plain, last_columns(gradient_rows, out.columns), 0.0f, out);
}

void dense_activation_gradient(const Execution&, Matrix<const float> decoder, Matrix<const float> gradient_rows,
                               Matrix<float> out) {
  product(Form::plain, last_columns(gradient_rows, decoder.columns), Form::transposed, decoder, 0.0f, out);
}

void dense_encoder_gradient(const Execution&, Matrix<const float> preactivation_gradient, Matrix<const float> x,
                            Matrix<float> out) {
  product(Form::transposed, preactivation_gradient, Form::plain, x, 0.0f, out);
}

}  // namespace weft::kernels
