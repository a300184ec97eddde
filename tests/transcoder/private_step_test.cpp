// SPDX-License-Identifier: Apache-2.0
//
// Private steps of a transcoder, on 1, 2 and 4 ranks of either axis: the clipped sum is that of float64 gradients of
// single records, so that one changes it by at most the bound; noise is drawn once per update and is the same on any
// grid.
#include <algorithm>

#include "tests/transcoder/private_steps.hpp"

namespace weft::transcoder {
namespace {

using testing::difference;
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
  std::string keys;
  PrivateReference reference;
};
using Activation = PrivateReference::Activation;
using Kind = PrivateReference::Decoder;
PrivateReference reference(Activation activation, std::int64_t k = 0, Kind decoder = Kind::cross_layer,
                           double bandwidth = 0) {
  return {kPrivateLayers, kPrivateWidth, kPrivateFeatures, activation, k, decoder, bandwidth};
}
const PrivateVariant kVariants[] = {
    {"activation = \"topk\"\nk = 3\n", reference(Activation::topk, 3)},
    {"activation = \"topk\"\nk = 2\nscope = \"all_layers\"\n", reference(Activation::topk_all_layers, 6)},
    {"activation = \"relu\"\n", reference(Activation::relu)},
    {"activation = \"relu\"\ndecoder = \"per_layer\"\n", reference(Activation::relu, 0, Kind::per_layer)},
    {"activation = \"jumprelu\"\nthreshold = 0.3\nbandwidth = 0.9\nthreshold_gradient = \"listed\"\n",
     reference(Activation::jump, 0, Kind::cross_layer, 0.9)},
    {"activation = \"topk\"\nk = 3\ndecoder = \"tied\"\n", reference(Activation::topk, 3, Kind::tied)},
    {"activation = \"relu\"\ndecoder = \"tied_target\"\n", reference(Activation::relu, 0, Kind::tied_target)},
    {"activation = \"jumprelu\"\nthreshold = 0.3\nbandwidth = 0.9\nthreshold_gradient = \"listed\"\n"
     "decoder = \"tied_target\"\n",
     reference(Activation::jump, 0, Kind::tied_target, 0.9)},
};

/// Ranks of the feature axis: all of the data axis, all of the feature axis, both.
std::vector<std::int64_t> feature_ranks() {
  const std::int64_t ranks = testing::world().size();
  return ranks == 1   ? std::vector<std::int64_t>{1}
         : ranks == 2 ? std::vector<std::int64_t>{1, 2}
                      : std::vector<std::int64_t>{2, 4};
}

const std::vector<std::int64_t> kRecords = {0, 1, 4, 5, 7, 8, 11, 12, 14};

std::vector<double> sum_of(const Configuration& settings, const std::vector<std::int64_t>& records,
                           std::int64_t of_features = 1) {
  PrivateSteps run(settings, testing::world().all(), of_features);
  run.step(records);
  return run.gradients();
}

std::vector<std::int64_t> without(std::vector<std::int64_t> records, std::int64_t one) {
  std::erase(records, one);
  return records;
}

constexpr const char* kSequence = "unit = \"sequence\"\nrecord_rows = 4\n";
constexpr const char* kToken = "unit = \"token\"\n";

}  // namespace

TEST_CASE("the clipped sum is that of the gradients of single records in float64") {
  for (const PrivateVariant& variant : kVariants)
    for (const std::string& unit : {std::string(kToken), std::string(kSequence)})
      for (const std::int64_t of_features : feature_ranks()) {
        CAPTURE(variant.keys);
        CAPTURE(unit);
        CAPTURE(of_features);
        PrivateSteps run(private_configuration(variant.keys, unit), testing::world().all(), of_features);
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
        PrivateSteps open(private_configuration(variant.keys, unit + "clip = 1e5\n"), testing::world().all(),
                          of_features);
        open.step(kRecords);
        CHECK(relative_error(open.gradients(), variant.reference.clipped_sum(gradients, 1e9)) < 2e-6);
        CHECK(smallest > 0);
      }
}

TEST_CASE("a record changes the sum by the bound at most, in every scheme") {
  for (const PrivateVariant& variant : {kVariants[0], kVariants[7]})
    for (const std::string& scheme : {std::string("flat"), std::string("group"), std::string("per_layer")}) {
      CAPTURE(variant.keys);
      CAPTURE(scheme);
      const Configuration settings =
          private_configuration(variant.keys, std::string(kSequence) + "scheme = \"" + scheme + "\"\n");
      const std::vector<double> all = sum_of(settings, kRecords);
      for (const std::int64_t record : {0, 5, 14}) {
        const double change = norm_of(difference(all, sum_of(settings, without(kRecords, record))));
        CHECK(change <= 0.8 * (1 + 1e-6));
        CHECK(change > 0.1);
      }
    }
}

