// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <span>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/sidecar.hpp"
#include "kernels/bf16.hpp"
#include "parallel/grid.hpp"
#include "storage/activation_file.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using json = SortedJson;

// Rows that are read and summed at a time, and the largest number of partial sums merged at the end. Both define the
// summation tree, so they must not depend on ranks or threads.
constexpr std::int64_t kBlockRows = 1024;
constexpr std::int64_t kSegments = 64;

/// Running sums over n rows: mean and M2 of every column of inputs then targets, and mean norm of every layer of both.
struct Sums {
  std::int64_t n = 0;
  std::vector<double> mean, squares, norm;

  Sums(std::int64_t columns, std::int64_t layers)
      : mean(static_cast<std::size_t>(columns)),
        squares(static_cast<std::size_t>(columns)),
        norm(static_cast<std::size_t>(layers)) {}
};

/// Chan's merge of columns [begin, end) and norm entry `layer`; does not change a.n.
void merge(Sums& a, const Sums& b, std::size_t begin, std::size_t end, std::size_t layer) {
  const double n_a = static_cast<double>(a.n), n_b = static_cast<double>(b.n), n = n_a + n_b;
  for (std::size_t j = begin; j < end; ++j) {
    const double delta = b.mean[j] - a.mean[j];
    a.mean[j] += delta * n_b / n;
    a.squares[j] += b.squares[j] + delta * delta * n_a * n_b / n;
  }
  a.norm[layer] += (b.norm[layer] - a.norm[layer]) * n_b / n;
}

/// The pass over the rows of one rank.
class Pass {
 public:
  Pass(const Description& description, int n_threads)
      : description_(description),
        layers_(description.n_layers),
        d_(description.d_model),
        reader_(description, n_threads),
        block_(2 * layers_ * d_, 2 * layers_),
        rows_(static_cast<std::size_t>(2 * std::min(kBlockRows, description.n_rows) * description.row_bytes())) {}

  /// Adds rows [begin, end) of a file, at most kBlockRows. Throws Error(data) if a value is not finite.
  void add(std::int64_t file, std::int64_t begin, std::int64_t end, Sums& sums) {
    const std::int64_t n = end - begin;
    std::byte* sides[] = {rows_.data(), rows_.data() + n * description_.row_bytes()};
    reader_.read(std::vector<RowRead>{{file, begin, n, sides[0], sides[1]}});
    std::vector<std::int64_t> bad(static_cast<std::size_t>(2 * layers_), -1);
    block_.n = n;
    reader_.workers().run(2 * layers_, [&](std::int64_t i) {
      bad[static_cast<std::size_t>(i)] =
          sum(sides[i / layers_] + i % layers_ * d_ * kernels::bytes_of(description_.dtype), i);
      if (bad[static_cast<std::size_t>(i)] < 0)
        merge(sums, block_, static_cast<std::size_t>(i * d_), static_cast<std::size_t>((i + 1) * d_),
              static_cast<std::size_t>(i));
    });
    sums.n += n;
    std::int64_t first = -1;  // by row, then inputs before targets, then layer
    for (std::int64_t i = 0; i < 2 * layers_; ++i)
      if (const std::int64_t at = bad[static_cast<std::size_t>(i)];
          at >= 0 && (first < 0 || at / d_ < bad[static_cast<std::size_t>(first)] / d_))
        first = i;
    if (first < 0) return;
    const std::int64_t at = bad[static_cast<std::size_t>(first)];
    throw error(ExitCode::data, "{}; remove the row or regenerate the activations",
                non_finite_text(description_, file, begin, first >= layers_,
                                (at / d_ * layers_ + first % layers_) * d_ + at % d_));
  }

 private:
  std::int64_t sum(const std::byte* rows, std::int64_t i) {
    switch (description_.dtype) {
      case Scalar::fp16:
        return sum_as<kernels::half>(rows, i);
      case Scalar::bf16:
        return sum_as<kernels::bf16>(rows, i);
      default:
        return sum_as<float>(rows, i);
    }
  }

