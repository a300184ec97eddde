// SPDX-License-Identifier: Apache-2.0
//
// Training steps: a text is learned, micro-batches do not change what is learned, a gradient that is not finite updates
// nothing, and the plan is what a trainer takes.
#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "input/read.hpp"
#include "kernels/optimize/loss_scale.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "language_model/step/language_trainer.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/model/registry_bits.hpp"

namespace weft::language_model {
namespace {

constexpr std::int64_t kVocabulary = 11;

/// `more`: keys of [optimizer], then other tables; `data`: keys of [data].
Configuration configuration(const std::string& more = "", const std::string& data = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\n" + data +
                  "[language_model]\nlayers = 2\nheads = 2\nd_model = 32\n"
                  "[optimizer]\nlearning_rate = 1e-2\nwarmup_steps = 5\n" +
                  more,
              "test.toml");
  return read;
}

/// The same in bf16 with four blocks, of which two multiply in 8 bits.
Configuration in_8_bits(const std::string& more = "", const std::string& data = "") {
  Configuration settings = configuration(more, data);
  settings.language_model.layers = 4;
  settings.precision = Precision::bf16;
  settings.fp8 = true;
  return settings;
}

/// A periodic text: easy to learn.
void fill(dataset::TokenBatch& batch, std::int64_t step) {
  batch.counted = 0;
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    const std::int64_t token = 3 * (row / batch.length) + step + row % batch.length;
    batch.ids[at] = static_cast<std::uint32_t>(token % kVocabulary);
    batch.targets[at] = static_cast<std::int32_t>((token + 1) % kVocabulary);
    batch.positions[at] = static_cast<std::int32_t>(row % batch.length);
    ++batch.counted;
  }
}

struct Run {
  explicit Run(const Configuration& settings)
      : grid(weft::testing::world(), single_process()),
        execution{device::planned_backend(device_settings(settings)), weft::testing::execution().stream},
        trainer(settings, {settings.language_model, kVocabulary, settings.data.sequence}, grid, execution) {
    trainer.initialise();
  }
  void step() {
    dataset::TokenBatch batch = trainer.next_batch();
    fill(batch, trainer.steps_done());
    trainer.step(batch);
  }
  std::vector<float> weights() const {
    const kernels::ParameterRows& rows = trainer.model().parameters().matrix(0);
    const device::Buffer<float> staged(rows.rows * rows.columns);
    kernels::weights_to_float(execution, rows, 0, staged.matrix(rows.rows, rows.columns));
    return weft::testing::to_host(staged.data(), staged.size());
  }
  parallel::Grid grid;
  const kernels::Execution execution;
  Trainer trainer;
};

}  // namespace

TEST_CASE("training lowers the loss, in every storage of the state and in every type of activations") {
  for (const char* more : {"", "state = \"bf16\"\n", "state = \"8bit\"\n", "[device]\nprecision = \"bf16\"\n",
                           "[device]\nprecision = \"fp16\"\n", "state = \"8bit\"\n[device]\nprecision = \"fp16\"\n",
                           "[memory]\nrecompute = \"block\"\n"}) {
    CAPTURE(more);
    Run run(configuration(more));
    run.step();
    CHECK(run.trainer.metrics().loss == doctest::Approx(std::log(11.0)).epsilon(0.03));
    for (int i = 1; i < 60; ++i) run.step();
    CHECK(run.trainer.metrics().loss < 0.2);
    CHECK(run.trainer.metrics().gradient_norm > 0);
  }
}

TEST_CASE("micro-batches change the parameters by rounding only, equal runs not at all") {
  Run one(configuration()), same(configuration());
  Configuration split = configuration();
  split.memory.micro_tokens = 64;  // 4 sequences, then 2
  Run micro(split);
  for (int i = 0; i < 10; ++i) {
    one.step();
    same.step();
    micro.step();
  }
  const std::vector<float> a = one.weights(), b = same.weights(), c = micro.weights();
  CHECK(std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(c[i])));
  // Adam divides by the root of the second moment, so that rounding of small gradients shows in the first steps.
  CHECK(largest < 1e-4);
  CHECK(micro.trainer.metrics().loss == doctest::Approx(one.trainer.metrics().loss).epsilon(1e-4));
}

TEST_CASE("sequences grow in stages, with as many tokens per step") {
  constexpr const char* kGrowth = "sequence_start = 4\nsequence_growth_steps = 20\n";
  const Configuration settings = configuration("", kGrowth);
  Configuration split = settings;
  split.memory.micro_tokens = 64;
  Run one(settings), same(settings), micro(split);
  for (std::int64_t step = 1; step <= 24; ++step) {
    CHECK(settings.data.length_at(step) == (step <= 10 ? 4 : step <= 20 ? 8 : 16));
    for (Run* run : {&one, &same, &micro}) {
      run->step();
      CHECK(run->trainer.length() == settings.data.length_at(step));
    }
  }
  CHECK(one.weights() == same.weights());
  CHECK(micro.trainer.metrics().loss == doctest::Approx(one.trainer.metrics().loss).epsilon(1e-3));
  CHECK(one.trainer.metrics().loss < 1.5);  // of log 11 = 2.4
}

