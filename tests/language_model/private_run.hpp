// SPDX-License-Identifier: Apache-2.0
//
// A small private training run: what tests of private steps need.
#pragma once

#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "input/read.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/step/language_trainer.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/shared_grid.hpp"

namespace weft::testing {

inline constexpr std::int64_t kPrivateVocabulary = 37, kPrivateLength = 16;

/// `model`: keys of [language_model]; `privacy`: of [privacy]; `more`: other tables; `data`: keys of [data].
inline Configuration private_configuration(const std::string& model = "", const std::string& privacy = "",
                                           const std::string& more = "", const std::string& data = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\nmicro_tokens = 48\n" + data +
                  "[language_model]\nlayers = 1\nd_model = 32\n" + (model.rfind("heads", 0) != 0 ? "heads = 2\n" : "") +
                  model + "[privacy]\nenabled = true\nnoise_multiplier = 1\ndelta = 1e-5\nnoise_key = \"test\"\n" +
                  privacy + "[optimizer]\nlearning_rate = 1e-2\nwarmup_steps = 2\nclip_norm = 0\n" + more,
              "test.toml");
  return read;
}

/// Documents of several sequences, and of less than one; several of them belong to one of four owners. `stays`: without
/// those documents for which it is false.
inline dataset::TokenSet owned_documents(const std::function<bool(std::int64_t document, std::int64_t owner)>& stays) {
  std::vector<std::uint16_t> ids;
  dataset::TokenMarks marks;
  for (std::int64_t document = 0; document < 7; ++document) {
    const std::int64_t owner = document % 4;
    if (!stays(document, owner)) continue;
    marks.documents.push_back(std::ssize(ids));
    marks.owners.push_back(owner);
    for (std::int64_t i = 0; i < 9 + 23 * document % 50; ++i)
      ids.push_back(static_cast<std::uint16_t>((i * i * (document + 1) + 5 * document) % kPrivateVocabulary));
  }
  return {"documents", std::move(ids), kPrivateVocabulary, 0, std::move(marks)};
}

