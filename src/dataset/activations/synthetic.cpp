// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/synthetic.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/progress.hpp"
#include "base/trace.hpp"
#include "dataset/activations/reader.hpp"
#include "dataset/activations/workers.hpp"
#include "kernels/constants.hpp"
#include "kernels/random.hpp"
#include "storage/hdf5.hpp"
#include "storage/pending_output.hpp"
#include "storage/tensor_file.hpp"

namespace weft::dataset {
namespace {

using kernels::Purpose;
using kernels::Random4;

constexpr std::int64_t kFiredEnough = 1000;
constexpr double kRecoveredCosine = 0.9;
// (source layer, target layer, feature, dimension) is one 64-bit counter with these factors, part of the data format.
constexpr std::int64_t kLayerFactor = 1 << 10, kMostWidth = 1 << 20, kMostFeatures = 1 << 22;
static_assert(kernels::kMostLayers <= kLayerFactor);

/// The use of a random number. Selects the step of the counter, so that streams do not overlap.
enum class Stream : std::uint64_t { encoder, decoder, mean, choice, amplitude, noise, document };

Random4 draw(std::int64_t seed, Stream stream, std::uint64_t index) {
  return kernels::philox(static_cast<std::uint64_t>(seed), Purpose::synthetic, static_cast<std::uint64_t>(stream),
                         index);
}

/// Two standard normals of one draw (Box-Muller).
std::pair<float, float> two_normals(const Random4& random) {
  const double radius = std::sqrt(-2.0 * std::log(kernels::uniform_double(random.word[0], random.word[1])));
  const double angle = 6.283185307179586476925 * kernels::uniform_double(random.word[2], random.word[3]);
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

/// Two nearly normal numbers of one draw, fast and bitwise reproducible on every machine: sums of four uniform 16-bit
/// numbers (variance 1/12 each), scaled to variance 1.
std::pair<float, float> two_nearly_normals(const Random4& random) {
  const auto sum = [](std::uint32_t a, std::uint32_t b) {
    const std::uint32_t total = (a & 0xffffu) + (a >> 16) + (b & 0xffffu) + (b >> 16);
    return (static_cast<float>(total) * 0x1p-16f - 2.0f + 0x1p-15f) * 1.7320508f;
  };
  return {sum(random.word[0], random.word[1]), sum(random.word[2], random.word[3])};
}

/// Overwrites row [d] with a random unit vector.
void unit_vector(std::int64_t seed, Stream stream, std::uint64_t row_index, std::int64_t d, float* row) {
  double square = 0;
  for (std::int64_t j = 0; j < d; ++j) {
    const double value = kernels::normal(draw(seed, stream, row_index * kMostWidth + static_cast<std::uint64_t>(j)));
    row[j] = static_cast<float>(value);
    square += value * value;
  }
  for (std::int64_t j = 0; j < d; ++j) row[j] = static_cast<float>(row[j] / std::sqrt(square));
}

/// Data common to all tokens.
struct Model {
  GroundTruth truth;
  std::vector<double> cumulative;                // cumulative weights of the features
  std::vector<float> input_mean, target_mean;    // [layers * d]
  std::vector<float> input_noise, target_noise;  // [layers] standard deviation
};

std::int64_t last_target(const SyntheticSettings& s, std::int64_t source) {
  return s.reach == 0 ? s.layers - 1 : std::min(s.layers - 1, source + s.reach - 1);
}

void check_settings(const SyntheticSettings& s) {
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw collective_error(ExitCode::usage, "out of range: {}; correct the input", what);
  };
  require(s.layers >= 1 && s.layers <= kernels::kMostLayers,
          fmt::format("synthetic.layers = {} (1 to {})", s.layers, kernels::kMostLayers));
  require(s.d_model >= 2 && s.d_model <= kMostWidth,
          fmt::format("synthetic.d_model = {} (2 to {})", s.d_model, kMostWidth));
  require(s.features >= 1 && s.features <= kMostFeatures,
          fmt::format("synthetic.features = {} (1 to {})", s.features, kMostFeatures));
  require(s.k > 0 && s.k <= static_cast<double>(s.features),
          fmt::format("synthetic.k = {} (above 0, at most synthetic.features = {})", s.k, s.features));
  require(s.tokens >= 1 && s.validation_tokens >= 0,
          fmt::format("synthetic.tokens = {} (at least 1), synthetic.validation_tokens = {} (at "
                      "least 0)",
                      s.tokens, s.validation_tokens));
  require(s.reach >= 0 && s.zipf >= 0 && s.mean_offset >= 0,
          fmt::format("synthetic.reach = {}, zipf = {}, mean_offset = {} (none is negative)", s.reach, s.zipf,
                      s.mean_offset));
}

Model make_model(const SyntheticSettings& s, Workers& workers) {
  Model model;
  model.truth.n_layers = s.layers;
  model.truth.d_model = s.d_model;
  model.truth.n_features = s.features;
  const std::size_t layers = static_cast<std::size_t>(s.layers);
  model.truth.encoder.resize(layers);
  model.truth.decoder.resize(layers);
  model.truth.fired.assign(layers, std::vector<std::int64_t>(static_cast<std::size_t>(s.features), 0));

  std::vector<double> weight(static_cast<std::size_t>(s.features));
  for (std::int64_t f = 0; f < s.features; ++f)
    weight[static_cast<std::size_t>(f)] = std::pow(static_cast<double>(f + 1), -s.zipf);
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  for (double& w : weight) w /= total;
  model.truth.frequency.assign(layers, weight);
  model.cumulative.resize(weight.size());
  std::partial_sum(weight.begin(), weight.end(), model.cumulative.begin());

  workers.run(s.layers, [&](std::int64_t layer) {
    const std::size_t l = static_cast<std::size_t>(layer);
    const std::int64_t targets = s.layers - layer;
    model.truth.encoder[l].resize(static_cast<std::size_t>(s.features * s.d_model));
    model.truth.decoder[l].assign(static_cast<std::size_t>(s.features * targets * s.d_model), 0.0f);
    for (std::int64_t f = 0; f < s.features; ++f) {
      const std::uint64_t feature = static_cast<std::uint64_t>(layer * kMostFeatures + f);
      unit_vector(s.seed, Stream::encoder, feature, s.d_model, model.truth.encoder[l].data() + f * s.d_model);
      for (std::int64_t t = layer; t <= last_target(s, layer); ++t)
        unit_vector(s.seed, Stream::decoder, static_cast<std::uint64_t>(t * kLayerFactor * kMostFeatures) + feature,
                    s.d_model, model.truth.decoder[l].data() + (f * targets + t - layer) * s.d_model);
    }
  });

  // c = 1 + |z| / 4: E c^2 = 1 + sqrt(2 / pi) / 2 + 1 / 16. Powers add because directions are independent.
  const double power =
      s.k * (1.0 + 0.5 * std::sqrt(2.0 / 3.14159265358979323846) + 1.0 / 16.0) / static_cast<double>(s.d_model);
  const double noise = std::pow(10.0, -s.noise_db / 20.0);
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    std::int64_t sources = 0;
    for (std::int64_t source = 0; source <= layer; ++source) sources += layer <= last_target(s, source);
    const double input = std::sqrt(power), target = std::sqrt(power * static_cast<double>(sources));
    model.input_noise.push_back(static_cast<float>(input * noise));
    model.target_noise.push_back(static_cast<float>(target * noise));
    for (std::int64_t j = 0; j < s.d_model; ++j) {
      const auto [x, y] = two_normals(draw(s.seed, Stream::mean, static_cast<std::uint64_t>(layer * kMostWidth + j)));
      model.input_mean.push_back(static_cast<float>(x * input * s.mean_offset));
      model.target_mean.push_back(static_cast<float>(y * target * s.mean_offset));
    }
  }
  return model;
}

/// The active features of one token and layer and their amplitudes, sorted by feature.
void draw_code(const SyntheticSettings& s, const Model& model, std::int64_t token, std::int64_t layer,
               std::vector<std::pair<std::int64_t, float>>& code) {
  code.clear();
  // One counter range per (token, layer).
  const std::uint64_t base = static_cast<std::uint64_t>(token * s.layers + layer) << 20;
  const double whole = std::floor(s.k);
  const Random4 extra = draw(s.seed, Stream::amplitude, base + (1u << 19));
  const std::int64_t k =
      static_cast<std::int64_t>(whole) + (kernels::uniform_double(extra.word[0], extra.word[1]) < s.k - whole ? 1 : 0);
  const std::int64_t attempts = std::min<std::int64_t>(64 * (k + 1), std::int64_t{1} << 18);
  for (std::int64_t i = 0; i < attempts && static_cast<std::int64_t>(code.size()) < k; ++i) {
    const Random4 random = draw(s.seed, Stream::choice, base + static_cast<std::uint64_t>(i));
    for (int half = 0; half < 2 && static_cast<std::int64_t>(code.size()) < k; ++half) {
      const double u =
          kernels::uniform_double(random.word[2 * half], random.word[2 * half + 1]) * model.cumulative.back();
      const std::int64_t f =
          std::lower_bound(model.cumulative.begin(), model.cumulative.end(), u) - model.cumulative.begin();
      const std::int64_t feature = std::min(f, s.features - 1);
      if (std::none_of(code.begin(), code.end(), [&](const auto& entry) { return entry.first == feature; }))
        code.emplace_back(feature, 0.0f);
    }
  }
  // Random draws rarely complete a code in which nearly all features are active: add the rest in order.
  for (std::int64_t f = 0; static_cast<std::int64_t>(code.size()) < k; ++f)
    if (std::none_of(code.begin(), code.end(), [&](const auto& entry) { return entry.first == f; }))
      code.emplace_back(f, 0.0f);
  std::sort(code.begin(), code.end());
  for (std::size_t i = 0; i < code.size(); ++i)
    code[i].second = 1.0f + 0.25f * std::abs(two_normals(draw(s.seed, Stream::amplitude, base + i)).first);
}

void add_scaled(float* out, const float* row, float factor, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) out[j] += factor * row[j];
}

