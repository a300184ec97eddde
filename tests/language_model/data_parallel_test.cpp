// SPDX-License-Identifier: Apache-2.0
//
// Language models on several ranks of the data axis train as on one: the same losses and norms to the rounding of sums,
// the same bits when repeated, the same decision to withhold a step.
#include <cmath>
#include <string>

#include "input/read.hpp"
#include "kernels/optimize/loss_scale.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "tests/language_model/run_on_ranks.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/model/registry_bits.hpp"

namespace weft::language_model {
namespace {

constexpr int kSteps = 6;

/// Six sequences, not a multiple of four ranks. `model`: further keys of [language_model]; `more`: of [optimizer], then
/// other tables.
Configuration configuration(const std::string& model, const std::string& more) {
  Configuration read;
  const input::Schema keys = schema(read);
  const std::string layers = more.find("fp8") == std::string::npos ? "layers = 2\n" : "layers = 4\n";
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\nmicro_tokens = 16\n"
              "[language_model]\nheads = 2\nd_model = 32\n" +
                  layers + model + "[optimizer]\nlearning_rate = 1e-2\nwarmup_steps = 2\n" + more,
              "test.toml");
  return read;
}

struct Case {
  const char *model, *more;
  double tolerance;  // of the loss, relative
};

}  // namespace

TEST_CASE("several ranks learn what one learns") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  // fp32: sums of other order. bf16 and 8-bit state: an update that rounds otherwise, now and then.
  for (const Case& one :
       {Case{"", "", 1e-6}, Case{"preset = \"llama\"\nkv_heads = 1\nqk_norm = \"head\"\n", "", 1e-6},
        Case{"dropout = 0.2\n", "clip_norm = 0.1\n", 1e-6}, Case{"tied = false\n", "tuning = \"plateau\"\n", 1e-6},
        Case{"", "[lora]\nrank = 4\ndropout = 0.2\n", 1e-6}, Case{"", "[lora]\nrank = 4\nbase = \"nf4\"\n", 1e-6},
        Case{"preset = \"llama\"\n", "[lora]\nrank = 3\ntargets = [\"query\", \"value\", \"down\"]\n", 1e-6},
        Case{"", "[memory]\nrecompute = \"block\"\n", 1e-6}, Case{"", "state = \"bf16\"\n", 1e-3},
        Case{"", "state = \"8bit\"\n", 1e-3}, Case{"", "[device]\nprecision = \"bf16\"\n", 1e-3},
        Case{"", "[device]\nprecision = \"bf16\"\nfp8 = true\n", 5e-3},
        Case{"", "[device]\nprecision = \"bf16\"\nfp8 = true\n[parallel]\nshard = \"gradients\"\n", 5e-3}}) {
    CAPTURE(one.model);
    CAPTURE(one.more);
    const Configuration settings = configuration(one.model, one.more);
    Run together(settings, world), again(settings, world), single(settings, alone);
    for (int step = 0; step < kSteps; ++step) {
      for (Run* run : {&together, &again, &single}) run->step();
      const Trainer::Metrics of_all = together.trainer.metrics(), of_one = single.trainer.metrics();
      CHECK(of_all.loss == doctest::Approx(of_one.loss).epsilon(one.tolerance));
      CHECK(of_all.gradient_norm == doctest::Approx(of_one.gradient_norm).epsilon(10 * one.tolerance));
      CHECK(of_all.loss == again.trainer.metrics().loss);
    }
    CHECK(testing::different_tensors(together.trainer.registry(), again.trainer.registry()).empty());
  }
}

TEST_CASE("exchanges that overlap with the computation give the same bits") {
  const parallel::Communicator& world = testing::world().all();
  for (const char* const more :
       {"", "[lora]\nrank = 4\n", "[memory]\nrecompute = \"block\"\n", "[device]\nprecision = \"bf16\"\n"}) {
    CAPTURE(more);
    Configuration settings = configuration("", more);
    settings.parallel.overlap = true;
    Run with(settings, world);
    settings.parallel.overlap = false;
    Run without(settings, world);
    for (int step = 0; step < kSteps; ++step) {
      for (Run* run : {&with, &without}) run->step();
      CHECK(with.trainer.metrics().loss == without.trainer.metrics().loss);
      CHECK(with.trainer.metrics().gradient_norm == without.trainer.metrics().gradient_norm);
    }
    for (Run* run : {&with, &without}) run->trainer.transformer().complete_weights();
    CHECK(testing::different_tensors(with.trainer.registry(), without.trainer.registry()).empty());
  }
}