struct PrivateRun {
  /// On the ranks of `ranks`, parallel.tensor of which share a model. Without noise, and the sum divided by 1, unless
  /// `set_noise` follows.
  PrivateRun(Configuration settings, const parallel::Communicator& ranks)
      : shared(testing::shared_grid(ranks, grid_shape(on(settings, ranks.size())))),
        arithmetic{device::planned_backend(device_settings(settings)), execution().stream},
        architecture{.model = settings.language_model,
                     .vocabulary = kPrivateVocabulary,
                     .positions = settings.data.sequence,
                     .lora = settings.lora},
        trainer(with_clipping_mode(settings, architecture, grid.shape(), arithmetic.backend), architecture, grid,
                arithmetic) {
    trainer.initialise();
    // Gradients of all parameters well above rounding; the gains of norms not all alike.
    const model::Parameters& parameters = trainer.model().parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const model::ParameterSpec& spec = parameters.specs()[i];
      std::vector<float> values(static_cast<std::size_t>(spec.elements()));
      for (std::size_t k = 0; k < values.size(); ++k) {
        const double noise = random_normal(i, static_cast<std::int64_t>(k));
        values[k] = static_cast<float>(spec.is_matrix() ? 0.2 * noise : spec.initial.value + 0.2 * noise);
      }
      set(i, values);
    }
  }
  static const Configuration& on(Configuration& settings, std::int64_t n_ranks) {
    use_ranks(settings, n_ranks);
    return settings;
  }
  /// The rows whose weights this rank keeps, from the values of all.
  void set(std::size_t parameter, const std::vector<float>& values) {
    const model::Parameters& parameters = trainer.model().parameters();
    const model::ParameterSpec& spec = parameters.specs()[parameter];
    const parallel::Range stored = parameters.stored(parameter);
    const device::Buffer<float> staged(stored.size() * spec.columns());
    float* const to = spec.is_matrix() ? staged.data() : parameters.vector(parameter).weight.data;
    device::copy(arithmetic, to, values.data() + stored.begin * spec.columns(), 4 * staged.size(),
                 device::Direction::to_device);
    if (spec.is_matrix())
      kernels::weights_from_float(arithmetic, parameters.stored_matrix(parameter), 0,
                                  staged.matrix(stored.size(), spec.columns()));
    kernels::fence(arithmetic);
  }
  /// The rows of a matrix that this rank holds.
  std::vector<float> get(std::size_t parameter) const {
    const model::Parameters& parameters = trainer.model().parameters();
    const std::int64_t columns = parameters.specs()[parameter].columns(),
                       held = parameters.parts(parameter).held.size();
    const device::Buffer<float> staged(held * columns);
    kernels::weights_to_float(arithmetic, parameters.matrix(parameter), 0, staged.matrix(held, columns));
    return to_host(staged.data(), staged.size());
  }

  /// Example n of the data: ids repeat inside it, and some examples have fewer targets.
  static void fill_example(std::int64_t n, std::int64_t s, dataset::TokenBatch& batch) {
    const std::int64_t targets = n % 3 == 1 ? 5 + n % 7 : batch.length;
    for (std::int64_t t = 0; t < batch.length; ++t) {
      const auto at = static_cast<std::size_t>(s * batch.length + t);
      const auto token = [&](std::int64_t place) {
        return static_cast<std::uint32_t>((place * place * (n + 1) + 5 * n) % kPrivateVocabulary);
      };
      batch.ids[at] = t < targets ? token(t) : 0;
      batch.targets[at] = t < targets ? static_cast<std::int32_t>(token(t + 1)) : kernels::kIgnored;
      batch.positions[at] = static_cast<std::int32_t>(t);
      if (!batch.first_key.empty()) {  // two documents
        const std::int64_t start = t < 6 ? 0 : 6;
        batch.positions[at] = static_cast<std::int32_t>(t - start);
        batch.first_key[at] = static_cast<std::int32_t>(start);
      }
    }
  }
  /// A step on these examples of the data; each rank of the grid takes its part of them, or `of_rank`.
  void step(const std::vector<std::int64_t>& examples, std::optional<parallel::Range> of_rank = {}) {
    const parallel::Communicator& ranks = grid.axis(parallel::kDataAxis);
    const parallel::Range own = of_rank ? *of_rank : parallel::part(std::ssize(examples), ranks.size(), ranks.rank());
    trainer.private_step(own.size(), [&](std::int64_t first, dataset::TokenBatch& batch) {
      for (std::int64_t s = 0; s < batch.sequences; ++s)
        fill_example(examples[static_cast<std::size_t>(own.begin + first + s)], s, batch);
    });
    trainer.wait();
  }
  /// A step on records of several examples each.
  void step_of(const std::vector<std::vector<std::int64_t>>& records) {
    const parallel::Communicator& ranks = grid.axis(parallel::kDataAxis);
    const parallel::Range own = parallel::part(std::ssize(records), ranks.size(), ranks.rank());
    std::vector<std::int64_t> counts, examples;
    for (std::int64_t i = own.begin; i < own.end; ++i) {
      const std::vector<std::int64_t>& record = records[static_cast<std::size_t>(i)];
      counts.push_back(std::ssize(record));
      examples.insert(examples.end(), record.begin(), record.end());
    }
    trainer.private_step(counts, [&](std::int64_t first, dataset::TokenBatch& batch) {
      for (std::int64_t s = 0; s < batch.sequences; ++s)
        fill_example(examples[static_cast<std::size_t>(first + s)], s, batch);
    });
    trainer.wait();
  }
  /// A step on all records of a set.
  void step_on(const dataset::TokenSet& set, Configuration settings) {
    settings.data.batch_tokens = settings.data.sequence;  // no sampling: a set of one sequence will do
    const PrivateRecords records = private_records(settings, set);
    const parallel::Communicator& ranks = grid.axis(parallel::kDataAxis);
    const parallel::Range part = parallel::part(records.count, ranks.size(), ranks.rank());
    std::vector<std::int64_t> own(static_cast<std::size_t>(part.size()));
    std::iota(own.begin(), own.end(), part.begin);
    private_step(trainer, records, set, own);
    trainer.wait();
  }
  /// The gradients of the last step, in the order of the parameters: of owned rows, and of all vectors.
  std::vector<float> gradients() const {
    std::vector<float> all;
    const model::Parameters& parameters = trainer.model().parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters.specs()[i].frozen) continue;
      const bool is_matrix = parameters.specs()[i].is_matrix();
      const kernels::Matrix<float> matrix = trainer.gradients().matrix(i);
      const kernels::Array<float> vector = trainer.gradients().vector(i);
      const std::vector<float> one =
          is_matrix ? to_host(matrix.data, matrix.rows * matrix.columns) : to_host(vector.data, vector.size);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  const std::shared_ptr<const parallel::Grid> shared;
  const parallel::Grid& grid = *shared;
  const kernels::Execution arithmetic;
  const Architecture architecture;
  Trainer trainer;
};

inline std::vector<float> difference(std::vector<float> a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}
/// Root of the mean squared difference, relative to that of `b`.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  return norm_of(difference(a, b)) / norm_of(b);
}

/// The clipped sum over these examples, or records of several ones, on one rank.
template <class Records = std::int64_t>
std::vector<float> clipped_sum(const Configuration& settings, const std::vector<Records>& examples) {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  PrivateRun run(settings, alone);
  if constexpr (std::is_integral_v<Records>)
    run.step(examples);
  else
    run.step_of(examples);
  return run.gradients();
}

}  // namespace weft::testing
