// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/plan.hpp"

#include "dataset/activations/describe.hpp"
#include "tests/test.hpp"
#include "transcoder/axes/row_gather.hpp"

namespace weft::transcoder {
namespace {

Plan plan_of(std::int64_t batch_tokens, std::int64_t features, const parallel::GridShape& grid,
             const optimizer::Settings& optimizer = {}, double k = 16) {
  Configuration configuration;
  configuration.data.batch_tokens = batch_tokens;
  configuration.data.layers = 12;
  configuration.data.d_model = 768;
  configuration.transcoder.features = features;
  configuration.transcoder.k = k;
  configuration.precision = Precision::bf16;
  configuration.optimizer = optimizer;
  return plan(configuration, dataset::imagined("activations", configuration.data), grid);
}

}  // namespace

TEST_CASE("blocks of layers cover all layers in order, none is empty, and none is longer than half of them and one") {
  for (std::int64_t n_layers = 1; n_layers <= 130; ++n_layers)
    for (std::int64_t n_blocks = 1; n_blocks <= n_layers; ++n_blocks) {
      CAPTURE(n_layers);
      CAPTURE(n_blocks);
      const std::vector<parallel::Range> blocks = layer_blocks(n_layers, n_blocks);
      REQUIRE(static_cast<std::int64_t>(blocks.size()) == n_blocks);
      std::int64_t end = 0;
      for (const parallel::Range& block : blocks) {
        REQUIRE(block.begin == end);
        REQUIRE(block.size() > 0);
        end = block.end;
      }
      REQUIRE(end == n_layers);
      if (n_blocks > 2)
        for (const parallel::Range& block : blocks) REQUIRE(block.size() <= n_layers / 2 + 1);
    }
  // The first and the last are short: what is exchanged with little to overlap with.
  const std::vector<parallel::Range> four = layer_blocks(12, 4);
  CHECK(four[1].begin == 1);
  CHECK(four[2].begin == 5);
  CHECK(four[3].begin == 10);
}

TEST_CASE("the feature axis sends least for small batches of a large model") {
  const Plan tokens = plan_of(4096, 32768, parallel::data_by_feature(1, 8)),
             weights = plan_of(4096, 32768, parallel::data_by_feature(8, 1));
  // bf16 rows of 12 * 768: 7/8 of the tokens out as partial sums, as many back as gradient rows, and the inputs.
  CHECK(tokens.feature_bytes_per_step == 3 * 3584 * 12 * 768 * 2);
  CHECK(tokens.data_bytes_per_step == 0);
  CHECK(tokens.quietest.size(parallel::kFeatureAxis) == 8);
  CHECK(grid_advice(tokens).empty());
  CHECK(weights.feature_bytes_per_step == 0);
  CHECK(weights.quietest.size(parallel::kFeatureAxis) == 8);
  CHECK(weights.quietest_bytes_per_step == tokens.feature_bytes_per_step);
  CHECK(grid_advice(weights).find("on 1 x 8 (data x feature) it would send") != std::string::npos);
}

TEST_CASE("the data axis sends least for huge batches of a small model with short lists") {
  const Plan tokens = plan_of(1 << 20, 64, parallel::data_by_feature(1, 8), {}, 1),
             weights = plan_of(1 << 20, 64, parallel::data_by_feature(8, 1), {}, 1);
  CHECK(tokens.quietest.size(parallel::kDataAxis) == 8);
  CHECK(grid_advice(tokens).find("consider parallel.data = 8") != std::string::npos);
  CHECK(grid_advice(weights).empty());
}

TEST_CASE("in between, a grid of both axes sends least") {
  const Plan both = plan_of(1 << 17, 8192, parallel::data_by_feature(2, 4));
  CHECK(both.feature_bytes_per_step > 0);
  CHECK(both.data_bytes_per_step > 0);
  std::int64_t least = 0;
  for (const std::int64_t data : {1, 2, 4, 8}) {
    const Plan other = plan_of(1 << 17, 8192, parallel::data_by_feature(data, 8 / data));
    const std::int64_t bytes = other.feature_bytes_per_step + other.data_bytes_per_step;
    least = data == 1 ? bytes : std::min(least, bytes);
  }
  CHECK(both.quietest_bytes_per_step == least);
  CHECK(both.quietest.size(parallel::kDataAxis) > 1);
  CHECK(both.quietest.size(parallel::kFeatureAxis) > 1);
}

TEST_CASE("the data axis moves inputs and gradient rows, lists and new weights") {
  optimizer::Settings narrow;
  narrow.state = kernels::StorageType::eight_bit;
  for (const std::int64_t features : {1024, 32768})
    for (const std::int64_t tokens : {4096, 16384}) {
      // k = 16 of a batch can all be on one rank.
      const std::int64_t width = 12 * 768, owned = features / 2, entries = 12 * 16 * tokens;
      const std::int64_t rows = 2 * (tokens / 2) * width * 2, lists = 8 * entries + 8 * (tokens / 2 + 1),
                         parameters = owned * (768 * 12 * 15 / 2);
      CHECK(plan_of(tokens, features, parallel::data_by_feature(2, 1)).data_bytes_per_step ==
            rows + lists + 4 * parameters + 4 * 12 * owned);
      CHECK(plan_of(tokens, features, parallel::data_by_feature(2, 1), narrow).data_bytes_per_step ==
            rows + lists + 2 * parameters + 4 * 12 * owned);
    }
}

TEST_CASE("a norm that is formed first sends nothing more") {
  optimizer::Settings clipped;
  clipped.clip_norm = 1;
  clipped.clip_mode = optimizer::ClipMode::exact;
  CHECK(plan_of(4096, 1024, parallel::data_by_feature(2, 1), clipped).data_bytes_per_step ==
        plan_of(4096, 1024, parallel::data_by_feature(2, 1)).data_bytes_per_step);
}

TEST_CASE("one rank sends nothing and needs no advice") {
  const Plan one = plan_of(4096, 1024, parallel::data_by_feature(1, 1));
  CHECK(one.quietest_bytes_per_step == 0);
  CHECK(grid_advice(one).empty());
}

TEST_CASE("a run that needs more memory than there is, is refused with sizes that fit") {
  Configuration configuration;
  configuration.data.batch_tokens = 4096;
  configuration.data.layers = 6;
  configuration.data.d_model = 384;
  configuration.transcoder.features = 1 << 20;
  const dataset::Description data = dataset::imagined("activations", configuration.data);
  for (const parallel::GridShape& grid : {parallel::data_by_feature(1, 1), parallel::data_by_feature(2, 2)}) {
    const auto refusal = [&](const Configuration& tried, std::int64_t available) {
      return lacks_host_memory(tried, data, grid, available, "test");
    };
    constexpr std::int64_t kGiB = std::int64_t{1} << 30;
    CHECK(refusal(configuration, 0) == "");  // not known
    CHECK(refusal(configuration, kGiB << 20) == "");
    const std::string text = refusal(configuration, 4 * kGiB);
    CHECK(text.find("of host memory (test) per rank, 4.00 GiB are available") != std::string::npos);
    const std::string name = "what fits: transcoder.features = ";
    REQUIRE(text.find(name) != std::string::npos);
    Configuration fits = configuration;
    fits.transcoder.features = std::stoll(text.substr(text.find(name) + name.size()));
    CHECK(fits.transcoder.features > 1000);
    CHECK(refusal(fits, 4 * kGiB) == "");
    ++fits.transcoder.features;
    // Ranks share the features: a few more may still fit.
    fits.transcoder.features += grid.ranks();
    CHECK(refusal(fits, 4 * kGiB) != "");
    // So little memory that only the sizes of the data are in the way.
    CHECK(refusal(configuration, 1000).find("neither fewer features nor a smaller batch") != std::string::npos);
  }
}

TEST_CASE("the plan names what makes the CUDA kernels of a transcoder slow") {
  using kernels::Scalar;
  Shape shape;
  shape.n_layers = 4;
  for (const std::int64_t d : {512, 768, 2560, 3584}) {
    shape.d_model = d;
    CHECK(slow_paths_text(shape, Scalar::bf16) == "");
  }
  shape.d_model = 770;
  CHECK(slow_paths_text(shape, Scalar::bf16)
            .find("decode, backward passes and updates: kernels without vectors, several times slower, because of 770 "
                  "columns") != std::string::npos);
}

}  // namespace weft::transcoder