TEST_CASE("between steps every rank computes with the weights of the last one, and ranks divide an evaluation") {
  const parallel::Communicator& world = testing::world().all();
  Run run(configuration("", ""), world);
  std::vector<std::uint32_t> ids(16 * 21 + 6);  // the last batch and the last window are short
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i * i % kVocabulary);
  const dataset::TokenSet text("text", std::move(ids), kVocabulary, 1000);
  const auto measure = [&](const parallel::Communicator* ranks) {
    return evaluate(text, 16, 16, run.trainer.transformer(), run.trainer.staging(), testing::execution(), ranks);
  };
  double last = measure(&world).loss;
  for (int step = 0; step < 3; ++step) {
    run.step();
    const EvaluationResult divided = measure(&world);
    CHECK(divided.loss != last);
    last = divided.loss;
    // Of the whole text on each rank: equal bits only if all ranks have the same weights, and sums the same order.
    const EvaluationResult alone = measure(nullptr);
    CHECK(divided.loss == alone.loss);
    CHECK(divided.tokens == alone.tokens);
    CHECK(divided.tokens == text.size() - 1);
    CHECK(divided.bits_per_byte == alone.bits_per_byte);
    std::vector<double> of_rank(static_cast<std::size_t>(world.size()));
    world.all_gather(&alone.loss, of_rank.data(), sizeof alone.loss);
    for (const double loss : of_rank) CHECK(loss == divided.loss);
  }
}

TEST_CASE("text that is generated between steps is that of the last weights") {
  // Its steps are replayed and contain no wait for the weights of other ranks.
  const parallel::Communicator& world = testing::world().all();
  std::vector<std::uint32_t> tokens[2];
  for (const bool overlap : {true, false}) {
    Configuration settings = configuration("", "");
    settings.parallel.overlap = overlap;
    Run run(settings, world);
    const GenerationSettings of_text{
        .architecture = {settings.language_model, kVocabulary, settings.data.sequence}, .rows = 2, .new_tokens = 12};
    model::StepArena arena(testing::execution(), run.grid);
    run::Timers timers;
    Generator generator(of_text, run.trainer.transformer(), testing::execution(), timers, arena);
    const std::uint32_t prompt = 5;
    const std::vector<GenerationRequest> requests = {{.prompt = {&prompt, 1}}, {.prompt = {&prompt, 1}, .sample = 1}};
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      run.step();
      generator.run(requests, 1, step, [&](std::size_t, const kernels::Drawn& drawn) {
        tokens[overlap].push_back(drawn.token);
        return true;
      });
    }
  }
  CHECK(tokens[0] == tokens[1]);
}

TEST_CASE("a step has room for the losses of a batch that is larger than every matrix") {
  const parallel::Communicator& world = testing::world().all();
  Configuration settings = configuration("", "");
  settings.data.batch_tokens = 6144;  // the largest matrix has 4096 elements
  settings.memory.micro_tokens = 1536;
  Run run(settings, world);
  run.step();
  CHECK(std::isfinite(run.trainer.metrics().loss));
}

TEST_CASE("an overflow on one rank withholds the step on all") {
  const parallel::Communicator& world = testing::world().all();
  Run run(configuration("", "[device]\nprecision = \"fp16\"\n"), world);
  run.step();
  run.trainer.transformer().complete_weights();  // those of the other ranks arrive
  const auto before = testing::bits_of(run.trainer.registry());
  // A scale at which every gradient overflows.
  for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors())
    if (tensor.name == "optimizer/loss_scale") {
      kernels::LossScale scale;
      scale.scale = 1e30;
      device::copy(testing::execution(), tensor.data, &scale, sizeof scale, device::Direction::to_device);
    }
  run.step();
  run.trainer.wait();
  const auto after = testing::bits_of(run.trainer.registry());
  for (const char* name : {"embedding/tokens", "embedding/tokens.first_moment", "final_norm/weight"})
    CHECK(before.at(name) == after.at(name));
}

}  // namespace weft::language_model