TEST_CASE("a gradient that is not finite updates nothing") {
  Configuration settings = configuration();
  settings.run.nonfinite = run::NonFinite::skip;
  Run run(settings);
  run.step();
  const kernels::ParameterVector& norm =
      run.trainer.model().parameters().vector(run.trainer.model().parameters().index("final_norm/weight"));
  const float infinite = std::numeric_limits<float>::infinity();
  float before = 0;
  device::copy(weft::testing::execution(), &before, norm.weight.data, 4, device::Direction::to_host);
  device::copy(weft::testing::execution(), norm.weight.data, &infinite, 4, device::Direction::to_device);
  const std::vector<float> weights = run.weights();
  run.step();
  run.trainer.wait();
  CHECK(run.weights() == weights);
  CHECK(run.trainer.metrics().skipped_steps == 1);
  device::copy(weft::testing::execution(), norm.weight.data, &before, 4, device::Direction::to_device);
  run.step();
  CHECK(run.weights() != weights);
}

TEST_CASE("a gradient that is not finite ends the run with exit code 4") {
  Run run(configuration());
  const kernels::ParameterVector& norm =
      run.trainer.model().parameters().vector(run.trainer.model().parameters().index("final_norm/weight"));
  const float infinite = std::numeric_limits<float>::infinity();
  device::copy(weft::testing::execution(), norm.weight.data, &infinite, 4, device::Direction::to_device);
  try {
    run.step();
    run.trainer.wait();
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::numeric);
  }
}

TEST_CASE("an overflow of fp16 skips exactly one update, lowers the scale, and is no fault of the run") {
  Run run(configuration("[device]\nprecision = \"fp16\"\n"));
  const auto set_scale = [&](const kernels::LossScale& scale) {
    device::copy(weft::testing::execution(), run.trainer.registry().find("optimizer/loss_scale")->data, &scale,
                 sizeof scale, device::Direction::to_device);
  };
  for (int i = 0; i < 3; ++i) run.step();
  CHECK(run.trainer.metrics().loss_scale == 65536);
  const double loss = run.trainer.metrics().loss;
  // Gradients of the logits are at most 2^32 / 96 here: beyond 65504. The scale halves from the second overflow on.
  set_scale({.scale = 0x1p32});
  int skipped = 0;
  for (double before = 0x1p32;; ++skipped) {
    const std::vector<float> weights = run.weights();
    run.step();
    const Trainer::Metrics now = run.trainer.metrics();
    CHECK(now.skipped_steps == 0);
    CHECK(now.loss == doctest::Approx(loss).epsilon(0.3));
    if (run.weights() != weights) {
      CHECK(now.loss_scale == before);
      break;
    }
    CHECK(now.loss_scale == (skipped == 0 ? before : before / 2));
    before = now.loss_scale;
    REQUIRE(skipped < 30);
  }
  CHECK(skipped > 2);
  kernels::LossScale state;
  device::copy(weft::testing::execution(), &state, run.trainer.registry().find("optimizer/loss_scale")->data,
               sizeof state, device::Direction::to_host);
  kernels::fence(weft::testing::execution());
  CHECK(state.overflows == skipped);
  CHECK(run.trainer.steps_done() == 4 + skipped);
}

TEST_CASE("the scale of the loss changes neither the update nor the norm, but where fp16 underflows") {
  Run one(configuration("[device]\nprecision = \"fp16\"\n")), other(configuration("[device]\nprecision = \"fp16\"\n"));
  const kernels::LossScale smaller{.scale = 1024};
  device::copy(weft::testing::execution(), other.trainer.registry().find("optimizer/loss_scale")->data, &smaller,
               sizeof smaller, device::Direction::to_device);
  one.step();
  other.step();
  CHECK(other.trainer.metrics().loss == one.trainer.metrics().loss);
  // Gradients of single tokens are 1e-5 and more: 1024 times that is above 2^-14, so powers of two change no bit but
  // those of the smallest ones.
  CHECK(other.trainer.metrics().gradient_norm == doctest::Approx(one.trainer.metrics().gradient_norm).epsilon(1e-4));
}

TEST_CASE("steps in 8 bits learn what steps in bf16 learn, with every storage of the state") {
  for (const char* more : {"", "state = \"8bit\"\n", "[memory]\nrecompute = \"norm\"\n"}) {
    CAPTURE(more);
    Configuration without = in_8_bits(more);
    without.fp8 = false;
    Run bf16(without), fp8(in_8_bits(more));
    double sum = 0, sum_fp8 = 0;
    for (int i = 0; i < 60; ++i) {
      bf16.step();
      fp8.step();
      sum += bf16.trainer.metrics().loss;
      sum_fp8 += fp8.trainer.metrics().loss;
    }
    CHECK(sum_fp8 != sum);
    CHECK(sum_fp8 == doctest::Approx(sum).epsilon(0.03));
    CHECK(fp8.trainer.metrics().loss < 0.2);
  }
}

