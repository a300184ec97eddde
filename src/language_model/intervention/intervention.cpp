// SPDX-License-Identifier: Apache-2.0
#include "language_model/intervention/intervention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/gemm/gemm.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Form;
using kernels::Scalar;

namespace {

/// Reads a number from the front of a text, without it. False if there is none.
template <class Number>
bool take_number(std::string_view& text, Number& number) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}
bool take(std::string_view& text, char symbol) {
  if (!text.starts_with(symbol)) return false;
  text.remove_prefix(1);
  return true;
}

Intervention intervention_of(const std::string& given, bool scales) {
  const char* const option = scales ? "--scale-feature" : "--set-feature";
  Intervention result{.scales = scales, .text = fmt::format("{} {}", option, given)};
  std::string_view rest = given;
  std::pair<std::int64_t, std::int64_t> positions;
  const auto range = [&] {
    if (!take_number(rest, positions.first)) return false;
    positions.second = positions.first;
    result.positions = positions;
    if (!take(rest, '-')) return true;
    if (!take_number(rest, positions.second)) return false;
    result.positions = positions;
    return true;
  };
  const bool complete = take_number(rest, result.layer) && take(rest, ':') && take_number(rest, result.feature) &&
                        take(rest, '=') && take_number(rest, result.value) && (!take(rest, '@') || range()) &&
                        rest.empty();
  if (!complete || !std::isfinite(result.value))
    throw collective_error(ExitCode::usage,
                           "{} \"{}\" is not LAYER:FEATURE={}[@FIRST[-LAST]], as in 12:4031={}@5-9; correct it", option,
                           given, scales ? "FACTOR" : "VALUE", scales ? "2" : "0");
  if (positions.first < 0 || positions.second < positions.first)
    throw collective_error(ExitCode::usage, "{}: no position from {} to {} (they count from 0); correct the range",
                           result.text, positions.first, positions.second);
  return result;
}

bool overlap(const Intervention& a, const Intervention& b) {
  if (a.layer != b.layer || a.feature != b.feature) return false;
  return !a.positions || !b.positions ||
         (a.positions->first <= b.positions->second && b.positions->first <= a.positions->second);
}

std::int32_t position(std::int64_t value) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
}

device::Buffer<kernels::FeatureChange> on_device(const std::vector<Intervention>& list, std::int64_t n_features,
                                                 const kernels::Execution& execution) {
  std::vector<kernels::FeatureChange> changes;
  for (const Intervention& one : list)
    changes.push_back(
        {.key = static_cast<std::uint32_t>(one.layer * n_features + one.feature),
         .value = one.value,
         .begin = one.positions ? position(one.positions->first) : 0,
         .end = one.positions ? position(one.positions->second + 1) : std::numeric_limits<std::int32_t>::max(),
         .scales = one.scales});
  device::Buffer<kernels::FeatureChange> buffer(std::ssize(changes));
  device::copy(execution, buffer.data(), changes.data(), buffer.bytes(), device::Direction::to_device);
  kernels::fence(execution);
  return buffer;
}

}  // namespace

std::vector<Intervention> interventions(std::span<const std::string> set, std::span<const std::string> scale) {
  std::vector<Intervention> list;
  for (const std::string& text : set) list.push_back(intervention_of(text, false));
  for (const std::string& text : scale) list.push_back(intervention_of(text, true));
  std::stable_sort(list.begin(), list.end(), [](const Intervention& a, const Intervention& b) {
    return std::tie(a.layer, a.feature) < std::tie(b.layer, b.feature);
  });
  for (auto one = list.begin(); one != list.end(); ++one)
    for (auto other = one + 1; other != list.end() && other->layer == one->layer && other->feature == one->feature;
         ++other)
      if (overlap(*one, *other))
        throw collective_error(ExitCode::usage, "{} and {} change one feature at the same position; give one of them",
                               one->text, other->text);
  return list;
}

