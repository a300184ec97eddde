// SPDX-License-Identifier: Apache-2.0
//
// A small private training of a transcoder: what tests of private steps need.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "input/read.hpp"
#include "kernels/optimize/adam.hpp"
#include "tests/test.hpp"
#include "tests/transcoder/private_reference.hpp"
#include "transcoder/private/records.hpp"
#include "transcoder/settings/settings_schema.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::testing {

using namespace weft::transcoder;

inline constexpr std::int64_t kPrivateLayers = 3, kPrivateWidth = 7, kPrivateFeatures = 13;
inline constexpr std::int64_t kPrivateColumns = kPrivateLayers * kPrivateWidth;

inline double random_normal(std::uint64_t stream, std::int64_t index) {
  return kernels::normal(kernels::philox(23, kernels::Purpose::test, stream, static_cast<std::uint64_t>(index)));
}

/// `model`: keys of [transcoder]; `privacy`: of [privacy], clip = 0.8 unless it says otherwise; `more`: other tables.
/// With beta1 = 0 the first moments are the gradients of the last step.
inline Configuration private_configuration(const std::string& model, const std::string& privacy = "",
                                           const std::string& more = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 20\n[data]\ntrain = \"x\"\nvalidation = \"y\"\nbatch_tokens = 24\nmicro_tokens = 9\n"
              "[transcoder]\nfeatures = 13\n" +
                  model + "[privacy]\nenabled = true\nnoise_multiplier = 1\ndelta = 1e-5\nnoise_key = \"test\"\n" +
                  privacy + (privacy.find("clip =") == std::string::npos ? "clip = 0.8\n" : "") +
                  "[optimizer]\nlearning_rate = 1e-2\nbeta1 = 0\n" + more,
              "test.toml");
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
  PrivateSteps(const Configuration& settings, const parallel::Communicator& ranks, std::int64_t feature_ranks = 1)
      : of_record(record_rows(settings)),
        grid(ranks, parallel::data_by_feature(ranks.size() / feature_ranks, feature_ranks)),
        trainer(with_largest_batch(settings, 0, ranks.size()),
                shape_of(settings.transcoder, kPrivateLayers, kPrivateWidth), normalisation(), statistics(), grid,
                execution(), 4 * kPrivateColumns,
                [](const dataset::RawBatch&, std::int64_t) { return std::string("records"); }) {
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
  void set(std::size_t parameter, const std::vector<float>& all) {
    const model::Parameters& parameters = trainer.model().parameters();
    const model::ParameterSpec& spec = parameters.specs()[parameter];
    const parallel::Range held = parameters.parts(parameter).held;
    const std::int64_t size = held.size() * spec.columns();
    const float* const values = all.data() + held.begin * spec.columns();
    const device::Buffer<float> staged(size);
    float* const to = spec.is_matrix() ? staged.data() : parameters.vector(parameter).weight.data;
    device::copy(execution(), to, values, 4 * size, device::Direction::to_device);
    if (spec.is_matrix())
      kernels::weights_from_float(execution(), parameters.matrix(parameter), 0,
                                  staged.matrix(held.size(), spec.columns()));
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
    return gather(
        [](const kernels::ParameterRows& rows, const device::Buffer<float>& staged) {
          kernels::weights_to_float(execution(), rows, 0, staged.matrix(rows.rows, rows.columns));
          return staged.data();
        },
        &kernels::ParameterVector::weight);
  }
  std::vector<double> gradients() {
    return gather([](const kernels::ParameterRows& rows,
                     const device::Buffer<float>&) { return static_cast<const float*>(rows.first_moment); },
                  &kernels::ParameterVector::first_moment);
  }
  /// Collects what each rank updates.
  template <class OfMatrix>
  std::vector<double> gather(const OfMatrix& of_matrix, kernels::Array<float> kernels::ParameterVector::*of_vector) {
    trainer.wait();
    std::vector<double> all;
    const model::Parameters& held = trainer.model().parameters();
    for (std::size_t i = 0; i < held.size(); ++i) {
      const model::ParameterSpec& spec = held.specs()[i];
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      const parallel::Range owned = held.parts(i).owned;
      const std::int64_t size = owned.size() * spec.columns();
      const device::Buffer<float> staged(size);
      const std::vector<float> own =
          to_host(spec.is_matrix() ? of_matrix(held.owned_matrix(i), staged) : (held.owned_vector(i).*of_vector).data,
                  held.parts(i).writes ? size : 0);
      std::copy(own.begin(), own.end(), values.begin() + owned.begin * spec.columns());
      grid.world().sum(std::span<double>(values));
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

  /// Record r has the rows from r * of_record on; every third one is short.
  std::int64_t length(std::int64_t record) const { return record % 3 == 1 ? (of_record + 1) / 2 : of_record; }
  /// A step on these records.
  void step(const std::vector<std::int64_t>& records) {
    std::vector<std::int64_t> offsets{0};
    std::vector<float> x, y;
    for (const std::int64_t record : records) {
      for (std::int64_t row = record * of_record; row < record * of_record + length(record); ++row) {
        const std::vector<float> input = stored_row(row, false), target = stored_row(row, true);
        x.insert(x.end(), input.begin(), input.end());
        y.insert(y.end(), target.begin(), target.end());
        if (record == not_finite) x[x.size() - 3] = std::numeric_limits<float>::quiet_NaN();
      }
      offsets.push_back(offsets.back() + length(record));
    }
    const std::int64_t n_rows = std::max<std::int64_t>(offsets.back(), grid.world().size());
    x.resize(static_cast<std::size_t>(n_rows * kPrivateColumns));
    y.resize(x.size());
    const parallel::Range own = grid.own_part(n_rows);
    const auto rows = [&](std::vector<float>& all) -> kernels::AnyMatrix {
      return {all.data() + own.begin * kPrivateColumns, kernels::Scalar::fp32, own.size(), kPrivateColumns,
              kPrivateColumns};
    };
    trainer.set_records(offsets);
    dataset::RawBatch batch;
    batch.inputs = rows(x);
    batch.targets = rows(y);
    batch.n_tokens = n_rows;
    trainer.step(batch);
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
  Trainer trainer;
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