TEST_CASE("a run in 8 bits goes on from its registry with the same bits, also in micro-batches and in bf16") {
  for (const std::int64_t micro_tokens : {0, 48}) {
    CAPTURE(micro_tokens);
    Configuration settings = in_8_bits();
    settings.memory.micro_tokens = micro_tokens;
    Run whole(settings), resumed(settings);
    for (int i = 0; i < 3; ++i) whole.step();
    whole.trainer.wait();
    const auto saved = weft::testing::bits_of(whole.trainer.registry());
    REQUIRE(saved.contains("products/largest_magnitudes"));
    const auto load = [&](Run& run) {
      for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors()) {
        const std::vector<std::byte>& bytes = saved.at(tensor.name);
        if (tensor.scatter)
          tensor.scatter(tensor.held, bytes.data());
        else if (tensor.on_device)
          device::copy(weft::testing::execution(), tensor.data, bytes.data(), std::ssize(bytes),
                       device::Direction::to_device);
        else
          std::memcpy(tensor.data, bytes.data(), bytes.size());
      }
      kernels::fence(weft::testing::execution());
      run.trainer.resume_at(3);
    };
    resumed.step();  // another history
    load(resumed);
    for (int i = 0; i < 3; ++i) {
      whole.step();
      resumed.step();
      CHECK(resumed.trainer.metrics().loss == whole.trainer.metrics().loss);
    }
    CHECK(weft::testing::different_tensors(whole.trainer.registry(), resumed.trainer.registry()).empty());

    settings.fp8 = false;
    Run bf16(settings);
    load(bf16);
    bf16.step();
    CHECK(std::isfinite(bf16.trainer.metrics().loss));
  }
}

TEST_CASE("scales of a step in 8 bits are those of the step before it") {
  Run one(in_8_bits()), other(in_8_bits());
  for (Run* run : {&one, &other}) run->step();
  one.trainer.wait();
  const checkpoint::Tensor& largest = *other.trainer.registry().find("products/largest_magnitudes");
  std::vector<float> values = weft::testing::to_host(largest.data, largest.held.size());
  for (float& value : values) {
    CHECK(value > 0);
    value *= 64;  // codes keep less of the smallest values
  }
  device::copy(weft::testing::execution(), largest.data, values.data(), 4 * std::ssize(values),
               device::Direction::to_device);
  for (Run* run : {&one, &other}) run->step();
  // The losses of the second step have the other scales, those of the third one the weights as well.
  CHECK(one.trainer.metrics().loss != other.trainer.metrics().loss);
  CHECK(other.trainer.metrics().loss == doctest::Approx(one.trainer.metrics().loss).epsilon(0.02));
  const std::vector<float> after = weft::testing::to_host(largest.data, largest.held.size());
  for (std::size_t i = 0; i < after.size(); ++i) CHECK(after[i] < values[i] / 8);
}

TEST_CASE("an evaluation reads the weights as they are after the last update, in every type") {
  std::vector<std::uint16_t> ids;
  for (int i = 0; i < 33; ++i) ids.push_back(static_cast<std::uint16_t>(i * i % kVocabulary));
  const dataset::TokenSet text("text", ids, kVocabulary, 0);
  for (const Configuration& settings : {configuration(), configuration("[device]\nprecision = \"bf16\"\n"),
                                        configuration("[device]\nprecision = \"fp16\"\n"), in_8_bits()}) {
    Run run(settings);
    Trainer& trainer = run.trainer;
    for (int i = 0; i < 3; ++i) run.step();
    trainer.wait();
    const auto loss = [&] {
      return evaluate(text, 16, 32, trainer.transformer(), trainer.staging(), run.execution).loss;
    };
    const double first = loss();  // copies from the beginning of the last step would give another loss
    trainer.transformer().prepare_weights();
    CHECK(loss() == first);
  }
}

TEST_CASE("the plan is what a trainer allocates") {
  for (Configuration settings :
       {configuration(), configuration("[memory]\nrecompute = \"block\"\n"),
        configuration("[device]\nprecision = \"bf16\"\n"), configuration("[device]\nprecision = \"fp16\"\n"),
        in_8_bits(), in_8_bits("[memory]\nrecompute = \"norm\"\n"),
        configuration("", "sequence_start = 2\nsequence_growth_steps = 9\n")}) {
    settings.language_model.sparse_blocks = settings.data.sequence_start;
    const Plan planned = plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
    const device::MemoryUse before = device::memory_use();
    const Run run(settings);
    const device::MemoryUse after = device::memory_use();
    std::int64_t expected = planned.device_total();
    for (const auto& [name, bytes] : planned.device)
      if (name == "CUDA context and libraries") expected -= bytes;
    CHECK(after.device_bytes - before.device_bytes == expected);
  }
}

}  // namespace weft::language_model