  /// Mean, M2 and mean norm of one layer of inputs or targets of the block, in two passes. Returns row * d + column of
  /// the first value that is not finite, or -1.
  template <class T>
  std::int64_t sum_as(const std::byte* rows, std::int64_t i) {
    const auto row_of = [&](std::int64_t row) {
      return reinterpret_cast<const T*>(rows + row * description_.row_bytes());
    };
    double* mean = block_.mean.data() + i * d_;
    double* squares = block_.squares.data() + i * d_;
    std::fill(mean, mean + d_, 0.0);
    std::fill(squares, squares + d_, 0.0);
    double norms = 0;
    for (std::int64_t row = 0; row < block_.n; ++row) {
      const T* values = row_of(row);
      double square = 0;
      for (std::int64_t j = 0; j < d_; ++j) {
        const double value = static_cast<float>(values[j]);
        mean[j] += value;
        square += value * value;
      }
      // Sums of squared fp32 values cannot overflow fp64: the sum is finite if all values are.
      if (!std::isfinite(square))
        return row * d_ + first_non_finite(description_.dtype, reinterpret_cast<const std::byte*>(values), d_);
      norms += std::sqrt(square);
    }
    const double n = static_cast<double>(block_.n);
    for (std::int64_t j = 0; j < d_; ++j) mean[j] /= n;
    for (std::int64_t row = 0; row < block_.n; ++row) {
      const T* values = row_of(row);
      for (std::int64_t j = 0; j < d_; ++j) {
        const double e = static_cast<float>(values[j]) - mean[j];
        squares[j] += e * e;
      }
    }
    block_.norm[static_cast<std::size_t>(i)] = norms / n;
    return -1;
  }

  const Description& description_;
  const std::int64_t layers_, d_;
  Reader reader_;
  Sums block_;
  std::vector<std::byte> rows_;
};

Statistics finished(const Sums& sums, const Description& description) {
  Statistics statistics;
  statistics.n_rows = sums.n;
  const std::size_t columns = static_cast<std::size_t>(description.n_layers * description.d_model);
  const std::size_t layers = static_cast<std::size_t>(description.n_layers);
  for (const bool target : {false, true}) {
    SideStatistics& side = target ? statistics.targets : statistics.inputs;
    const std::size_t begin = target ? columns : 0, norms = target ? layers : 0;
    side.mean.assign(sums.mean.begin() + static_cast<std::ptrdiff_t>(begin),
                     sums.mean.begin() + static_cast<std::ptrdiff_t>(begin + columns));
    for (std::size_t j = begin; j < begin + columns; ++j)
      side.standard_deviation.push_back(sums.n > 1 ? std::sqrt(sums.squares[j] / static_cast<double>(sums.n - 1))
                                                   : 0.0);
    side.mean_norm.assign(sums.norm.begin() + static_cast<std::ptrdiff_t>(norms),
                          sums.norm.begin() + static_cast<std::ptrdiff_t>(norms + layers));
  }
  return statistics;
}

/// Bytes of the largest text that statistics can have. A number has at most 25 characters; twice that allows for
/// indentation.
std::int64_t largest_text(const Description& description) {
  return 64 * 4 * description.n_layers * (description.d_model + 1) + 4096;
}

/// Digest of sizes and times of modification: decides whether the cache is used, never whether a run may resume.
std::string state_of_files(const Description& description) {
  std::string text;
  for (const FileDescription& file : description.files) text += fmt::format("{} {}\n", file.bytes, file.modified);
  return text.empty() ? "" : storage::sha256(text);
}

json side_to_json(const SideStatistics& side) {
  return {{"mean", side.mean}, {"standard_deviation", side.standard_deviation}, {"mean_norm", side.mean_norm}};
}

SideStatistics side_from_json(const json& j, const Description& description) {
  SideStatistics side;
  side.mean = j.at("mean").get<std::vector<double>>();
  side.standard_deviation = j.at("standard_deviation").get<std::vector<double>>();
  side.mean_norm = j.at("mean_norm").get<std::vector<double>>();
  const std::size_t columns = static_cast<std::size_t>(description.n_layers * description.d_model);
  if (side.mean.size() != columns || side.standard_deviation.size() != columns ||
      side.mean_norm.size() != static_cast<std::size_t>(description.n_layers))
    throw error(ExitCode::data, "the cached statistics have a different shape");
  return side;
}

/// Rows that statistics of the first `n_rows` are computed from.
std::int64_t rows_counted(const Description& description, std::int64_t n_rows) {
  return n_rows == 0 ? description.n_rows : std::min(n_rows, description.n_rows);
}