/// One token: inputs and targets [layers * d]. Returns its id.
std::int32_t make_token(const SyntheticSettings& s, const Model& model, std::int64_t token, float* inputs,
                        float* targets, std::vector<std::pair<std::int64_t, float>>& code,
                        const std::function<void(std::int64_t, std::int64_t)>& fired) {
  const std::int64_t columns = s.layers * s.d_model;
  std::int32_t id = 0;
  std::copy(model.input_mean.begin(), model.input_mean.end(), inputs);
  std::copy(model.target_mean.begin(), model.target_mean.end(), targets);
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    draw_code(s, model, token, layer, code);
    if (layer == 0 && !code.empty()) {
      const auto smaller = [](const auto& a, const auto& b) { return a.second < b.second; };
      id = static_cast<std::int32_t>(std::max_element(code.begin(), code.end(), smaller)->first);
    }
    const float* encoder = model.truth.encoder[static_cast<std::size_t>(layer)].data();
    const float* decoder = model.truth.decoder[static_cast<std::size_t>(layer)].data();
    const std::int64_t strip = (s.layers - layer) * s.d_model,
                       written = (last_target(s, layer) - layer + 1) * s.d_model;
    for (const auto& [f, amplitude] : code) {
      add_scaled(inputs + layer * s.d_model, encoder + f * s.d_model, amplitude, s.d_model);
      add_scaled(targets + layer * s.d_model, decoder + f * strip, amplitude, written);
      fired(layer, f);
    }
  }
  const std::uint64_t base = static_cast<std::uint64_t>(token) * static_cast<std::uint64_t>(columns);
  for (std::int64_t j = 0; j < columns; ++j) {
    const auto [x, y] = two_nearly_normals(draw(s.seed, Stream::noise, base + static_cast<std::uint64_t>(j)));
    inputs[j] += x * model.input_noise[static_cast<std::size_t>(j / s.d_model)];
    targets[j] += y * model.target_noise[static_cast<std::size_t>(j / s.d_model)];
  }
  return id;
}

