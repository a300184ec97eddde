// SPDX-License-Identifier: Apache-2.0
//
// parallel.shard: ranks that divide gradients and weights as well train as those that divide the state of the optimizer
// alone.
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "input/read.hpp"
#include "language_model/run/grid_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/language_model/private_run.hpp"
#include "tests/language_model/run_on_ranks.hpp"
#include "tests/model/registry_bits.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using parallel::Shard;

/// Six sequences: on four ranks two have one, the others two. micro: tokens of a micro-batch.
Configuration configuration(Shard shard, const std::string& model, const std::string& more, std::int64_t micro) {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\n"
              "[language_model]\nlayers = 3\nheads = 2\nd_model = 32\n" +
                  model + "[optimizer]\nlearning_rate = 1e-2\nwarmup_steps = 2\n" + more,
              "test.toml");
  read.memory.micro_tokens = micro;
  read.parallel.shard = shard;
  return read;
}

constexpr int kSteps = 10;
const std::vector<Shard> kShards = {Shard::state, Shard::gradients, Shard::full};

/// Bytes of the purpose in the plan of a run on this rank's device.
std::int64_t planned(const Plan& plan, const std::string& purpose) {
  std::int64_t sum = 0;
  for (const auto& [name, bytes] : plan.device)
    if (name == purpose) sum += bytes;
  return sum;
}

struct Case {
  const char *model, *more;
  std::int64_t micro;    // tokens of a micro-batch
  double tolerance = 0;  // of the loss, relative
  int tensor = 1;
};

}  // namespace

TEST_CASE("ranks that divide more of the model learn the same") {
  const parallel::Communicator& world = testing::world().all();
  // In one micro-batch the sums are the same. Several are added up in another order; an update of bf16 or 8-bit state,
  // or a copy of a weight in fp16, then rounds otherwise, now and then.
  for (const Case& one :
       {Case{"", "", 96}, Case{"", "", 16, 1e-6}, Case{"preset = \"llama\"\nqk_norm = \"head\"\n", "", 16, 1e-6, 2},
        Case{"preset = \"llama\"\n", "[lora]\nrank = 3\ntargets = [\"query\", \"value\", \"down\"]\n", 16, 1e-6},
        Case{"preset = \"llama\"\n", "[lora]\nrank = 4\nbase = \"nf4\"\n", 16, 1e-6, 2},
        Case{"", "[lora]\nrank = 2\nbase = \"int8\"\n", 96},
        Case{"tied = false\ntrain = [\"head\", \"block_1\"]\n", "", 16, 1e-6},
        Case{"train = [\"norms\"]\n", "", 16, 1e-6},
        Case{"tied = false\ndropout = 0.2\n", "state = \"8bit\"\n[memory]\nrecompute = \"block\"\n", 16, 1e-3},
        Case{"", "[device]\nprecision = \"bf16\"\n", 96}, Case{"", "[device]\nprecision = \"fp16\"\n", 96},
        Case{"preset = \"llama\"\ntied = false\n", "[device]\nprecision = \"fp16\"\n[memory]\nrecompute = \"block\"\n",
             16, 1e-4, 2},
        Case{"", "[lora]\nrank = 2\n[device]\nprecision = \"fp16\"\n", 96}}) {
    CAPTURE(std::string(one.model));
    CAPTURE(std::string(one.more));
    CAPTURE(one.micro);
    const int tensor = world.size() > 2 ? one.tensor : 1;
    const auto run_with = [&](Shard shard, std::int64_t gathered_blocks = 2) {
      Configuration settings = configuration(shard, one.model, one.more, one.micro);
      settings.parallel.gathered_blocks = gathered_blocks;
      return Run(settings, world, tensor);
    };
    Run state = run_with(Shard::state);
    Run gradients = run_with(Shard::gradients), full = run_with(Shard::full), again = run_with(Shard::full),
        once = run_with(Shard::full, 3);  // weights are gathered once per step
    for (int step = 0; step < kSteps; ++step) {
      for (Run* run : {&state, &gradients, &full, &again, &once}) run->step();
      const double expected = state.trainer.metrics().loss, loss = full.trainer.metrics().loss;
      if (one.tolerance == 0)
        CHECK(loss == expected);
      else
        CHECK(loss == doctest::Approx(expected).epsilon(one.tolerance));
      // Which ranks keep the weights, and how often they are gathered, changes no sum.
      CHECK(loss == gradients.trainer.metrics().loss);
      CHECK(loss == once.trainer.metrics().loss);
      CHECK(loss == again.trainer.metrics().loss);
    }
    CHECK(testing::different_tensors(full.trainer.registry(), again.trainer.registry()).empty());
  }
}

