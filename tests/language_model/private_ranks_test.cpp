// SPDX-License-Identifier: Apache-2.0
//
// Private steps on several ranks of the data axis: the sum, the noise and the sensitivity are those of one rank. Norms
// are not summed over ranks that hold different examples: that would raise the sensitivity to C (1 + sqrt(R - 1)).
#include "tests/language_model/private_run.hpp"
#include "tests/training/registry_bits.hpp"

namespace weft::language_model {
namespace {

using testing::private_configuration;
using testing::PrivateRun;

const std::vector<std::int64_t> kExamples = {0, 1, 4, 7, 8, 11, 12};

/// All gradients on every rank.
std::vector<float> all_gradients(const PrivateRun& run) {
  const parallel::Communicator& ranks = testing::world().all();
  const training::Parameters& parameters = run.trainer.model().parameters();
  std::vector<float> all;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const training::ParameterSpec& spec = parameters.specs()[i];
    std::vector<double> values(static_cast<std::size_t>(spec.elements()));
    if (spec.is_matrix()) {
      const kernels::Matrix<float> owned = run.trainer.gradients().matrix(i);
      const std::vector<float> own = testing::to_host(owned.data, owned.rows * owned.columns);
      const std::int64_t begin = parameters.parts(i).owned.begin * owned.columns;
      for (std::size_t k = 0; k < own.size(); ++k) values[static_cast<std::size_t>(begin) + k] = own[k];
      ranks.sum(std::span<double>(values));
    } else {
      const std::vector<float> own = testing::to_host(run.trainer.gradients().vector(i).data, spec.elements());
      values.assign(own.begin(), own.end());
    }
    for (const double value : values) all.push_back(static_cast<float>(value));
  }
  return all;
}

std::vector<float> sum_on_all(const Configuration& settings, const std::vector<std::int64_t>& examples,
                              std::optional<parallel::Range> of_rank = {}) {
  PrivateRun run(settings, testing::world().all());
  run.step(examples, of_rank);
  return all_gradients(run);
}

}  // namespace

TEST_CASE("the clipped sum is that of one rank, in every mode") {
  for (const char* privacy : {"mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"materialise\"\n",
                              "algorithm = \"naive\"\n", "scheme = \"per_layer\"\n"}) {
    CAPTURE(privacy);
    const Configuration settings = private_configuration("", privacy);
    // Products over other numbers of rows round otherwise; an element of a stored gradient then rounds to 8 bits up
    // instead of down, now and then.
    const double tolerance = settings.privacy.mode == privacy::Mode::materialise ? 1e-3 : 1e-6;
    CHECK(testing::relative_error(sum_on_all(settings, kExamples), testing::clipped_sum(settings, kExamples)) <
          tolerance);
  }
}

TEST_CASE("ranks may have different numbers of examples, and none") {
  const Configuration settings = private_configuration();
  const std::vector<float> expected = testing::clipped_sum(settings, kExamples);
  const std::int64_t rank = testing::world().rank(), last = testing::world().size() - 1;
  // All examples on the last rank: three micro-batches there, none elsewhere.
  const parallel::Range own{0, rank == last ? std::ssize(kExamples) : 0};
  CHECK(testing::relative_error(sum_on_all(settings, kExamples, own), expected) < 1e-6);
  // No examples at all: a sum of zeros.
  CHECK(testing::norm_of(sum_on_all(settings, {})) == 0);
}

TEST_CASE("removing an example changes the sum by at most the bound") {
  for (const char* mode : {"two_pass", "book_keeping", "materialise"}) {
    CAPTURE(mode);
    const Configuration settings = private_configuration("", "clip = 0.5\nmode = \"" + std::string(mode) + "\"\n");
    for (const std::size_t removed : {0, 3, 6}) {
      // The others move to other ranks and micro-batches.
      std::vector<std::int64_t> fewer = kExamples;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(removed));
      const std::vector<float> change =
          testing::difference(sum_on_all(settings, kExamples), sum_on_all(settings, fewer));
      CHECK(testing::norm_of(change) <= 0.5 * (1 + 1e-3));
      CHECK(testing::norm_of(change) > 0.49);
    }
  }
}

TEST_CASE("noise is that of one rank, drawn once per update, and all ranks keep the same parameters") {
  const Trainer::Noise noise{.key = {9, 8, 7, 6, 5, 4, 3, 2}, .multiplier = 1, .expected = 4};
  const Configuration settings = private_configuration();
  PrivateRun together(settings, testing::world().all());
  const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
  PrivateRun single(settings, alone);
  for (PrivateRun* run : {&together, &single}) {
    run->trainer.set_noise(noise);
    run->step({});
  }
  // No sums: the same bits.
  CHECK(all_gradients(together) == single.gradients());
  for (PrivateRun* run : {&together, &single}) {
    run->step(kExamples);
    run->step({1, 3});
  }
  CHECK(testing::relative_error(all_gradients(together), single.gradients()) < 1e-5);
  together.trainer.transformer().prepare_weights();  // those of the other ranks arrive
  std::vector<double> own;
  for (const float value : together.get(0)) own.push_back(value);
  std::vector<double> of_all = own;
  testing::world().all().sum(std::span<double>(of_all));
  for (std::size_t i = 0; i < own.size(); ++i)
    CHECK(of_all[i] == doctest::Approx(own[i] * static_cast<double>(testing::world().size())).epsilon(1e-12));
}

}  // namespace weft::language_model