WriterSettings writer_settings(const SyntheticSettings& s, const std::string& split) {
  WriterSettings settings;
  settings.path = s.output + "/" + split;
  settings.n_layers = s.layers;
  settings.d_model = s.d_model;
  settings.dtype = s.dtype;
  settings.rows_per_file = s.rows_per_file;
  settings.compression = s.compression;
  settings.model = "synthetic";
  settings.hook_inputs = "planted.inputs";
  settings.hook_targets = "planted.targets";
  settings.dataset = fmt::format("synthetic, seed {}", s.seed);
  settings.split = split;
  settings.tokens = true;
  for (std::int64_t f = 0; f < s.features; ++f) settings.vocabulary.push_back(fmt::format(" f{}", f));
  return settings;
}

/// Throws Error(usage) if a value overflowed the stored type.
void require_finite(const SyntheticSettings& s, const std::byte* raw, std::int64_t rows, const char* side) {
  const std::int64_t columns = s.layers * s.d_model;
  const std::int64_t bad = first_non_finite(s.dtype, raw, rows * columns);
  if (bad < 0) return;
  const double largest = s.dtype == kernels::Scalar::fp16 ? 65504 : 3.4e38;
  throw error(ExitCode::usage,
              "synthetic.dtype = \"{}\" cannot hold a value of /layer_{}/{} (its largest is {:.5g}); use {}a smaller "
              "synthetic.k or synthetic.mean_offset, or a larger synthetic.noise_db",
              name_of(s.dtype), bad % columns / s.d_model, side, largest,
              s.dtype == kernels::Scalar::fp16 ? "\"bf16\", " : "");
}