TEST_CASE("ranks that divide the clipped sums, with different numbers of records, have those of one rank") {
  const std::vector<std::int64_t> examples = {0, 1, 4, 7, 8, 11, 12};
  for (const std::string mode : {"two_pass", "book_keeping", "materialise"})
    for (const std::string model :
         {"", "preset = \"llama\"\ntied = false\n", "bias = false\n", "preset = \"llama\"\nkv_heads = 1\n"}) {
      CAPTURE(mode);
      CAPTURE(model);
      const std::string lora = model.find("kv_heads") != std::string::npos ? "[lora]\nrank = 2\nbase = \"int8\"\n" : "";
      Configuration settings = testing::private_configuration("heads = 2\n" + model, "mode = \"" + mode + "\"\n", lora);
      settings.language_model.layers = 3;
      settings.memory.micro_tokens = 32;
      if (!settings.language_model.bias && lora.empty() && model.find("llama") == std::string::npos)
        settings.language_model.train = {"block_1"};
      const auto sums = [&](Shard shard) {
        settings.parallel.shard = shard;
        testing::PrivateRun run(settings, testing::world().all());
        // The last rank has none.
        const parallel::Communicator& ranks = testing::world().all();
        const std::int64_t workers = std::max(1, ranks.size() - 1);
        run.step(examples, ranks.rank() < workers ? parallel::part(std::ssize(examples), workers, ranks.rank())
                                                  : parallel::Range{});
        return run.gradients();
      };
      const std::vector<float> expected = sums(Shard::state);
      // An element of a stored gradient rounds to 8 bits.
      for (const Shard shard : {Shard::gradients, Shard::full})
        CHECK(testing::relative_error(sums(shard), expected) < (mode == "materialise" ? 1e-3 : 1e-6));
    }
}

TEST_CASE("a checkpoint resumes on any grid with any parallel.shard") {
  const parallel::Communicator& world = testing::world().all();
  const auto on_ranks = [&](int n, const auto& work) {
    const parallel::Communicator ranks = world.split(world.rank() < n ? 0 : 1, world.rank());
    if (world.rank() < n) work(ranks);
    world.barrier();
  };
  for (const char* const more : {"", "state = \"8bit\"\n", "[device]\nprecision = \"fp16\"\n"})
    for (const Shard written : kShards) {
      if (*more != '\0' && written != Shard::full) continue;
      const testing::Scratch scratch;
      double expected = 0;
      on_ranks(world.size(), [&](const parallel::Communicator& ranks) {
        Run run(configuration(written, "", more, 16), ranks);
        for (int step = 0; step < 3; ++step) run.step();
        run.trainer.wait();
        checkpoint::Writer writer(ranks, scratch.path, {}, run.trainer.registry(), testing::execution());
        REQUIRE(writer.start(checkpoint::testing::manifest_of(1)));
        REQUIRE(writer.finish()->durable);
        run.step();
        expected = run.trainer.metrics().loss;
      });
      for (const int n : {1, world.size()})
        for (const Shard shard : kShards) {
          if (n == 1 && shard != Shard::full) continue;  // one rank divides nothing
          CAPTURE(n);
          on_ranks(n, [&](const parallel::Communicator& ranks) {
            Run run(configuration(shard, "", more, 16), ranks);
            const auto found = checkpoint::find(ranks, scratch.path, "auto", checkpoint::Verify::size);
            REQUIRE(found);
            checkpoint::load(ranks, *found, run.trainer.registry(), testing::execution());
            run.trainer.resume_at(3);
            run.step();
            const double loss = run.trainer.metrics().loss;
            if (n == world.size())
              CHECK(loss == expected);  // the loss is that before the update
            else
              CHECK(loss == doctest::Approx(expected).epsilon(1e-6));
          });
        }
    }
}

