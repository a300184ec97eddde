// SPDX-License-Identifier: Apache-2.0
#include "commands/report/facts.hpp"

#include <fmt/chrono.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "checkpoint/directory.hpp"
#include "kernels/bf16.hpp"
#include "storage/durable.hpp"
#include "storage/tensor_file.hpp"

namespace weft::commands {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using kernels::Scalar;
using report::Json;

constexpr std::int64_t kLargestText = std::int64_t{64} << 20;
constexpr std::int64_t kLargestInput = std::int64_t{1} << 20;
constexpr std::size_t kLongestLine = std::size_t{1} << 20;
constexpr int kDeepest = 32;               // of a JSON file: Weft's own have 6
constexpr std::size_t kMostPoints = 2048;  // of a curve: a few a pixel
constexpr std::size_t kMostStarts = 10'000;
constexpr std::size_t kMostCheckpoints = 50;
constexpr std::size_t kMostLayers = 256;
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

/// Whole lines of a text file, one by one; a torn last one is left out. Stops at a line longer than kLongestLine.
template <class Function>
void for_each_line(const fs::path& path, Function&& function) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> line(kLongestLine);
  while (file.getline(line.data(), static_cast<std::streamsize>(line.size())) && !file.eof())
    function(std::string_view(line.data(), static_cast<std::size_t>(file.gcount()) - 1));
}

/// Brackets inside brackets, outside texts: what walks a document calls itself this often.
int nesting_of(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\')
      ++i;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && (c == '{' || c == '['))
      deepest = std::max(deepest, ++depth);
    else if (!quoted && (c == '}' || c == ']'))
      --depth;
  }
  return deepest;
}

Json read_json(const fs::path& path) {
  const std::string text = storage::read_text(path, kLargestText);
  return nesting_of(text) <= kDeepest ? Json::parse(text, nullptr, false) : Json();
}

// --- curves --------------------------------------------------------------------------------------------------------

enum Column { kStep, kLoss, kRate, kNorm, kSpeed, kDead, kNmse, kL0, kNmseLayers, kL0Layers, kColumns };

/// What is known of the records behind one point.
struct Point {
  std::array<double, kColumns> sum{}, low, high;
  std::array<std::int64_t, kColumns> count{};
  Point() {
    low.fill(std::numeric_limits<double>::infinity());
    high.fill(-std::numeric_limits<double>::infinity());
  }
  void take(Column column, double value) {
    if (!std::isfinite(value)) return;
    sum[column] += value;
    ++count[column];
    low[column] = std::min(low[column], value);
    high[column] = std::max(high[column], value);
  }
  void take(Column column, const Json& values) {
    if (values.is_array())
      for (const Json& value : values) take(column, number(value));
  }
  void merge(const Point& other) {
    for (int column = 0; column < kColumns; ++column) {
      sum[column] += other.sum[column];
      count[column] += other.count[column];
      low[column] = std::min(low[column], other.low[column]);
      high[column] = std::max(high[column], other.high[column]);
    }
  }
  double mean(Column column) const {
    return count[column] > 0 ? sum[column] / static_cast<double>(count[column]) : kNothing;
  }
  double least(Column column) const { return count[column] > 0 ? low[column] : kNothing; }
  double most(Column column) const { return count[column] > 0 ? high[column] : kNothing; }
};

Point point_of(const Json& line) {
  Point point;
  point.take(kStep, number(member(line, {"step"})));
  point.take(kLoss, number(member(line, {"loss"})));
  point.take(kRate, number(member(line, {"learning_rate"})));
  point.take(kNorm, number(member(line, {"gradient_norm"})));
  point.take(kSpeed, number(member(line, {"tokens_per_second"})));
  point.take(kDead, 100 * number(member(line, {"dead_fraction"})));
  point.take(kNmse, number(member(line, {"nmse_standardised"})));
  point.take(kL0, number(member(line, {"l0"})));
  point.take(kNmseLayers, member(line, {"layer_nmse_standardised"}));
  point.take(kL0Layers, member(line, {"layer_l0"}));
  return point;
}

/// At most kMostPoints points, whatever comes: when there are more, neighbours become one.
class Thinned {
 public:
  void add(const Point& record) {
    if (waiting_ == 0) points_.emplace_back();
    points_.back().merge(record);
    waiting_ = (waiting_ + 1) % records_per_point_;
    if (waiting_ != 0 || points_.size() < kMostPoints) return;
    for (std::size_t i = 0; i < points_.size() / 2; ++i) {
      points_[i] = points_[2 * i];
      points_[i].merge(points_[2 * i + 1]);
    }
    points_.resize(points_.size() / 2);
    records_per_point_ *= 2;
  }
  const std::vector<Point>& points() const { return points_; }
  std::int64_t records_per_point() const { return records_per_point_; }