/// Appends tokens [begin, end) of the unbounded stream. Adds activations per feature to `fired`, if given.
void write_split(const SyntheticSettings& s, const Model& model, ActivationWriter& writer, std::int64_t begin,
                 std::int64_t end, Workers& workers, int n_threads, std::vector<std::vector<std::int64_t>>* fired) {
  const std::int64_t columns = s.layers * s.d_model, row_bytes = columns * kernels::bytes_of(s.dtype);
  constexpr std::int64_t kRows = 1024;
  std::vector<std::byte> inputs(static_cast<std::size_t>(kRows * row_bytes)), targets(inputs.size());
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kRows));
  std::vector<std::int64_t> documents;
  // Integer counts do not depend on the order of threads.
  std::vector<std::vector<std::int64_t>> counts(
      static_cast<std::size_t>(n_threads),
      std::vector<std::int64_t>(static_cast<std::size_t>(s.layers * s.features), 0));
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t rows = std::min(kRows, end - first);
    trace::next_step();
    std::optional<trace::Scope> phase(std::in_place, trace::Row::host, "generate rows");
    workers.run(n_threads, [&](std::int64_t thread) {
      std::vector<float> x(static_cast<std::size_t>(columns)), y(x.size());
      std::vector<std::pair<std::int64_t, float>> code;
      std::vector<std::int64_t>& count = counts[static_cast<std::size_t>(thread)];
      for (std::int64_t i = rows * thread / n_threads; i < rows * (thread + 1) / n_threads; ++i) {
        ids[static_cast<std::size_t>(i)] = make_token(
            s, model, first + i, x.data(), y.data(), code,
            [&](std::int64_t layer, std::int64_t f) { ++count[static_cast<std::size_t>(layer * s.features + f)]; });
        store_as(s.dtype, x.data(), columns, inputs.data() + i * row_bytes);
        store_as(s.dtype, y.data(), columns, targets.data() + i * row_bytes);
      }
    });
    require_finite(s, inputs.data(), rows, "inputs");
    require_finite(s, targets.data(), rows, "targets");
    documents.clear();
    for (std::int64_t i = 0; i < rows; ++i) {
      const Random4 random = draw(s.seed, Stream::document, static_cast<std::uint64_t>(first + i));
      if (kernels::uniform_double(random.word[0], random.word[1]) * static_cast<double>(kDocumentRows) < 1)
        documents.push_back(i);
    }
    phase.emplace(trace::Row::writer, "write rows");
    writer.append(rows, inputs.data(), targets.data(), std::span(ids).first(static_cast<std::size_t>(rows)), documents);
    note_progress();
  }
  if (fired == nullptr) return;
  for (const std::vector<std::int64_t>& count : counts)
    for (std::int64_t i = 0; i < s.layers * s.features; ++i)
      (*fired)[static_cast<std::size_t>(i / s.features)][static_cast<std::size_t>(i % s.features)] +=
          count[static_cast<std::size_t>(i)];
}

