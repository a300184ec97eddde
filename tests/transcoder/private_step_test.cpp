// SPDX-License-Identifier: Apache-2.0
//
// Private steps of a transcoder, on 1, 2 and 4 ranks of the data axis: the clipped sum is that of float64 gradients of
// single records, so that one changes it by at most the bound; noise is drawn once per update and is the same on any
// grid. Norms are not summed over ranks that hold different records.
#include <algorithm>

#include "tests/transcoder/private_steps.hpp"

namespace weft::transcoder {
namespace {

using testing::kPrivateColumns;
using testing::kPrivateFeatures;
using testing::kPrivateLayers;
using testing::kPrivateWidth;
using testing::norm_of;
using testing::private_configuration;
using testing::PrivateReference;
using testing::PrivateSteps;
using testing::relative_error;

/// Which [transcoder] and what it is for the reference.
struct PrivateVariant {
  const char* keys;
  PrivateReference reference;
};
const PrivateVariant kVariants[] = {
    {"activation = \"topk\"\nk = 3\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::topk, 3}},
    {"activation = \"topk\"\nk = 2\nscope = \"all_layers\"\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::topk_all_layers, 6}},
    {"activation = \"relu\"\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::relu, 0}},
    {"activation = \"relu\"\ndecoder = \"per_layer\"\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::relu, 0, false}},
    {"activation = \"jumprelu\"\nthreshold = 0.3\nbandwidth = 0.9\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::jump, 0, true, 0.9}},
    {"activation = \"jumprelu\"\npseudo_derivative = \"goreg\"\nthreshold = 0.3\nbandwidth = 0.9\n",
     {kPrivateLayers, kPrivateWidth, kPrivateFeatures, PrivateReference::Activation::jump, 0, true, 0.9, true}},
};

const std::vector<std::int64_t> kRecords = {0, 1, 4, 5, 7, 8, 11, 12, 14};

std::vector<double> sum_of(const Configuration& settings, const std::vector<std::int64_t>& records,
                           std::optional<parallel::Range> of_rank = {}) {
  PrivateSteps run(settings, testing::world().all());
  run.step(records, of_rank);
  return run.gradients();
}

constexpr const char* kSequence = "unit = \"sequence\"\nrecord_rows = 4\n";
constexpr const char* kToken = "unit = \"token\"\n";

}  // namespace

TEST_CASE("the clipped sum is that of the gradients of single records in float64") {
  for (const PrivateVariant& variant : kVariants)
    for (const char* unit : {kToken, kSequence}) {
      CAPTURE(variant.keys);
      CAPTURE(unit);
      PrivateSteps run(private_configuration(variant.keys, unit), testing::world().all());
      const auto gradients = run.of_records(variant.reference, kRecords);
      double smallest = 1e9, largest = 0;
      for (const auto& gradient : gradients) {
        smallest = std::min(smallest, norm_of(gradient));
        largest = std::max(largest, norm_of(gradient));
      }
      CHECK(largest > 0.8);  // some are clipped
      run.step(kRecords);
      // Norms are taken 2^-14 larger; fp32 sums of about 50 terms.
      CHECK(relative_error(run.gradients(), variant.reference.clipped_sum(gradients, 0.8)) < 1.5e-4);
      // Unclipped: without that margin.
      PrivateSteps open(private_configuration(variant.keys, std::string(unit) + "clip = 1e5\n"),
                        testing::world().all());
      open.step(kRecords);
      CHECK(relative_error(open.gradients(), variant.reference.clipped_sum(gradients, 1e9)) < 2e-6);
      CHECK(smallest > 0);
    }
}

TEST_CASE("every mode and algorithm forms the same sum as the naive oracle") {
  for (const PrivateVariant& variant : {kVariants[0], kVariants[4]})
    for (const char* unit : {kToken, kSequence}) {
      CAPTURE(variant.keys);
      CAPTURE(unit);
      const auto sum = [&](const std::string& privacy) {
        return sum_of(private_configuration(variant.keys, unit + privacy), kRecords);
      };
      const std::vector<double> naive = sum("algorithm = \"naive\"\n");
      for (const char* privacy :
           {"mode = \"two_pass\"\nalgorithm = \"input_length\"\n", "mode = \"two_pass\"\nalgorithm = \"width\"\n",
            "mode = \"book_keeping\"\n", "mode = \"book_keeping\"\nrelease = \"end\"\n", ""}) {
        CAPTURE(privacy);
        CHECK(relative_error(sum(privacy), naive) < 1e-6);
      }
      // Each element is rounded to 8 bits.
      CHECK(relative_error(sum("mode = \"materialise\"\n"), naive) < 4e-3);
      const std::vector<double> by_part = sum("scheme = \"per_layer\"\n");
      CHECK(relative_error(by_part, sum("scheme = \"per_layer\"\nalgorithm = \"naive\"\n")) < 1e-6);
      CHECK(relative_error(by_part, naive) > 1e-2);
    }
}

TEST_CASE("ranks may have different numbers of records, and none") {
  const Configuration settings = private_configuration(kVariants[0].keys, kSequence);
  const std::vector<double> expected = sum_of(settings, kRecords);
  const parallel::World& world = testing::world();
  const parallel::Range own{0, world.rank() == world.size() - 1 ? std::ssize(kRecords) : 0};
  CHECK(relative_error(sum_of(settings, kRecords, own), expected) < 1e-6);
  CHECK(norm_of(sum_of(settings, {})) == 0);
}

TEST_CASE("a record that is not finite is left out, and the others are not changed") {
  for (const PrivateVariant& variant : kVariants)
    for (const char* mode : {"mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"materialise\"\n",
                             "algorithm = \"naive\"\n"}) {
      CAPTURE(variant.keys);
      CAPTURE(mode);
      const Configuration settings = private_configuration(variant.keys, std::string(kSequence) + mode);
      PrivateSteps run(settings, testing::world().all());
      run.not_finite = 5;
      run.step(kRecords);
      std::vector<std::int64_t> without = kRecords;
      without.erase(without.begin() + 3);
      // In mode materialise products of other shapes round other elements up.
      const bool rounds = settings.privacy.mode == privacy::Mode::materialise;
      CHECK(relative_error(run.gradients(), sum_of(settings, without)) < (rounds ? 1e-3 : 1e-6));
    }
}

TEST_CASE("noise is that of one rank, drawn once per update, and steps give the parameters of one rank") {
  for (const PrivateVariant& variant : {kVariants[0], kVariants[4]}) {
    CAPTURE(variant.keys);
    const privacy::Noise noise{.key = {9, 8, 7, 6, 5, 4, 3, 2}, .multiplier = 1.5, .expected = 4};
    const Configuration settings = private_configuration(variant.keys, kSequence);
    const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
    PrivateSteps together(settings, testing::world().all()), single(settings, alone);
    for (PrivateSteps* run : {&together, &single}) {
      run->trainer.set_noise(noise);
      run->step({});
    }
    // No sums: the same bits; and the deviation that is accounted for, of 1,000 elements.
    const std::vector<double> first = together.gradients();
    CHECK(first == single.gradients());
    CHECK(norm_of(first) / std::sqrt(static_cast<double>(first.size())) == doctest::Approx(1.5 * 0.8 / 4).epsilon(0.1));
    for (PrivateSteps* run : {&together, &single}) {
      run->step(kRecords);
      run->step({1, 3});
    }
    CHECK(together.trainer.steps_done() == 3);
    CHECK(relative_error(together.gradients(), single.gradients()) < 1e-5);
    CHECK(relative_error(together.parameters(), single.parameters()) < 1e-6);
    // Every rank holds them, those that others own too.
    std::vector<double> own = together.parameters(), of_all = own;
    testing::world().all().sum(std::span<double>(of_all));
    for (std::size_t i = 0; i < own.size(); ++i)
      REQUIRE(of_all[i] == doctest::Approx(own[i] * static_cast<double>(testing::world().size())).epsilon(1e-12));
  }
}

TEST_CASE("an adaptive bound follows the norms of records, with the same bits on any number of ranks") {
  const privacy::Noise noise{.key = {9, 8, 7}, .multiplier = 0, .expected = 4, .count_deviation = 0.5};
  const Configuration settings =
      private_configuration(kVariants[0].keys, std::string(kSequence) + "clipping = \"adaptive\"\n");
  const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
  PrivateSteps together(settings, testing::world().all()), single(settings, alone);
  for (const std::vector<std::int64_t>& records : {kRecords, {}, {1, 3}}) {
    for (PrivateSteps* run : {&together, &single}) {
      run->trainer.set_noise(noise);
      run->step(records);
    }
    CHECK(together.trainer.metrics().clip_bound == single.trainer.metrics().clip_bound);
    CHECK(single.trainer.metrics().clip_bound != settings.privacy.clip);
  }
}

TEST_CASE("records lie in one file each, and a rank with a part of the features is refused") {
  dataset::Description data;
  data.files = {{.name = "a", .rows = 10}, {.name = "b", .rows = 3}, {.name = "c", .rows = 8}};
  const RecordTable table(data, 4);
  CHECK(table.count() == 3 + 1 + 2);
  const auto is = [](const RecordTable::Rows& rows, std::int64_t file, std::int64_t begin, std::int64_t count) {
    return rows.file == file && rows.begin == begin && rows.count == count;
  };
  CHECK(is(table.rows_of(0), 0, 0, 4));
  CHECK(is(table.rows_of(2), 0, 8, 2));
  CHECK(is(table.rows_of(3), 1, 0, 3));
  CHECK(is(table.rows_of(5), 2, 4, 4));
  CHECK_THROWS_AS(require_private_grid(parallel::data_by_feature(2, 2)), Error);
}

TEST_CASE("the plan is what a private trainer allocates") {
  for (const char* privacy : {"mode = \"two_pass\"\n", "", "mode = \"materialise\"\n", "algorithm = \"naive\"\n"}) {
    CAPTURE(privacy);
    const Configuration settings = private_configuration(kVariants[4].keys, std::string(kSequence) + privacy);
    const Shape shape = shape_of(settings.transcoder, kPrivateLayers, kPrivateWidth);
    const parallel::GridShape grid = parallel::data_by_feature(testing::world().size(), 1);
    const std::int64_t before = device::memory_use().device_bytes;
    const PrivateSteps run(settings, testing::world().all());
    const std::int64_t taken = device::memory_use().device_bytes - before;
    const model::StateBytes state =
        model::state_bytes(parameter_specs(private_shape(shape)), grid, testing::world().rank(),
                           kernels::StorageType::fp32, testing::execution().backend, Moments::held);
    const model::StepArena planned =
        measure_private_step(settings, shape, grid, 4 * kPrivateColumns, testing::execution().backend);
    // Of the normalisation, which no plan counts: 8 vectors. On several ranks a plan is of the largest one.
    const std::int64_t expected = planned.device_bytes() + state.total() + 8 * 4 * kPrivateColumns;
    CHECK(taken <= expected);
    if (testing::world().size() == 1) CHECK(taken == expected);
  }
}

}  // namespace weft::transcoder
