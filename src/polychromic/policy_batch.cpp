// SPDX-License-Identifier: Apache-2.0
#include "polychromic/policy_batch.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/head/cross_entropy.hpp"

namespace weft::polychromic {

using namespace language_model;

PolicyBatch::Buffers::Buffers(const Settings& settings, model::StepArena& arena) {
  arena.purpose("answers");
  const std::int64_t rows = settings.sequences * settings.length;
  device = {arena.take<std::uint32_t>(rows), arena.take<std::int32_t>(rows), arena.take<std::int32_t>(rows),
            arena.take<float>(rows)};
  host = {arena.take_host<std::uint32_t>(rows), arena.take_host<std::int32_t>(rows),
          arena.take_host<std::int32_t>(rows), arena.take_host<float>(rows)};
  losses = arena.take<float>(rows);
  host_losses = arena.take_host<float>(rows);
  one = arena.take<float>(1);
}

PolicyBatch::PolicyBatch(const Settings& settings, const kernels::Execution& execution, model::StepArena& arena)
    : settings_(settings), execution_(execution), buffers_(settings, arena) {
  constexpr float kOne = 1;
  device::copy(execution_, buffers_.one.data, &kOne, sizeof kOne, device::Direction::to_device);
  kernels::fence(execution_);
}

void PolicyBatch::fill(std::span<const PolicyRow> rows) {
  kernels::fence(execution_);
  sequences_ = std::ssize(rows);
  length_ = 1;
  answers_.clear();
  for (const PolicyRow& row : rows) length_ = std::max(length_, std::ssize(row.prompt) + std::ssize(row.answer) - 1);
  if (sequences_ > settings_.sequences || length_ > settings_.length)
    throw error(ExitCode::internal, "{} answers of {} tokens do not fit a batch of {} of {}", sequences_, length_,
                settings_.sequences, settings_.length);
  const Buffers::Rows &host = buffers_.host, &device = buffers_.device;
  for (std::int64_t s = 0; s < sequences_; ++s) {
    const PolicyRow& row = rows[static_cast<std::size_t>(s)];
    const std::size_t prompt = row.prompt.size(), end = prompt + row.answer.size();
    answers_.emplace_back(prompt - 1, row.answer.size());
    const auto token = [&](std::size_t t) { return t < prompt ? row.prompt[t] : t < end ? row.answer[t - prompt] : 0; };
    for (std::int64_t position = 0; position < length_; ++position) {
      const auto t = static_cast<std::size_t>(position);
      const std::int64_t at = s * length_ + position;
      const bool counts = t + 1 >= prompt && t + 1 < end;
      host.ids[at] = token(t);
      host.targets[at] = counts ? static_cast<std::int32_t>(token(t + 1)) : kernels::kIgnored;
      host.positions[at] = static_cast<std::int32_t>(position);
      host.weights[at] = counts ? row.weights[t + 1 - prompt] : 0.0f;
    }
  }
  const auto copy = [&]<class T>(kernels::Array<T> to, kernels::Array<T> from) {
    device::copy(execution_, to.data, from.data, sequences_ * length_ * static_cast<std::int64_t>(sizeof(T)),
                 device::Direction::to_device);
  };
  copy(device.ids, host.ids);
  copy(device.targets, host.targets);
  copy(device.positions, host.positions);
  copy(device.weights, host.weights);
}

Tokens PolicyBatch::tokens(std::int64_t first, std::int64_t sequences) const {
  const std::int64_t begin = first * length_, rows = sequences * length_;
  const Buffers::Rows& device = buffers_.device;
  return {.sequences = sequences,
          .length = length_,
          .ids = {device.ids.data + begin, rows},
          .targets = {device.targets.data + begin, rows},
          .positions = {device.positions.data + begin, rows},
          .first_key = {},
          .scale = buffers_.one.data,
          .weights = {device.weights.data + begin, rows},
          .temperature = static_cast<float>(settings_.temperature),
          .top_p = settings_.top_p,
          .vocabulary = settings_.vocabulary,
          .drops = false,
          .by_row = true};
}

void PolicyBatch::add_gradients(Transformer& transformer, const kernels::AdamStep* step, model::GradientSink& sink,
                                std::int64_t passes, const std::function<void()>& between) const {
  for (std::int64_t first = 0; first < passes * together(); first += together()) {
    if (first >= sequences_) {
      transformer.pass_without_tokens(sink);
      continue;
    }
    const Tokens part = tokens(first, std::min(together(), sequences_ - first));
    transformer.forward(part, step);
    between();
    transformer.losses_and_gradient(part, {buffers_.losses.data + first * length_, part.rows()}, sink);
    transformer.backward(part, step, sink);
  }
}

void PolicyBatch::score(Transformer& transformer) const {
  for (std::int64_t first = 0; first < sequences_; first += together()) {
    const Tokens part = tokens(first, std::min(together(), sequences_ - first));
    transformer.forward(part, nullptr);
    transformer.losses(part, {buffers_.losses.data + first * length_, part.rows()});
  }
}

std::vector<std::vector<float>> PolicyBatch::log_probabilities() const {
  device::copy(execution_, buffers_.host_losses.data, buffers_.losses.data, 4 * sequences_ * length_,
               device::Direction::to_host);
  kernels::fence(execution_);
  std::vector<std::vector<float>> all;
  for (std::int64_t s = 0; s < sequences_; ++s) {
    const auto& [first, count] = answers_[static_cast<std::size_t>(s)];
    std::vector<float>& values = all.emplace_back();
    for (std::size_t t = first; t < first + count; ++t)
      values.push_back(-buffers_.host_losses[s * length_ + static_cast<std::int64_t>(t)]);
  }
  return all;
}

}  // namespace weft::polychromic