TEST_CASE("a step without records has sum 0") {
  for (const std::int64_t of_features : feature_ranks())
    CHECK(norm_of(sum_of(private_configuration(kVariants[0].keys, kSequence), {}, of_features)) == 0);
}

TEST_CASE("a record that is not finite is left out, and the others are not changed") {
  for (const PrivateVariant& variant : kVariants)
    for (const std::string& unit : {std::string(kToken), std::string(kSequence)}) {
      CAPTURE(variant.keys);
      CAPTURE(unit);
      const Configuration settings = private_configuration(variant.keys, unit);
      PrivateSteps run(settings, testing::world().all());
      run.not_finite = 5;
      run.step(kRecords);
      CHECK(relative_error(run.gradients(), sum_of(settings, without(kRecords, 5))) < 1e-6);
    }
}

TEST_CASE("noise is that of one rank, drawn once per update, and steps give the parameters of one rank") {
  for (const std::int64_t of_features : feature_ranks())
    for (const PrivateVariant& variant : {kVariants[0], kVariants[4]}) {
      CAPTURE(variant.keys);
      CAPTURE(of_features);
      const privacy::Noise noise{.key = {9, 8, 7, 6, 5, 4, 3, 2}, .multiplier = 1.5, .expected = 4};
      const std::int64_t bands = variant.keys == kVariants[0].keys ? 1 : 3;
      const Configuration settings =
          private_configuration(variant.keys, std::string(kSequence) + ("bands = " + std::to_string(bands) + "\n"));
      const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
      PrivateSteps together(settings, testing::world().all(), of_features), single(settings, alone);
      for (PrivateSteps* run : {&together, &single}) {
        run->trainer.set_noise(noise);
        run->step({});
      }
      // No sums: the same bits; and the deviation that is accounted for, of 1,000 elements.
      const std::vector<double> first = together.gradients();
      CHECK(first == single.gradients());
      CHECK(norm_of(first) / std::sqrt(static_cast<double>(first.size())) ==
            doctest::Approx(1.5 * 0.8 / 4 / privacy::band_coefficients(bands)[0]).epsilon(0.1));
      for (PrivateSteps* run : {&together, &single}) {
        run->step(kRecords);
        run->step({1, 3});
      }
      CHECK(together.trainer.steps_done() == 3);
      CHECK(relative_error(together.gradients(), single.gradients()) < 1e-5);
      CHECK(relative_error(together.parameters(), single.parameters()) < 1e-6);
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
    CHECK(together.trainer.clip_bound() == single.trainer.clip_bound());
    CHECK(single.trainer.clip_bound() != settings.privacy.clip);
  }
}

TEST_CASE("records lie in one file each, and a step has room for more than are expected") {
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
  const Configuration settings = private_configuration(kVariants[0].keys, kSequence);
  CHECK(with_largest_batch(settings, 0, 1).data.batch_tokens == 4 * (6 + 25 + 24));
  CHECK(with_largest_batch(settings, 9, 1).data.batch_tokens == 4 * 9);
}

TEST_CASE("the plan is what a private trainer allocates") {
  for (const std::string& privacy : {std::string(kToken), std::string(kSequence),
                                     std::string("unit = \"sequence\"\nrecord_rows = 4\nbands = 3\n")}) {
    CAPTURE(privacy);
    const Configuration given = private_configuration(kVariants[7].keys, privacy),
                        settings = with_largest_batch(given, 0, testing::world().size());
    const Shape shape = shape_of(settings.transcoder, kPrivateLayers, kPrivateWidth);
    const parallel::GridShape grid = parallel::data_by_feature(testing::world().size(), 1);
    const std::int64_t before = device::memory_use().device_bytes;
    const PrivateSteps run(given, testing::world().all());
    const std::int64_t taken = device::memory_use().device_bytes - before;
    const std::vector<model::ParameterSpec> specs = parameter_specs(shape);
    const model::StateBytes state = model::state_bytes(specs, grid, testing::world().rank(), kernels::StorageType::fp32,
                                                       testing::execution().backend, Moments::held);
    const model::StepArena planned =
        measure_step(settings, shape, grid, 4 * kPrivateColumns, testing::execution().backend);
    // Of the normalisation, which no plan counts: 8 vectors. On several ranks a plan is of the largest one.
    const std::int64_t expected =
        planned.device_bytes() + state.total() + 8 * 4 * kPrivateColumns +
        privacy::CorrelatedNoise::bytes(specs, settings.privacy.bands, grid, testing::world().rank());
    CHECK(taken <= expected);
    if (testing::world().size() == 1) CHECK(taken == expected);
  }
}

}  // namespace weft::transcoder