void check_normalised(const SideStatistics& own, const json& said, const std::string& path, const std::string& dataset,
                      std::int64_t layer, std::int64_t d) {
  for (const bool deviation : {false, true}) {
    const char* name = deviation ? "std" : "mean";
    const auto found = said.find(name);
    if (found == said.end() || !found->is_array() || static_cast<std::int64_t>(found->size()) != d)
      throw error(ExitCode::data, "{}: {} of {} is not a list of {} numbers; is the file damaged?", path, name, dataset,
                  d);
    for (std::int64_t j = 0; j < d; ++j) {
      const json& value = (*found)[static_cast<std::size_t>(j)];
      if (!value.is_number())
        throw error(ExitCode::data, "{}: {}[{}] of {} is not a number; is the file damaged?", path, name, j, dataset);
      const std::size_t at = static_cast<std::size_t>(layer * d + j);
      const double computed = deviation ? own.standard_deviation[at] : own.mean[at];
      // Writers compute statistics before rounding to the stored type. If all values of a column round in the same
      // direction, its mean changes by at most a factor of 2^-9 in bf16. Other rounding differences are far below one
      // percent of the standard deviation.
      const double tolerance = 0.01 * own.standard_deviation[at] + std::abs(computed) / 256 + 1e-6;
      if (!(std::abs(value.get<double>() - computed) <= tolerance))
        throw error(ExitCode::data,
                    "{}: {}[{}] of {} is {}, the files have {} (statistics of other data?); replace the file or remove "
                    "it: it is "
                    "optional",
                    path, name, j, dataset, json_text(value), computed);
    }
  }
}

}  // namespace

Statistics compute_statistics(const parallel::World& world, const Description& description, int n_threads,
                              std::int64_t n_rows) {
  parallel::note_phase("statistics of the data");
  struct Piece {
    std::int64_t file, begin, end;
  };
  std::vector<Piece> pieces;
  std::int64_t left = rows_counted(description, n_rows);
  for (std::size_t file = 0; file < description.files.size() && left > 0; ++file) {
    const std::int64_t rows = std::min(left, description.files[file].rows);
    for (std::int64_t begin = 0; begin < rows; begin += kBlockRows)
      pieces.push_back({static_cast<std::int64_t>(file), begin, std::min(begin + kBlockRows, rows)});
    left -= rows;
  }
  const std::int64_t n_pieces = static_cast<std::int64_t>(pieces.size());
  const std::int64_t n_segments = std::min(kSegments, n_pieces);
  const std::int64_t columns = 2 * description.n_layers * description.d_model, layers = 2 * description.n_layers;
  const std::int64_t record = 2 * columns + layers + 1;  // doubles of one segment

  // Each rank sums complete segments.
  const parallel::Range mine = parallel::part(n_segments, world.size(), world.rank());
  std::vector<double> records(static_cast<std::size_t>(mine.size() * record));
  std::int64_t piece = 0;
  const auto own_failure = parallel::attempt([&] {
    Pass pass(description, n_threads);
    for (std::int64_t segment = mine.begin; segment < mine.end; ++segment) {
      Sums sums(columns, layers);
      const parallel::Range range = parallel::part(n_pieces, n_segments, segment);
      for (piece = range.begin; piece < range.end; ++piece) {
        const Piece& p = pieces[static_cast<std::size_t>(piece)];
        pass.add(p.file, p.begin, p.end, sums);
        note_progress();
      }
      double* out = records.data() + (segment - mine.begin) * record;
      *out++ = static_cast<double>(sums.n);
      out = std::copy(sums.mean.begin(), sums.mean.end(), out);
      out = std::copy(sums.squares.begin(), sums.squares.end(), out);
      std::copy(sums.norm.begin(), sums.norm.end(), out);
    }
  });
  const auto failure_of_others = parallel::attempt([&] { conclude_reads(description); });
  // The first in stored order: the message does not depend on the number of ranks.
  if (const auto failure = parallel::first_failure(world.all(), own_failure ? own_failure : failure_of_others, piece))
    failure->raise();

  // All ranks merge all segments in stored order.
  std::vector<std::int64_t> bytes;
  for (int r = 0; r < world.size(); ++r)
    bytes.push_back(parallel::part(n_segments, world.size(), r).size() * record *
                    static_cast<std::int64_t>(sizeof(double)));
  std::vector<double> all(static_cast<std::size_t>(n_segments * record));
  world.all().all_gather_uneven(records.data(), all.data(), bytes);
  Sums total(columns, layers), part(columns, layers);
  const std::size_t d = static_cast<std::size_t>(description.d_model);
  for (std::int64_t segment = 0; segment < n_segments; ++segment) {
    const double* in = all.data() + segment * record;
    part.n = static_cast<std::int64_t>(*in++);
    std::copy(in, in + columns, part.mean.begin());
    std::copy(in + columns, in + 2 * columns, part.squares.begin());
    std::copy(in + 2 * columns, in + 2 * columns + layers, part.norm.begin());
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(layers); ++layer)
      merge(total, part, layer * d, (layer + 1) * d, layer);
    total.n += part.n;
  }
  return finished(total, description);
}