 private:
  std::vector<Point> points_;
  std::int64_t records_per_point_ = 1, waiting_ = 0;
};

// --- checkpoints ---------------------------------------------------------------------------------------------------

std::string written_at(const fs::path& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::gmtime(status.st_mtime));
}

CheckpointFact describe_checkpoint(const fs::path& directory, std::int64_t step) {
  CheckpointFact fact;
  fact.step = step;
  const fs::path manifest_path = directory / checkpoint::kManifestName;
  fact.written = written_at(manifest_path);
  try {
    const Manifest manifest = checkpoint::parse(storage::read_text(manifest_path, kLargestText));
    for (const checkpoint::ShardEntry& shard : manifest.shards) fact.bytes += shard.bytes;
    fact.grid = checkpoint::to_text(manifest.grid);
  } catch (const checkpoint::NewerFormat&) {
    fact.problem = "its format is newer than this program";
  } catch (const Error& failure) {
    fact.problem = failure.what();
  }
  return fact;
}

std::size_t index_of(const Manifest& manifest, const std::string& name) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].name == name) return i;
  return manifest.tensors.size();
}

/// Calls function(first_row, rows, bytes) for all rows of a tensor, in pieces of a few MiB.
template <class Function>
void for_each_piece(const checkpoint::Found& found, std::size_t tensor, Function&& function) {
  const checkpoint::TensorEntry& entry = found.manifest.tensors[tensor];
  std::vector<std::byte> rows;
  for (const checkpoint::ShardEntry& shard : found.manifest.shards) {
    const parallel::Range stored = shard.owned[tensor];
    if (stored.size() <= 0) continue;
    const storage::Handle file = storage::open_file(found.path / shard.file);
    std::vector<std::int64_t> shape = entry.shape;
    shape[0] = stored.size();
    const storage::Handle dataset = storage::open_dataset(file, entry.name, entry.type, shape);
    const std::int64_t row_bytes = checkpoint::bytes_of(entry) / entry.shape[0];
    const std::int64_t piece = std::min(stored.size(), storage::piece_rows(entry.type, shape));
    rows.resize(static_cast<std::size_t>(piece * row_bytes));
    for (std::int64_t begin = 0; begin < stored.size(); begin += piece) {
      const std::int64_t count = std::min(piece, stored.size() - begin);
      storage::read_rows(dataset, begin, count, rows.data());
      function(stored.begin + begin, count, static_cast<const std::byte*>(rows.data()));
    }
  }
}

/// By feature of layer s: does it count? All do when the checkpoint has no clocks.
std::vector<char> alive_features(const checkpoint::Found& found, std::size_t layer, std::int64_t features,
                                 std::int64_t dead_window) {
  std::vector<char> alive(static_cast<std::size_t>(features), 1);
  const std::size_t clocks = index_of(found.manifest, fmt::format("encoder_{}/tokens_since_fired", layer));
  if (clocks == found.manifest.tensors.size()) return alive;
  const checkpoint::TensorEntry& entry = found.manifest.tensors[clocks];
  if (entry.type != Scalar::i64 || entry.shape != std::vector<std::int64_t>{features}) return alive;
  const std::int64_t window = dead_window > 0 ? std::min(dead_window, found.manifest.tokens) : found.manifest.tokens;
  for_each_piece(found, clocks, [&](std::int64_t first, std::int64_t count, const std::byte* bytes) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t silent;
      std::memcpy(&silent, bytes + 8 * i, 8);
      alive[static_cast<std::size_t>(first + i)] = silent < window;
    }
  });
  return alive;
}

double squared_norm(Scalar type, const std::byte* bytes, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    float value;
    if (type == Scalar::fp32) {
      std::memcpy(&value, bytes + 4 * i, 4);
    } else {
      kernels::bf16 half;
      std::memcpy(&half.bits, bytes + 2 * i, 2);
      value = half;
    }
    sum += static_cast<double>(value) * static_cast<double>(value);
  }
  return sum;
}

/// Steps of the checkpoints, ascending; none where the directory cannot be listed.
std::vector<std::int64_t> steps_in(const fs::path& directory) {
  try {
    return checkpoint::steps_in(directory);
  } catch (const fs::filesystem_error&) {
    return {};
  }
}

