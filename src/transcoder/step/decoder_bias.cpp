// SPDX-License-Identifier: Apache-2.0
#include "transcoder/step/decoder_bias.hpp"

#include "device/memory.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/pair_bias.hpp"
#include "kernels/transcoder/loss/loss.hpp"

namespace weft::transcoder {

DecoderBiasUpdate::Buffers::Buffers(const Configuration& configuration, const Shape& shape, model::StepArena& arena) {
  arena.purpose("backward pass");
  gradient = arena.take<float>(shape.width());
  if (configuration.transcoder.decoder_bias == DecoderBias::pair) pair = arena.take<float>(shape.width());
}

DecoderBiasUpdate::DecoderBiasUpdate(const Model& model, const kernels::Execution& execution, const Buffers& buffers)
    : model_(model), execution_(execution), buffers_(buffers) {}

void DecoderBiasUpdate::form(const kernels::Execution& communication, kernels::AnyMatrix gradient_rows) {
  kernels::column_sums(communication, gradient_rows, buffers_.gradient);
}

kernels::Matrix<const float> DecoderBiasUpdate::norm_row() const {
  const kernels::Array<float> row = buffers_.pair.size > 0 ? buffers_.pair : buffers_.gradient;
  return {row.data, 1, row.size, row.size};
}

void DecoderBiasUpdate::form_norm() {
  if (buffers_.pair.size > 0)
    kernels::norm_of_pairs(execution_, buffers_.gradient, model_.shape().d_model, buffers_.pair);
}

void DecoderBiasUpdate::update(const kernels::AdamStep* step) {
  const kernels::ParameterVector& bias = model_.decoder_bias();
  const kernels::Array<float> before = buffers_.pair;
  if (before.size > 0)
    device::copy(execution_, before.data, bias.weight.data, before.size * static_cast<std::int64_t>(sizeof(float)),
                 device::Direction::on_device);
  kernels::adam_vector(execution_, bias, buffers_.gradient, step);
  if (before.size > 0) kernels::extend_update(execution_, before, model_.shape().d_model, bias.weight);
}

}  // namespace weft::transcoder