Statistics statistics(const parallel::World& world, const Description& description, const std::string& cache_path,
                      int n_threads, std::int64_t n_rows) {
  const std::int64_t counted = rows_counted(description, n_rows);
  std::string text = world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(cache_path)) return "";
    try {
      std::string cached = read_small_file(cache_path, largest_text(description));
      if (const std::int64_t rows = statistics_from_text(cached, description).n_rows; rows != counted)
        throw error(ExitCode::data, "they are of {} rows, not of {}", rows, counted);
      return cached;
    } catch (const Error& failure) {
      log::warning("{}: ignored ({}); recomputing the statistics", cache_path, failure.what());
      return "";
    }
  });
  Statistics result;
  if (text.empty()) {
    result = compute_statistics(world, description, n_threads, n_rows);
    world.on_root([&] {
      storage::require_ownership();
      storage::write_text_atomically(cache_path, to_text(result, description));
      return std::string();
    });
  } else {
    result = statistics_from_text(text, description);
  }
  world.on_root([&] {
    if (counted == description.n_rows) check_against_file(result, description);
    return std::string();
  });
  if (description.targets_are_inputs) result.targets = result.inputs;
  return result;
}

void check_against_file(const Statistics& statistics, const Description& description) {
  if (!description.has_statistics) return;
  const std::string path = description.path + "/norm_stats.json";
  check_against_text(statistics, description, path, read_small_file(path, largest_text(description)));
}

void check_against_text(const Statistics& statistics, const Description& description, const std::string& path,
                        std::string_view text) {
  const json said = parse_json<json>(text);
  if (said.is_discarded() || !said.is_object())
    throw error(ExitCode::data, "{}: is not a JSON object of at most {} levels; is it truncated?", path, kDeepestJson);
  for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
    for (const bool target : {false, true}) {
      const std::string dataset = storage::dataset_name(target ? storage::Side::targets : storage::Side::inputs, layer);
      const auto of_layer = said.find(std::to_string(layer));
      const char* name = target ? "targets" : "inputs";
      if (of_layer == said.end() || !of_layer->is_object() || !of_layer->contains(name) ||
          !of_layer->at(name).is_object())
        throw error(ExitCode::data, "{}: has no entry for {}; does it belong to these files?", path, dataset);
      check_normalised(target ? statistics.targets : statistics.inputs, of_layer->at(name), path, dataset, layer,
                       description.d_model);
    }
}

std::string to_text(const Statistics& statistics, const Description& description) {
  json cached = {{"n_rows", statistics.n_rows},
                 {"fingerprint", description.fingerprint},
                 {"inputs", side_to_json(statistics.inputs)},
                 {"targets", side_to_json(statistics.targets)}};
  if (const std::string files = state_of_files(description); !files.empty()) cached["files"] = files;
  const std::string content = json_text(cached);
  return storage::sha256(content) + "\n" + content + "\n";
}

Statistics statistics_from_text(const std::string& text, const Description& description) {
  const std::size_t line = text.find('\n');
  if (line == std::string::npos || text.empty() || text.back() != '\n' ||
      storage::sha256(std::string_view(text).substr(line + 1, text.size() - line - 2)) != text.substr(0, line))
    throw error(ExitCode::data, "the cached statistics are damaged");
  try {
    const json j = parse_json<json>(std::string_view(text).substr(line + 1));
    if (j.at("fingerprint") != description.fingerprint)
      throw error(ExitCode::data, "the cached statistics belong to another dataset");
    if (j.value("files", "") != state_of_files(description))
      throw error(ExitCode::data, "the files of the dataset were written or copied since");
    Statistics statistics;
    statistics.n_rows = j.at("n_rows");
    statistics.inputs = side_from_json(j.at("inputs"), description);
    statistics.targets = side_from_json(j.at("targets"), description);
    return statistics;
  } catch (const json::exception& failure) {
    throw error(ExitCode::data, "the cached statistics are damaged ({})", failure.what());
  }
}