void require_fit(std::span<const Intervention> list, std::int64_t layers, std::int64_t features,
                 std::int64_t positions) {
  for (const Intervention& one : list) {
    if (one.layer < 0 || one.layer >= layers)
      throw collective_error(ExitCode::usage, "{}: no layer {} (the transcoder has layers 0 to {}); correct it",
                             one.text, one.layer, layers - 1);
    if (one.feature < 0 || one.feature >= features)
      throw collective_error(ExitCode::usage, "{}: no feature {} (a layer has features 0 to {}); correct it", one.text,
                             one.feature, features - 1);
    if (one.positions && one.positions->second >= positions)
      throw collective_error(ExitCode::usage, "{}: no position {} (texts have positions 0 to {}); correct the range",
                             one.text, one.positions->second, positions - 1);
  }
}

InterventionPass::InterventionPass(ChangedFeatures features, const TransformerSettings& settings, std::int64_t rows,
                                   bool freezes, Transformer& transformer, const kernels::Execution& execution)
    : features_(std::move(features)),
      width_(settings.architecture.model.d_model),
      columns_(settings.architecture.model.layers * width_),
      type_(settings.type),
      transformer_(transformer),
      execution_(execution),
      changes_(on_device(features_.changes, features_.n_features, execution)),
      inputs_(rows * columns_ * kernels::bytes_of(type_)),
      changed_(rows * std::ssize(features_.changes)) {
  std::int64_t workspace = 0;
  for (const Intervention& one : features_.changes) {
    if (sources_.empty() || sources_.back().layer != one.layer)
      sources_.push_back({one.layer, sources_.empty() ? 0 : sources_.back().first + sources_.back().count, 0});
    ++sources_.back().count;
  }
  for (const Source& source : sources_)
    workspace =
        std::max(workspace, kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, type_, rows, width_, source.count));
  workspace_ = device::Buffer<std::byte>(workspace);
  // Layers that are not read have inputs as others, so that as many features are active.
  device::zero(execution, inputs_.array());
  const AnyMatrix all{inputs_.data(), type_, rows, columns_, columns_};
  kernels::affine_rows(execution, all, {}, features_.mean, {}, all);
  if (freezes) frozen_.emplace(settings, rows, transformer, execution);
  tap();
}

void InterventionPass::tap() {
  transformer_.tap(
      [this](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) { change(layer, input, output); });
}

void InterventionPass::forward(const Tokens& tokens) {
  if (frozen_) {
    transformer_.tap({});
    frozen_->record();
    transformer_.forward(tokens, nullptr);
    frozen_->apply();
    tap();
  }
  transformer_.forward(tokens, nullptr);
}

void InterventionPass::change(std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
  const auto changed = [&](const Source& source) -> kernels::Matrix<float> {
    const std::int64_t most = changed_.size() / std::ssize(features_.changes);
    return {changed_.data() + source.first * most, input.rows, source.count, source.count};
  };
  for (const Source& source : sources_) {
    if (source.layer > layer) break;
    const kernels::Matrix<float> of_source = changed(source);
    if (source.layer == layer) {
      const AnyMatrix inputs{inputs_.data(), type_, input.rows, columns_, columns_};
      kernels::affine_rows(execution_, input, {}, {}, {}, inputs.columns_from(layer * width_, width_));
      kernels::feature_changes(execution_, features_.encode(inputs), {changes_.data() + source.first, source.count},
                               transformer_.tokens().positions, of_source);
    } else if (features_.vectors.per_layer) {
      continue;
    }
    const device::Buffer<float>& decoders = features_.vectors.decoders[static_cast<std::size_t>(source.layer)];
    const std::int64_t written = decoders.size() / source.count;
    const AnyMatrix vectors{decoders.data() + (layer - source.layer) * width_, Scalar::fp32, source.count, width_,
                            written};
    kernels::gemm(execution_, 1, {of_source.data, Scalar::fp32, input.rows, source.count, source.count}, Form::plain,
                  vectors, Form::plain, 1, output, workspace_.array());
  }
}

}  // namespace weft::language_model