/// The newest checkpoint that is whole. Collective; the same answer everywhere.
std::optional<checkpoint::Found> newest_valid(const fs::path& directory, const parallel::World& world,
                                              std::string& problem) {
  const std::string listed = world.on_root([&] {
    std::string text;
    for (const std::int64_t step : steps_in(directory)) text += std::to_string(step) + " ";
    return text;
  });
  std::vector<std::int64_t> steps;
  for (std::size_t begin = 0, end; (end = listed.find(' ', begin)) != std::string::npos; begin = end + 1)
    steps.push_back(std::stoll(listed.substr(begin, end - begin)));
  problem = "the run has no checkpoint yet";
  for (std::size_t i = steps.size(); i-- > 0;) {
    try {
      return checkpoint::open(world.all(), directory / checkpoint::directory_name(steps[i]), checkpoint::Verify::full);
    } catch (const Error& failure) {
      if (failure.code() != ExitCode::io) throw;
      if (i + 1 == steps.size()) problem = failure.what();  // the newest one's reason is the one that matters
    }
  }
  return std::nullopt;
}

/// Reads a file beside run.json that need not be there.
Json optional_json(const fs::path& path, const char* has, std::vector<std::string>& notes) {
  if (!fs::exists(path)) return nullptr;
  try {
    Json json = read_json(path);
    if (json.is_object() && json.contains(has)) return json;
    notes.push_back(
        fmt::format("{} is not what its name says (no \"{}\" in it); it was left out", path.filename().string(), has));
  } catch (const Error& failure) {
    notes.push_back(fmt::format("{}; it was left out", failure.what()));
  }
  return nullptr;
}

RunFacts read_files(const fs::path& path) {
  if (!fs::is_directory(path))
    throw error(ExitCode::usage, "{}: {}; name the directory of a run (run.output)", path.string(),
                fs::exists(path) ? "not a directory" : "no such directory");
  if (!fs::exists(path / "run.json"))
    throw error(ExitCode::usage,
                "{}: not a run directory (run.json is missing; weft train writes it); name the directory of a run",
                path.string());
  RunFacts facts;
  facts.path = path;
  facts.record = read_json(path / "run.json");
  if (!facts.record.is_object() || !facts.record.contains("exit"))
    throw error(ExitCode::data, "{}: not the record of a run (no JSON object with \"exit\"); is it damaged?",
                (path / "run.json").string());
  facts.benchmark = optional_json(path / "benchmark.json", "cases", facts.notes);
  facts.evaluation = optional_json(path / "evaluation.json", "validation", facts.notes);
  if (fs::exists(path / "input.toml")) try {
      facts.input = storage::read_text(path / "input.toml", kLargestInput);
    } catch (const Error& failure) {
      facts.notes.push_back(failure.what());
    }
  facts.course = read_course(path / "metrics.jsonl");
  if (facts.course.unreadable > 0)
    facts.notes.push_back(fmt::format("metrics.jsonl: {} of {} lines are no records; they were left out",
                                      facts.course.unreadable, facts.course.records));
  facts.starts = read_starts(path / "starts.jsonl");
  const std::vector<std::int64_t> steps = steps_in(path / "checkpoints");
  facts.checkpoints_kept = static_cast<std::int64_t>(steps.size());
  for (std::size_t i = steps.size() - std::min(steps.size(), kMostCheckpoints); i < steps.size(); ++i)
    facts.checkpoints.push_back(
        describe_checkpoint(path / "checkpoints" / checkpoint::directory_name(steps[i]), steps[i]));
  return facts;
}

}  // namespace

const Json& member(const Json& json, std::initializer_list<const char*> names) {
  static const Json nothing;
  const Json* at = &json;
  for (const char* name : names) {
    if (!at->is_object()) return nothing;
    const auto found = at->find(name);
    if (found == at->end()) return nothing;
    at = &*found;
  }
  return *at;
}

double number(const Json& json) {
  if (!json.is_number()) return kNothing;
  const double value = json.get<double>();
  constexpr double kLargest = 1e100;  // beyond it, sums and axes would overflow
  return std::abs(value) < kLargest ? value : kNothing;
}

Course read_course(const fs::path& metrics) {
  Course course;
  Thinned thinned;
  for_each_line(metrics, [&](std::string_view text) {
    ++course.records;
    const Json line = Json::parse(text, nullptr, false);
    const Point point = point_of(line);
    if (point.count[kStep] == 0) {
      ++course.unreadable;
      return;
    }
    if (point.count[kLoss] == 0) ++course.not_finite;
    thinned.add(point);
  });
  course.records_per_point = thinned.records_per_point();
  for (const Point& point : thinned.points()) {
    course.step.push_back(point.most(kStep));
    course.loss.push_back(point.mean(kLoss));
    course.learning_rate.push_back(point.mean(kRate));
    course.gradient_norm.push_back(point.mean(kNorm));
    course.tokens_per_second.push_back(point.mean(kSpeed));
    course.dead_percent.push_back(point.mean(kDead));
    course.nmse.push_back(point.mean(kNmse));
    course.nmse_low.push_back(point.least(kNmseLayers));
    course.nmse_high.push_back(point.most(kNmseLayers));
    course.l0.push_back(point.mean(kL0));
    course.l0_low.push_back(point.least(kL0Layers));
    course.l0_high.push_back(point.most(kL0Layers));
  }
  return course;
}

