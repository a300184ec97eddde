// SPDX-License-Identifier: Apache-2.0
//
// A small private training of a transcoder: what tests of private steps need.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "input/read.hpp"
#include "kernels/optimize/adam.hpp"
#include "tests/test.hpp"
#include "tests/transcoder/private_reference.hpp"
#include "transcoder/private/private_trainer.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::testing {

using namespace weft::transcoder;

inline constexpr std::int64_t kPrivateLayers = 3, kPrivateWidth = 7, kPrivateFeatures = 13;
inline constexpr std::int64_t kPrivateColumns = kPrivateLayers * kPrivateWidth;

inline double random_normal(std::uint64_t stream, std::int64_t index) {
  return kernels::normal(kernels::philox(23, kernels::Purpose::test, stream, static_cast<std::uint64_t>(index)));
}

/// `model`: keys of [transcoder]; `privacy`: of [privacy], clip = 0.8 unless it says otherwise; `more`: other tables.
/// The mode "auto" is book_keeping, as for a run without device.memory (with_private_mode).
inline Configuration private_configuration(const std::string& model, const std::string& privacy = "",
                                           const std::string& more = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 20\n[data]\ntrain = \"x\"\nvalidation = \"y\"\nbatch_tokens = 24\nmicro_tokens = 9\n"
              "[transcoder]\nfeatures = 13\n" +
                  model + "[privacy]\nenabled = true\nnoise_multiplier = 1\ndelta = 1e-5\nnoise_key = \"test\"\n" +
                  privacy + (privacy.find("clip =") == std::string::npos ? "clip = 0.8\n" : "") +
                  "[optimizer]\nlearning_rate = 1e-2\n" + more,
              "test.toml");
  if (read.privacy.mode == privacy::Mode::automatic && read.privacy.algorithm != privacy::Algorithm::naive)
    read.privacy.mode = privacy::Mode::book_keeping;
  return read;
}

/// Row i of the data, [L * d], inputs or targets: normalised by mean 0.25 and scale 0.5.
inline std::vector<float> stored_row(std::int64_t row, bool target) {
  std::vector<float> values;
  for (std::int64_t j = 0; j < kPrivateColumns; ++j)
    values.push_back(static_cast<float>(2 * random_normal(target ? 2 : 1, row * kPrivateColumns + j) + 0.25));
  return values;
}

