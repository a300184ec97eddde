// SPDX-License-Identifier: Apache-2.0
//
// A small language model with its memory, and tokens for it: what tests of the forward and backward pass need.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"
#include "tests/test.hpp"

namespace weft::testing {

using namespace language_model;

inline double random_normal(std::uint64_t stream, std::int64_t index) {
  return kernels::normal(kernels::philox(5, kernels::Purpose::test, stream, static_cast<std::uint64_t>(index)));
}

inline std::vector<float> to_host(const void* data, std::int64_t size) {
  std::vector<float> host(static_cast<std::size_t>(size));
  device::copy(execution(), host.data(), data, 4 * size, device::Direction::to_host);
  kernels::fence(execution());
  return host;
}

class SmallModel {
 public:
  SmallModel(const TransformerSettings& settings, std::int64_t sequences, std::int64_t length)
      : settings_(settings),
        sequences_(sequences),
        length_(length),
        grid_(world(), single_process()),
        arena_(execution(), grid_),
        model_(settings.architecture, settings.storage, grid_.shape(), 0, execution(), model::Moments::none),
        staging_(sequences * length, false, execution(), arena_),
        transformer_(model_, settings, timers_, arena_),
        sink_(model_.parameters(), execution(), sequences * length),
        losses_(sequences * length),
        step_(1) {
    kernels::AdamStep step{};
    step.seed = 3;
    step.step = 7;
    device::copy(execution(), step_.data(), &step, sizeof step, device::Direction::to_device);
    // Larger weights than at the start of a training run: gradients of all parameters are then well above rounding.
    for (std::size_t i = 0; i < model_.parameters().size(); ++i) {
      std::vector<float> values = get(i);
      for (std::size_t k = 0; k < values.size(); ++k) {
        const double noise = random_normal(i, static_cast<std::int64_t>(k));
        values[k] = static_cast<float>(model_.parameters().specs()[i].is_matrix()
                                           ? 0.3 * noise
                                           : model_.parameters().specs()[i].initial.value + 0.2 * noise);
      }
      set(i, values);
    }
    dataset::TokenBatch batch = staging_.next(sequences, length);
    for (std::int64_t row = 0; row < batch.rows(); ++row) {
      const auto at = static_cast<std::size_t>(row);
      batch.ids[at] = static_cast<std::uint32_t>(row * row * 7 % settings.architecture.vocabulary);
      batch.targets[at] =
          row % 5 == 2 ? kernels::kIgnored : static_cast<std::int32_t>(row * 3 % settings.architecture.vocabulary);
      batch.positions[at] = static_cast<std::int32_t>(row % length);
      if (batch.targets[at] != kernels::kIgnored) ++batch.counted;
    }
    staging_.send(batch);
    counted_ = batch.counted;
  }

  const Model& model() const { return model_; }
  const model::Parameters& parameters() const { return model_.parameters(); }
  const model::AccumulatingSink& sink() const { return sink_; }
  Transformer& transformer() { return transformer_; }
  Tokens tokens(std::int64_t first, std::int64_t count) const { return staging_.tokens(first, count, length_); }
  Tokens tokens() const { return tokens(0, sequences_); }

  std::vector<float> get(std::size_t parameter) const {
    const model::ParameterSpec& spec = parameters().specs()[parameter];
    if (!spec.is_matrix()) return to_host(parameters().vector(parameter).weight.data, spec.elements());
    const device::Buffer<float> staged(spec.elements());
    kernels::weights_to_float(execution(), parameters().matrix(parameter), 0,
                              staged.matrix(spec.rows(), spec.columns()));
    return to_host(staged.data(), spec.elements());
  }
  void set(std::size_t parameter, const std::vector<float>& values) {
    const model::ParameterSpec& spec = parameters().specs()[parameter];
    const device::Buffer<float> staged(spec.elements());
    float* const to = spec.is_matrix() ? staged.data() : parameters().vector(parameter).weight.data;
    device::copy(execution(), to, values.data(), 4 * spec.elements(), device::Direction::to_device);
    if (spec.is_matrix())
      kernels::weights_from_float(execution(), parameters().matrix(parameter), 0,
                                  staged.matrix(spec.rows(), spec.columns()));
    kernels::fence(execution());
  }

