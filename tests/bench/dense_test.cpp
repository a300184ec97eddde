// SPDX-License-Identifier: Apache-2.0
//
// The dense baseline of `weft benchmark` computes the same training: dense and sparse step give the same loss and
// parameters.
#include "bench/transcoder/dense.hpp"

#include <cmath>

#include "bench/transcoder/resident_batches.hpp"
#include "tests/test.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {
namespace {

Configuration configuration() {
  Configuration c;
  c.run.steps = 4;
  c.data.batch_tokens = 45;
  c.transcoder.features = 70;
  c.transcoder.k = 3;
  c.optimizer.learning_rate = 3e-3;
  c.optimizer.schedule = optimizer::Schedule::constant;
  c.optimizer.weight_decay = 0.1;
  return c;
}

constexpr Shape kShape{3, 20, 70};

}  // namespace

TEST_CASE("four steps of the dense formulation are four steps of the sparse one") {
  const Configuration c = configuration();
  const parallel::Grid grid(testing::world(), parallel::data_by_feature(1, 1));
  bench::ResidentBatches batches(kShape, c.data.batch_tokens, 2, 1.0, 7, grid, testing::execution(), 2);
  const dataset::Normalisation normalisation = batches.normalisation();
  Trainer sparse(c, kShape, normalisation, batches.statistics(), grid, testing::execution(), 0,
                 [](const dataset::RawBatch&, std::int64_t) { return std::string(); });
  bench::DenseTrainer dense(c, kShape, normalisation, batches.statistics(), grid, testing::execution());
  sparse.initialise();
  dense.initialise();
  for (int i = 0; i < 4; ++i) {
    const dataset::RawBatch& batch = batches.next();
    sparse.step(batch);
    dense.step(batch);
    // fp32 sums in another order: what is promised between grids.
    CHECK(dense.loss() == doctest::Approx(sparse.metrics().loss).epsilon(1e-5));
    CHECK(dense.selection().statistics().entries == sparse.forward().selection().statistics().entries);
  }
  std::size_t compared = 0;
  for (const checkpoint::Tensor& expected : sparse.registry().tensors()) {
    if (expected.type != kernels::Scalar::fp32) continue;
    for (const checkpoint::Tensor& tensor : dense.registry().tensors()) {
      if (tensor.name != expected.name) continue;
      CAPTURE(tensor.name);
      const std::int64_t n = expected.shape[0] * expected.row_bytes() / 4;
      const float *a = static_cast<const float*>(tensor.data), *b = static_cast<const float*>(expected.data);
      double difference = 0, norm = 0;
      for (std::int64_t j = 0; j < n; ++j) {
        const double delta = static_cast<double>(a[j]) - static_cast<double>(b[j]);
        difference += delta * delta;
        norm += static_cast<double>(b[j]) * static_cast<double>(b[j]);
      }
      // As between the fp32 step and its float64 reference.
      CHECK(std::sqrt(difference / norm) <= 1e-5);
      ++compared;
    }
  }
  CHECK(compared == 3 * (3 * 3 + 1));  // w, m, v of encoder, its bias and decoder of three layers, and the decoder bias
}

TEST_CASE("resident rows do not depend on their batch") {
  const parallel::Grid grid(testing::world(), parallel::data_by_feature(1, 1));
  bench::ResidentBatches whole(kShape, 40, 1, 1.0, 7, grid, testing::execution(), 2),
      halves(kShape, 20, 2, 1.0, 7, grid, testing::execution(), 2);
  const dataset::RawBatch& all = whole.next();
  halves.next();
  const dataset::RawBatch& second = halves.next();
  const std::int64_t width = kShape.width();
  for (std::int64_t i = 0; i < 20 * width; ++i)
    REQUIRE(static_cast<const float*>(all.targets.data)[20 * width + i] ==
            static_cast<const float*>(second.targets.data)[i]);
}

TEST_CASE("the dense formulation refuses settings that it does not support") {
  Configuration c = configuration();
  c.precision = Precision::bf16;
  const parallel::Grid grid(testing::world(), parallel::data_by_feature(1, 1));
  bench::ResidentBatches batches(kShape, 45, 1, 1.0, 7, grid, testing::execution(), 2);
  CHECK_THROWS_AS(
      bench::DenseTrainer(c, kShape, batches.normalisation(), batches.statistics(), grid, testing::execution()), Error);
}

TEST_CASE("the work of a dense step, by hand for two layers") {
  StepSizes sizes;
  sizes.shape = {2, 10, 30};
  sizes.n_features = 30;
  sizes.group_tokens = sizes.own_tokens = 5;
  sizes.entries = 7;
  // Encoder 2 * 30 * 10 = 600 parameters, decoder 30 * 10 * 3 = 900.
  CHECK(bench::dense_work_of("decode", sizes).flops == 2 * 5 * 900);
  CHECK(bench::dense_work_of("decoder backward", sizes).flops == 2 * (2 * 5 * 900));
  CHECK(bench::dense_work_of("encoder backward", sizes).flops == 2 * 5 * 600);
  // w, m, v and a gradient.
  CHECK(bench::dense_work_of("optimizer", sizes).bytes == 1500 * 28);
}

}  // namespace weft::transcoder