struct PrivateSteps {
  PrivateSteps(const Configuration& settings, const parallel::Communicator& ranks)
      : of_record(record_rows(settings)),
        grid(ranks, parallel::data_by_feature(ranks.size(), 1)),
        trainer(settings, shape_of(settings.transcoder, kPrivateLayers, kPrivateWidth), normalisation(), statistics(),
                grid, execution(), kernels::Scalar::fp32) {
    trainer.initialise();
    // Gradients of all parameters well above rounding.
    const model::Parameters& parameters = trainer.model().parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const model::ParameterSpec& spec = parameters.specs()[i];
      std::vector<float> values;
      for (std::int64_t e = 0; e < spec.elements(); ++e)
        values.push_back(static_cast<float>(spec.name.ends_with("threshold")
                                                ? 0.3 + 0.05 * std::abs(random_normal(3 + i, e))
                                                : 0.4 * random_normal(3 + i, e)));
      set(i, values);
    }
  }
  static dataset::Normalisation normalisation() {
    const dataset::Affine affine{std::vector<float>(kPrivateColumns, 0.25f), std::vector<float>(kPrivateColumns, 0.5f)};
    return {affine, affine};
  }
  static dataset::Statistics statistics() {
    const dataset::SideStatistics side{std::vector<double>(kPrivateColumns, 0.25),
                                       std::vector<double>(kPrivateColumns, 2), std::vector<double>(kPrivateLayers, 1)};
    return {100, side, side};
  }
  void set(std::size_t parameter, const std::vector<float>& values) {
    const model::Parameters& parameters = trainer.model().parameters();
    const model::ParameterSpec& spec = parameters.specs()[parameter];
    const device::Buffer<float> staged(spec.elements());
    float* const to = spec.is_matrix() ? staged.data() : parameters.vector(parameter).weight.data;
    device::copy(execution(), to, values.data(), 4 * spec.elements(), device::Direction::to_device);
    if (spec.is_matrix())
      kernels::weights_from_float(execution(), parameters.matrix(parameter), 0,
                                  staged.matrix(spec.rows(), spec.columns()));
    kernels::fence(execution());
  }
  static std::vector<float> to_host(const float* data, std::int64_t size) {
    std::vector<float> values(static_cast<std::size_t>(size));
    device::copy(execution(), values.data(), data, 4 * size, device::Direction::to_host);
    kernels::fence(execution());
    return values;
  }
  /// All parameters, or the gradients of the last step, on every rank.
  std::vector<double> parameters() {
    trainer.wait();
    std::vector<double> all;
    const model::Parameters& held = trainer.model().parameters();
    for (std::size_t i = 0; i < held.size(); ++i) {
      const model::ParameterSpec& spec = held.specs()[i];
      const device::Buffer<float> staged(spec.elements());
      if (spec.is_matrix())
        kernels::weights_to_float(execution(), held.matrix(i), 0, staged.matrix(spec.rows(), spec.columns()));
      const std::vector<float> one =
          to_host(spec.is_matrix() ? staged.data() : held.vector(i).weight.data, spec.elements());
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  std::vector<double> gradients() const {
    std::vector<double> all;
    const model::Parameters& held = trainer.model().parameters();
    for (std::size_t i = 0; i < held.size(); ++i) {
      const model::ParameterSpec& spec = held.specs()[i];
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      const bool is_matrix = spec.is_matrix();
      const kernels::Matrix<float> owned = trainer.gradients().matrix(i);
      const std::vector<float> own = is_matrix ? to_host(owned.data, owned.rows * owned.columns)
                                               : to_host(trainer.gradients().vector(i).data, spec.elements());
      const std::int64_t begin = is_matrix ? held.parts(i).owned.begin * owned.columns : 0;
      for (std::size_t e = 0; e < own.size(); ++e)
        values[static_cast<std::size_t>(begin) + e] = static_cast<double>(own[e]);
      if (is_matrix) grid.world().sum(std::span<double>(values));
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

  /// Record r has the rows from r * of_record on; every third one is short.
  std::int64_t length(std::int64_t record) const { return record % 3 == 1 ? (of_record + 1) / 2 : of_record; }
  /// A step on these records; each rank takes its part of them, or `of_rank`.
  void step(const std::vector<std::int64_t>& records, std::optional<parallel::Range> of_rank = {}) {
    const parallel::Range own = of_rank ? *of_rank : grid.part(parallel::kDataAxis, std::ssize(records));
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = own.begin; i < own.end; ++i) lengths.push_back(length(records[static_cast<std::size_t>(i)]));
    trainer.step(lengths, [&](std::int64_t first, std::int64_t count, PrivateTrainer::Rows rows) {
      std::byte *inputs = rows.inputs, *targets = rows.targets;
      for (std::int64_t i = first; i < first + count; ++i) {
        const std::int64_t record = records[static_cast<std::size_t>(own.begin + i)];
        for (std::int64_t row = record * of_record; row < record * of_record + length(record); ++row) {
          std::vector<float> x = stored_row(row, false);
          if (record == not_finite) x[3] = std::numeric_limits<float>::quiet_NaN();
          std::memcpy(inputs, x.data(), 4 * x.size());
          std::memcpy(targets, stored_row(row, true).data(), 4 * x.size());
          inputs += 4 * kPrivateColumns;
          targets += 4 * kPrivateColumns;
        }
      }
    });
    trainer.wait();
  }
  /// Of the reference: the gradients of these records.
  std::vector<PrivateReference::Values> of_records(PrivateReference reference,
                                                   const std::vector<std::int64_t>& records) {
    reference.parameters = parameters();
    reference.record_rows = of_record;
    REQUIRE(reference.size() == std::ssize(reference.parameters));
    std::vector<PrivateReference::Values> all;
    for (const std::int64_t record : records) {
      PrivateReference::Values x, y;
      for (std::int64_t row = record * of_record; row < record * of_record + length(record); ++row) {
        for (const float value : stored_row(row, false)) x.push_back(static_cast<double>((value - 0.25f) * 0.5f));
        for (const float value : stored_row(row, true)) y.push_back(static_cast<double>((value - 0.25f) * 0.5f));
      }
      all.push_back(reference.gradient(x.data(), y.data(), length(record)));
    }
    return all;
  }

  const std::int64_t of_record;
  std::int64_t not_finite = -1;  ///< this record has a NaN
  parallel::Grid grid;
  PrivateTrainer trainer;
};

inline double norm_of(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}
inline std::vector<double> difference(std::vector<double> a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  return norm_of(difference(a, b)) / norm_of(b);
}

}  // namespace weft::testing