  /// Mean loss of the counted targets.
  double loss() {
    transformer_.prepare_step();
    transformer_.forward(tokens(), step_.data());
    transformer_.losses(tokens(), losses_.array());
    return mean_of_losses();
  }
  double mean_of_losses() const {
    double sum = 0;
    for (const float loss : to_host(losses_.data(), losses_.size())) sum += static_cast<double>(loss);
    return sum / static_cast<double>(counted_);
  }
  /// Loss, and gradients by parameter; in micro-batches of `micro` sequences, 0: one. by_rows: through a sink that
  /// takes no sums of rows.
  double gradient(std::vector<std::vector<float>>& gradients, std::int64_t micro = 0, bool by_rows = false) {
    struct RowsSink final : model::GradientSink {
      explicit RowsSink(model::GradientSink& to_) : to(to_) {}
      void take(const model::GradientRows& rows) override { to.take(rows); }
      model::GradientSink& to;
    } rows_sink(sink_);
    model::GradientSink& sink = by_rows ? static_cast<model::GradientSink&>(rows_sink) : sink_;
    sink_.clear();
    if (micro == 0) micro = sequences_;
    transformer_.prepare_step();
    for (std::int64_t first = 0; first < sequences_; first += micro)
      micro_batch(first, std::min(micro, sequences_ - first), sink);
    gradients = this->gradients();
    return mean_of_losses();
  }
  /// The gradient of the head's input, [rows, C], of a model in fp32.
  std::vector<float> hidden_gradient() {
    // The first rows that the backward pass hands over below the head are those of the final norm.
    struct FirstNorm final : model::GradientSink {
      void take(const model::GradientRows& rows) override {
        if (rows.form == model::GradientRows::Form::column_product && values.empty())
          values = to_host(rows.gradients.data, rows.gradients.rows * rows.gradients.columns);
      }
      std::vector<float> values;
    } sink;
    transformer_.prepare_step();
    micro_batch(0, sequences_, sink);
    return sink.values;
  }
  /// What the sequences [first, first + count) alone add to the gradients.
  std::vector<std::vector<float>> gradient_of(std::int64_t first, std::int64_t count) {
    sink_.clear();
    transformer_.prepare_step();
    micro_batch(first, count, sink_);
    return gradients();
  }

 private:
  void micro_batch(std::int64_t first, std::int64_t count, model::GradientSink& sink) {
    const Tokens part = tokens(first, count);
    transformer_.forward(part, step_.data());
    transformer_.losses_and_gradient(part, {losses_.data() + first * length_, part.rows()}, sink);
    transformer_.backward(part, step_.data(), sink);
  }
  std::vector<std::vector<float>> gradients() const {
    std::vector<std::vector<float>> all;
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      const model::ParameterSpec& spec = parameters().specs()[i];
      if (spec.frozen)
        all.emplace_back();  // it has none
      else
        all.push_back(to_host(spec.is_matrix() ? sink_.matrix(i).data : sink_.vector(i).data, spec.elements()));
    }
    return all;
  }

  const TransformerSettings settings_;
  const std::int64_t sequences_, length_;
  parallel::Grid grid_;
  run::Timers timers_;
  model::StepArena arena_;
  Model model_;
  Staging staging_;
  Transformer transformer_;
  model::AccumulatingSink sink_;
  device::Buffer<float> losses_;
  device::Buffer<kernels::AdamStep> step_;
  std::int64_t counted_ = 0;
};

inline double norm_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

/// Slope of the loss in the direction of a gradient of parameter i, which is the norm of the right one. Central
/// differences, extrapolated to step 0: the error of the formula is of order step^4. Rounding of the losses: 1e-7 /
/// step.
inline double slope_along(SmallModel& model, std::size_t i, const std::vector<float>& gradient) {
  const double length = norm_of(gradient);
  const std::vector<float> at = model.get(i);
  const auto central = [&](double step) {
    double losses[2] = {};
    for (const int side : {0, 1}) {
      std::vector<float> moved = at;
      for (std::size_t k = 0; k < at.size(); ++k)
        moved[k] += static_cast<float>((side == 1 ? step : -step) * static_cast<double>(gradient[k]) / length);
      model.set(i, moved);
      losses[side] = model.loss();
    }
    return (losses[1] - losses[0]) / (2 * step);
  };
  constexpr double kStep = 1e-2;
  const double slope = (4 * central(kStep) - central(2 * kStep)) / 3;
  model.set(i, at);
  return slope;
}

}  // namespace weft::testing