std::vector<StartFact> read_starts(const fs::path& path) {
  std::vector<StartFact> starts;
  for_each_line(path, [&](std::string_view text) {
    const Json line = Json::parse(text, nullptr, false);
    const double begin = number(member(line, {"start"})), end = number(member(line, {"end"}));
    if (begin >= 0) {
      if (starts.size() == kMostStarts) starts.erase(starts.begin());
      starts.push_back({static_cast<std::int64_t>(std::min(begin, 1e15)), -1});
    } else if (end >= 0 && !starts.empty()) {
      starts.back().end = static_cast<std::int64_t>(std::min(end, 1e15));
    }
  });
  return starts;
}

DecoderMass decoder_mass(const checkpoint::Found& found, std::int64_t dead_window) {
  const Manifest& manifest = found.manifest;
  std::vector<std::size_t> decoders;
  while (decoders.size() <= kMostLayers) {
    const std::size_t tensor = index_of(manifest, fmt::format("decoder_{}/weight", decoders.size()));
    if (tensor == manifest.tensors.size()) break;
    decoders.push_back(tensor);
  }
  const std::size_t n_layers = decoders.size();
  if (n_layers == 0 || n_layers > kMostLayers)
    throw error(ExitCode::data, "{}: it has {} decoders (1 to {} can be drawn)", found.path.string(),
                n_layers == 0 ? "no" : "more than 256", kMostLayers);
  const auto shape_of = [&](std::size_t s) -> const std::vector<std::int64_t>& {
    return manifest.tensors[decoders[s]].shape;
  };
  for (std::size_t s = 0; s < n_layers; ++s) {
    const Scalar type = manifest.tensors[decoders[s]].type;
    if (shape_of(s).size() != 2 || shape_of(n_layers - 1).size() != 2 || shape_of(s)[0] != shape_of(0)[0] ||
        shape_of(s)[1] != shape_of(n_layers - 1)[1] * static_cast<std::int64_t>(n_layers - s) ||
        (type != Scalar::fp32 && type != Scalar::bf16))
      throw error(ExitCode::data, "{}: decoder_{}/weight is no strip of blocks from layer {} to the last",
                  found.path.string(), s, s);
  }
  const std::int64_t width = shape_of(n_layers - 1)[1];

  DecoderMass mass;
  mass.step = manifest.step;
  for (std::size_t s = 0; s < n_layers; ++s) {
    const checkpoint::TensorEntry& entry = manifest.tensors[decoders[s]];
    const std::vector<char> alive = alive_features(found, s, entry.shape[0], dead_window);
    const auto blocks = static_cast<std::int64_t>(n_layers - s);
    const std::int64_t block_bytes = width * kernels::bytes_of(entry.type);
    std::vector<double> sums(n_layers, 0.0);
    for_each_piece(found, decoders[s], [&](std::int64_t first, std::int64_t count, const std::byte* bytes) {
      for (std::int64_t row = 0; row < count; ++row) {
        if (!alive[static_cast<std::size_t>(first + row)]) continue;
        for (std::int64_t block = 0; block < blocks; ++block)
          sums[s + static_cast<std::size_t>(block)] +=
              squared_norm(entry.type, bytes + (row * blocks + block) * block_bytes, width);
      }
    });
    const std::int64_t counted = std::count(alive.begin(), alive.end(), 1);
    double total = 0;
    for (const double sum : sums) total += sum;
    std::vector<double> magnitude(n_layers, kNothing), share(n_layers, kNothing);
    for (std::size_t t = s; t < n_layers; ++t) {
      if (counted > 0) magnitude[t] = std::sqrt(sums[t] / static_cast<double>(counted));
      if (total > 0) share[t] = sums[t] / total;
    }
    mass.magnitude.push_back(std::move(magnitude));
    mass.share.push_back(std::move(share));
    mass.features.push_back(counted);
    mass.all_features.push_back(entry.shape[0]);
  }
  return mass;
}

RunFacts gather_facts(const fs::path& path, const parallel::World& world) {
  RunFacts facts;
  world.on_root([&]() -> std::string {
    facts = read_files(path);
    return {};
  });
  std::string problem;
  const auto found = newest_valid(path / "checkpoints", world, problem);
  if (!world.is_root()) return facts;
  facts.mass.problem = problem;
  if (!found) return facts;
  try {
    const double window = number(member(facts.record, {"input", "transcoder", "dead_window"}));
    facts.mass = decoder_mass(*found, window > 0 ? static_cast<std::int64_t>(std::min(window, 1e15)) : 0);
  } catch (const Error& failure) {
    facts.mass.problem = failure.what();
  }
  return facts;
}

}  // namespace weft::commands