void write_ground_truth(const SyntheticSettings& s, const GroundTruth& truth) {
  storage::Handle file = storage::create_file(s.output + "/ground_truth.h5");
  storage::write_attribute(file, "format", "weft-ground-truth");
  storage::write_attribute(file, "format_version", std::int64_t{1});
  storage::write_attribute(file, "n_layers", truth.n_layers);
  storage::write_attribute(file, "d_model", truth.d_model);
  storage::write_attribute(file, "n_features", truth.n_features);
  storage::write_attribute(file, "tokens", s.tokens);
  for (std::int64_t layer = 0; layer < truth.n_layers; ++layer) {
    const std::size_t l = static_cast<std::size_t>(layer);
    const std::string group = fmt::format("layer_{}/", layer);
    storage::write_tensor(file, group + "encoder", kernels::Scalar::fp32, {truth.n_features, truth.d_model},
                          truth.encoder[l].data());
    storage::write_tensor(file, group + "decoder", kernels::Scalar::fp32,
                          {truth.n_features, (truth.n_layers - layer) * truth.d_model}, truth.decoder[l].data());
    storage::write_tensor(file, group + "frequency", kernels::Scalar::fp64, {truth.n_features},
                          truth.frequency[l].data());
    storage::write_tensor(file, group + "fired", kernels::Scalar::i64, {truth.n_features}, truth.fired[l].data());
  }
  file.close();
}

template <class T>
std::vector<T> read_tensor(hid_t file, const std::string& name, kernels::Scalar type,
                           const std::vector<std::int64_t>& shape) {
  // open_dataset checks the shape before memory is allocated for it.
  const storage::Handle dataset = storage::open_dataset(file, name, type, shape);
  storage::require_complete(dataset, name);
  std::size_t n = 1;
  for (const std::int64_t extent : shape) n *= static_cast<std::size_t>(extent);
  std::vector<T> values(n);
  storage::read_rows(dataset, 0, shape[0], values.data());
  return values;
}

/// Size of a maximum matching; `edges[p]` are the learned features that may match planted feature p (augmenting paths).
std::int64_t largest_matching(const std::vector<std::vector<std::int64_t>>& edges, std::int64_t n_learned) {
  std::vector<std::int64_t> partner(static_cast<std::size_t>(n_learned), -1);
  std::vector<std::int64_t> visited(static_cast<std::size_t>(n_learned), -1);
  std::int64_t matched = 0;
  const std::function<bool(std::int64_t, std::int64_t)> augment = [&](std::int64_t planted, std::int64_t round) {
    for (const std::int64_t learned : edges[static_cast<std::size_t>(planted)]) {
      if (std::exchange(visited[static_cast<std::size_t>(learned)], round) == round) continue;
      std::int64_t& other = partner[static_cast<std::size_t>(learned)];
      if (other < 0 || augment(other, round)) {
        other = planted;
        return true;
      }
    }
    return false;
  };
  for (std::int64_t planted = 0; planted < static_cast<std::int64_t>(edges.size()); ++planted)
    matched += augment(planted, planted);
  return matched;
}

/// Rows scaled to norm 1 (zero rows stay zero).
std::vector<float> unit_rows(const float* rows, std::int64_t n, std::int64_t width) {
  std::vector<float> unit(rows, rows + n * width);
  for (std::int64_t i = 0; i < n; ++i) {
    float* row = unit.data() + i * width;
    double square = 0;
    for (std::int64_t j = 0; j < width; ++j) square += static_cast<double>(row[j]) * row[j];
    if (square > 0)
      for (std::int64_t j = 0; j < width; ++j) row[j] = static_cast<float>(row[j] / std::sqrt(square));
  }
  return unit;
}

double dot(const float* a, const float* b, std::int64_t n) {
  // Eight independent sums can be vectorised; the compiler may not reorder a single one.
  float sum[8] = {};
  std::int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    for (int lane = 0; lane < 8; ++lane) sum[lane] += a[j + lane] * b[j + lane];
  double total = 0;
  for (const float part : sum) total += part;
  for (; j < n; ++j) total += static_cast<double>(a[j]) * b[j];
  return total;
}

}  // namespace

void write_synthetic(const SyntheticSettings& settings, int n_threads) {
  check_settings(settings);
  n_threads = std::max(1, n_threads);
  Workers workers(n_threads);
  storage::PendingOutput output(settings.output, storage::PendingOutput::Kind::directory,
                                {"ground_truth.h5", "train", "validation"});
  SyntheticSettings pending = settings;
  pending.output = output.place().string();
  Model model = make_model(pending, workers);
  ActivationWriter train(writer_settings(pending, "train"));
  write_split(pending, model, train, 0, pending.tokens, workers, n_threads, &model.truth.fired);
  train.finish();
  if (pending.validation_tokens > 0) {
    ActivationWriter validation(writer_settings(pending, "validation"));
    write_split(pending, model, validation, pending.tokens, pending.tokens + pending.validation_tokens, workers,
                n_threads, nullptr);
    validation.finish();
  }
  write_ground_truth(pending, model.truth);
  output.publish();
}