TEST_CASE("memory and messages are those of the plan, and weights and gradients fall with the number of ranks") {
  const parallel::Communicator& world = testing::world().all();
  for (const Shard shard : kShards)
    for (const std::int64_t blocks : {std::int64_t{2}, std::int64_t{3}})
      for (const std::string kind : {"tied", "", "fp16"}) {
        if (shard != Shard::full && (blocks > 2 || !kind.empty())) continue;
        CAPTURE(kind);
        Configuration settings = configuration(shard, "", kind == "fp16" ? "[device]\nprecision = \"fp16\"\n" : "", 16);
        settings.language_model.tied = kind == "tied";
        settings.parallel.gathered_blocks = blocks;
        settings.checkpoint.staging = checkpoint::Staging::chunked;
        const std::int64_t before = device::memory_use().device_bytes;
        Run run(settings, world);
        std::int64_t taken = device::memory_use().device_bytes - before;
        const Architecture architecture{run.settings.language_model, kVocabulary, run.settings.data.sequence};
        const Plan plan = language_model::plan(run.settings, architecture, 0);
        world.maximum({&taken, 1});
        const std::int64_t expected = plan.device_total() - planned(plan, "CUDA context and libraries");
        CHECK(taken <= expected);
        CHECK(static_cast<double>(taken) >= 0.97 * static_cast<double>(expected));
        for (int step = 0; step < 2; ++step) run.step();  // the second sends the weights of the first
        run.trainer.wait();
        std::int64_t sent = run.trainer.step_bytes_sent();
        world.maximum({&sent, 1});
        CHECK(static_cast<double>(sent) ==
              doctest::Approx(static_cast<double>(bytes_sent(run.settings, architecture))).epsilon(0.03));
      }
  Configuration large = configuration(Shard::full, "", "", 16);
  large.language_model.layers = 12;
  const auto plan_on = [&](std::int64_t ranks, Shard shard) {
    Configuration settings = large;
    settings.parallel.shard = shard;
    settings.parallel.data = ranks;
    return plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
  };
  const Plan one = plan_on(1, Shard::full), four = plan_on(4, Shard::full), state = plan_on(4, Shard::state);
  const auto quarter = [](std::int64_t bytes) { return doctest::Approx(static_cast<double>(bytes) / 4).epsilon(0.1); };
  CHECK(static_cast<double>(planned(four, "weights")) == quarter(planned(one, "weights")));
  CHECK(planned(four, "moments") == planned(state, "moments"));
  // More than a quarter of the gradients, 4 bytes each; the workspace of products stays.
  CHECK(planned(state, "gradients") - planned(four, "gradients") >
        model::trained_elements_of(parameter_specs({large.language_model, kVocabulary, large.data.sequence})));
  CHECK(to_text(four, large).find("weights: gathered") == std::string::npos);  // on one rank
}

TEST_CASE("ranks with divided weights evaluate as ranks with whole ones") {
  const parallel::Communicator& world = testing::world().all();
  std::vector<std::uint32_t> ids(16 * 21 + 6);  // batches are not a multiple of the ranks
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i * i % kVocabulary);
  const dataset::TokenSet text("text", std::move(ids), kVocabulary, 1000);
  std::vector<double> losses[2];
  for (const bool full : {false, true}) {
    Run run(configuration(full ? Shard::full : Shard::gradients, "", "", 16), world);
    for (int step = 0; step < 2; ++step) {
      run.step();
      losses[full].push_back(
          evaluate(text, 16, 16, run.trainer.transformer(), run.trainer.staging(), testing::execution(), &world).loss);
    }
  }
  CHECK(losses[0] == losses[1]);
}

}  // namespace weft::language_model