Normalisation normalisation(const Statistics& statistics, const Description& description, Normalise mode) {
  const auto affine = [&](const SideStatistics& side, const char* name) {
    const std::size_t columns = static_cast<std::size_t>(description.n_layers * description.d_model);
    Affine result{std::vector<float>(columns, 0.0f), std::vector<float>(columns, 1.0f)};
    for (std::size_t j = 0; j < columns; ++j) {
      if (mode == Normalise::per_dimension) {
        result.mean[j] = static_cast<float>(side.mean[j]);
        result.scale[j] = static_cast<float>(1.0 / (side.standard_deviation[j] + 1e-6));
      } else if (mode == Normalise::scalar) {
        const std::size_t layer = j / static_cast<std::size_t>(description.d_model);
        if (!(side.mean_norm[layer] > 0))
          throw collective_error(
              ExitCode::data,
              "{}: /layer_{}/{} is zero in every row (data.normalise = \"scalar\" divides by its norm); "
              "regenerate the activations",
              description.path, layer, name);
        result.scale[j] =
            static_cast<float>(std::sqrt(static_cast<double>(description.d_model)) / side.mean_norm[layer]);
      }
    }
    return result;
  };
  return {affine(statistics.inputs, "inputs"), affine(statistics.targets, "targets")};
}

std::vector<std::string> constant_dimensions(const Statistics& statistics, const Description& description) {
  std::vector<std::string> sentences;
  if (statistics.n_rows < 2) return sentences;
  const std::int64_t d = description.d_model;
  for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
    for (const bool target : {false, true}) {
      const std::vector<double>& deviation = (target ? statistics.targets : statistics.inputs).standard_deviation;
      std::int64_t n = 0, first = -1;
      for (std::int64_t column = 0; column < d; ++column) {
        if (deviation[static_cast<std::size_t>(layer * d + column)] > 0) continue;
        ++n;
        if (first < 0) first = column;
      }
      if (n == 0) continue;
      const std::string name = storage::dataset_name(target ? storage::Side::targets : storage::Side::inputs, layer);
      if (n == d)
        sentences.push_back(fmt::format("{} is the same in every row", name));
      else
        sentences.push_back(fmt::format("{} of {} dimensions of {} have the same value in every row (column {}{})", n,
                                        d, name, first, n > 1 ? ", …" : ""));
    }
  return sentences;
}

namespace {

struct NonFinite {
  std::int64_t values = 0, rows = 0;
};

/// Counts values that are not finite in the whole dataset. Collective.
NonFinite count_non_finite(const parallel::World& world, const Description& description, int n_threads) {
  NonFinite found;
  const std::int64_t row_values = description.n_layers * description.d_model,
                     value_bytes = kernels::bytes_of(description.dtype);
  parallel::on_all(world.all(), [&] {
    Reader reader(description, n_threads);
    std::vector<std::byte> rows(static_cast<std::size_t>(2 * kBlockRows * description.row_bytes()));
    std::int64_t block = 0;
    for (std::size_t file = 0; file < description.files.size(); ++file)
      for (std::int64_t begin = 0; begin < description.files[file].rows; begin += kBlockRows) {
        if (block++ % world.size() != world.rank()) continue;
        const std::int64_t n = std::min(kBlockRows, description.files[file].rows - begin);
        std::byte* const sides[] = {rows.data(), rows.data() + n * description.row_bytes()};
        reader.read(std::vector<RowRead>{{static_cast<std::int64_t>(file), begin, n, sides[0], sides[1]}});
        for (std::int64_t row = 0; row < n; ++row) {
          const std::int64_t before = found.values;
          for (const std::byte* side : sides)
            for (std::int64_t i = 0; i < row_values;) {
              const std::byte* values = side + row * description.row_bytes();
              const std::int64_t at = first_non_finite(description.dtype, values + i * value_bytes, row_values - i);
              if (at < 0) break;
              ++found.values;
              i += at + 1;
            }
          found.rows += found.values > before;
        }
      }
  });
  std::int64_t counts[] = {found.values, found.rows};
  world.all().sum(std::span<std::int64_t>(counts));
  return {counts[0], counts[1]};
}

}  // namespace

Statistics check(const parallel::World& world, const Description& description, int n_threads) {
  Statistics result;
  try {
    result = compute_statistics(world, description, n_threads);
  } catch (const Error& failure) {
    if (failure.code() != ExitCode::data) throw;
    const NonFinite found = count_non_finite(world, description, n_threads);
    if (found.values == 0) throw;
    throw collective_error(ExitCode::data, "{} (not finite in the whole dataset: {} value{} in {} row{})",
                           failure.what(), found.values, found.values == 1 ? "" : "s", found.rows,
                           found.rows == 1 ? "" : "s");
  }
  world.on_root([&] {
    check_against_file(result, description);
    return std::string();
  });
  return result;
}

}  // namespace weft::dataset
