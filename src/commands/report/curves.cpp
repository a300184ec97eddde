// SPDX-License-Identifier: Apache-2.0
#include "commands/report/curves.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "commands/report/facts.hpp"

namespace weft::commands {
namespace {

using report::Json;

constexpr std::size_t kMostPoints = 2048;  // a few per pixel
constexpr std::size_t kMostMetrics = 64;   // a record of Weft has about 15
constexpr std::string_view kByLayer = "layer_";

/// Mean and extremes of the finite values that were added.
struct Summary {
  double sum = 0, low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  std::int64_t count = 0;

  void add(double value) {
    if (std::isfinite(value)) merge({value, value, value, 1});
  }
  void merge(const Summary& other) {
    sum += other.sum;
    count += other.count;
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }
  double mean() const { return count > 0 ? sum / static_cast<double>(count) : kNoNumber; }
  double least() const { return count > 0 ? low : kNoNumber; }
  double most() const { return count > 0 ? high : kNoNumber; }
};

/// The records that one point summarises.
struct CurvePoint {
  double step = 0;
  std::vector<Summary> values, layers;  // by metric; shorter where later metrics are absent

  static Summary& at(std::vector<Summary>& summaries, std::size_t metric) {
    if (summaries.size() <= metric) summaries.resize(metric + 1);
    return summaries[metric];
  }
  void merge(const CurvePoint& other) {
    step = std::max(step, other.step);
    for (std::size_t i = 0; i < other.values.size(); ++i) at(values, i).merge(other.values[i]);
    for (std::size_t i = 0; i < other.layers.size(); ++i) at(layers, i).merge(other.layers[i]);
  }
};

/// Metric names in the order of first use; their index, or kMostMetrics when there are too many.
class Names {
 public:
  std::size_t index(std::string_view name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end() || names_.size() == kMostMetrics) return static_cast<std::size_t>(found - names_.begin());
    names_.emplace_back(name);
    return names_.size() - 1;
  }
  const std::vector<std::string>& all() const { return names_; }

 private:
  std::vector<std::string> names_;
};

CurvePoint point_of(const Json& record, double step, Names& names) {
  CurvePoint point;
  point.step = step;
  for (const auto& [key, value] : record.items()) {
    const bool by_layer = value.is_array() && key.starts_with(kByLayer);
    if (!by_layer && !std::isfinite(number(value))) continue;
    const std::size_t metric = names.index(by_layer ? std::string_view(key).substr(kByLayer.size()) : key);
    if (metric == kMostMetrics) continue;
    if (by_layer)
      for (const Json& layer : value) CurvePoint::at(point.layers, metric).add(number(layer));
    else
      CurvePoint::at(point.values, metric).add(number(value));
  }
  return point;
}

/// At most kMostPoints points: beyond that, neighbours are merged and later points take twice as many records.
class Thinned {
 public:
  void add(const CurvePoint& record) {
    if (pending_ == 0) points_.emplace_back();
    points_.back().merge(record);
    pending_ = (pending_ + 1) % records_per_point_;
    if (pending_ != 0 || points_.size() < kMostPoints) return;
    for (std::size_t i = 0; i < points_.size() / 2; ++i) {
      CurvePoint merged = std::move(points_[2 * i]);
      merged.merge(points_[2 * i + 1]);
      points_[i] = std::move(merged);
    }
    points_.resize(points_.size() / 2);
    records_per_point_ *= 2;
  }
  const std::vector<CurvePoint>& points() const { return points_; }
  std::int64_t records_per_point() const { return records_per_point_; }

 private:
  std::vector<CurvePoint> points_;
  std::int64_t records_per_point_ = 1, pending_ = 0;
};

}  // namespace

const Curve* Curves::find(std::string_view metric) const {
  for (const Curve& curve : metrics)
    if (curve.metric == metric) return &curve;
  return nullptr;
}

Curves read_curves(const std::filesystem::path& metrics) {
  Curves curves;
  Names names;
  Thinned thinned;
  for_each_line(metrics, [&](std::string_view text) {
    ++curves.records;
    const Json record = parse_json(text);
    const double step = number(member(record, {"step"}));
    if (!std::isfinite(step)) {
      ++curves.unreadable;
      return;
    }
    if (record.contains("loss") && !std::isfinite(number(record["loss"]))) ++curves.not_finite;
    thinned.add(point_of(record, step, names));
  });
  curves.records_per_point = thinned.records_per_point();
  for (const CurvePoint& point : thinned.points()) curves.step.push_back(point.step);
  for (std::size_t metric = 0; metric < names.all().size(); ++metric) {
    Curve& curve = curves.metrics.emplace_back(Curve{names.all()[metric], {}, {}, {}});
    for (const CurvePoint& point : thinned.points()) {
      const Summary value = metric < point.values.size() ? point.values[metric] : Summary{};
      const Summary layers = metric < point.layers.size() ? point.layers[metric] : Summary{};
      curve.mean.push_back(value.mean());
      curve.low.push_back(layers.least());
      curve.high.push_back(layers.most());
    }
  }
  return curves;
}

}  // namespace weft::commands