std::string ground_truth_path(const std::string& dataset_path) {
  const std::filesystem::path path = std::filesystem::path(dataset_path + "/..") / "ground_truth.h5";
  return std::filesystem::exists(path) ? path.lexically_normal().string() : "";
}

GroundTruth read_ground_truth(const std::string& path) {
  try {
    open_regular(path);  // HDF5 would wait for the writer of a FIFO
    const storage::Handle file = storage::open_file(path);
    if (!storage::has_attribute(file, "format") || storage::read_text_attribute(file, "format") != "weft-ground-truth")
      throw error(ExitCode::data, "it has no attribute format = \"weft-ground-truth\"");
    GroundTruth truth;
    truth.n_layers = storage::read_integer_attribute(file, "n_layers");
    truth.d_model = storage::read_integer_attribute(file, "d_model");
    truth.n_features = storage::read_integer_attribute(file, "n_features");
    if (truth.n_layers < 1 || truth.n_layers > kernels::kMostLayers || truth.d_model < 1 ||
        truth.d_model > kMostWidth || truth.n_features < 1 || truth.n_features > kMostFeatures)
      throw error(ExitCode::data, "{} layers, d_model {}, {} features are out of range", truth.n_layers, truth.d_model,
                  truth.n_features);
    for (std::int64_t layer = 0; layer < truth.n_layers; ++layer) {
      const std::string group = fmt::format("layer_{}/", layer);
      truth.encoder.push_back(
          read_tensor<float>(file, group + "encoder", kernels::Scalar::fp32, {truth.n_features, truth.d_model}));
      truth.decoder.push_back(read_tensor<float>(file, group + "decoder", kernels::Scalar::fp32,
                                                 {truth.n_features, (truth.n_layers - layer) * truth.d_model}));
      truth.frequency.push_back(
          read_tensor<double>(file, group + "frequency", kernels::Scalar::fp64, {truth.n_features}));
      truth.fired.push_back(read_tensor<std::int64_t>(file, group + "fired", kernels::Scalar::i64, {truth.n_features}));
    }
    return truth;
  } catch (const Error& failure) {
    throw error(ExitCode::data, "{}: the ground truth cannot be read ({}); regenerate the dataset with weft synth",
                path, failure.what());
  }
}

Recovery recovery(const GroundTruth& truth, std::span<const float* const> learned, std::int64_t n_learned,
                  int n_threads) {
  Workers workers(std::max(1, n_threads));
  Recovery result;
  for (std::int64_t layer = 0; layer < truth.n_layers; ++layer) {
    const std::size_t l = static_cast<std::size_t>(layer);
    const std::int64_t width = (truth.n_layers - layer) * truth.d_model;
    const std::vector<float> planted = unit_rows(truth.decoder[l].data(), truth.n_features, width);
    const std::vector<float> strips = unit_rows(learned[l], n_learned, width);
    std::vector<std::int64_t> counted;
    for (std::int64_t f = 0; f < truth.n_features; ++f)
      if (truth.fired[l][static_cast<std::size_t>(f)] >= kFiredEnough) counted.push_back(f);
    std::vector<std::vector<std::int64_t>> edges(counted.size());
    workers.run(static_cast<std::int64_t>(counted.size()), [&](std::int64_t i) {
      const float* direction = planted.data() + counted[static_cast<std::size_t>(i)] * width;
      for (std::int64_t f = 0; f < n_learned; ++f)
        if (dot(direction, strips.data() + f * width, width) >= kRecoveredCosine)
          edges[static_cast<std::size_t>(i)].push_back(f);
      note_progress();
    });
    const std::int64_t recovered = largest_matching(edges, n_learned);
    result.recovered += recovered;
    result.counted += static_cast<std::int64_t>(counted.size());
    result.per_layer.push_back(counted.empty() ? std::numeric_limits<double>::quiet_NaN()
                                               : static_cast<double>(recovered) / static_cast<double>(counted.size()));
  }
  result.fraction =
      result.counted == 0 ? 0.0 : static_cast<double>(result.recovered) / static_cast<double>(result.counted);
  return result;
}

}  // namespace weft::dataset
