// SPDX-License-Identifier: Apache-2.0
//
// parallel.shard: ranks that divide gradients and weights as well train as those that divide the state of the optimizer
// alone.
#include <string>

#include "checkpoint/checkpoint_writer.hpp"
#include "input/read.hpp"
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

struct Case {
  const char *model, *more;
  double tolerance;  // of the loss, relative, with several micro-batches
};

}  // namespace

TEST_CASE("ranks that divide more of the model learn the same") {
  const parallel::Communicator& world = testing::world().all();
  // In one micro-batch the sums are the same. Several are added up in another order; an update of bf16 or 8-bit state
  // then rounds otherwise, now and then.
  for (const Case& one : {Case{"", "", 1e-6}, Case{"preset = \"llama\"\nkv_heads = 1\nqk_norm = \"head\"\n", "", 1e-6},
                          Case{"dropout = 0.2\n", "[memory]\nrecompute = \"block\"\n", 1e-6},
                          Case{"preset = \"llama\"\n", "[lora]\nrank = 3\ntargets = [\"query\", \"value\", \"down\"]\n", 1e-6},
                          Case{"", "state = \"8bit\"\n", 1e-3}, Case{"", "[device]\nprecision = \"bf16\"\n", 1e-3}})
    for (const std::int64_t micro : {std::int64_t{96}, std::int64_t{16}}) {
      CAPTURE(std::string(one.model));
      CAPTURE(std::string(one.more));
      CAPTURE(micro);
      const auto run_with = [&](Shard shard) { return Run(configuration(shard, one.model, one.more, micro), world); };
      Run state = run_with(Shard::state);
      Run gradients = run_with(Shard::gradients), full = run_with(Shard::full), again = run_with(Shard::full);
      for (int step = 0; step < kSteps; ++step) {
        for (Run* run : {&state, &gradients, &full, &again}) run->step();
        const double expected = state.trainer.metrics().loss;
        for (Run* run : {&gradients, &full}) {
          const double loss = run->trainer.metrics().loss;
          if (micro == 96)
            CHECK(loss == expected);
          else
            CHECK(loss == doctest::Approx(expected).epsilon(one.tolerance));
        }
        // Which ranks hold the weights changes no sum.
        CHECK(full.trainer.metrics().loss == gradients.trainer.metrics().loss);
        CHECK(full.trainer.metrics().loss == again.trainer.metrics().loss);
      }
      CHECK(testing::different_tensors(full.trainer.registry(), again.trainer.registry()).empty());
    }
}

TEST_CASE("ranks that divide the clipped sums, with different numbers of records, have those of one rank") {
  const std::vector<std::int64_t> examples = {0, 1, 4, 7, 8, 11, 12};
  for (const std::string mode : {"two_pass", "book_keeping", "materialise"})
    for (const std::string model : {"", "preset = \"llama\"\ntied = false\n"}) {
      CAPTURE(mode);
      Configuration settings = testing::private_configuration("heads = 2\n" + model, "mode = \"" + mode + "\"\n");
      settings.language_model.layers = 3;
      settings.memory.micro_tokens = 32;
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

}  // namespace weft::language_model
