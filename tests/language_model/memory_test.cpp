// SPDX-License-Identifier: Apache-2.0
//
// Where the memory of a training step is: optimizer state and activations in host memory change no bit, a plan is what
// is allocated there and, on a GPU, what the driver shows, and steps after the first allocate nothing.
#include "device/memory.hpp"

#include <algorithm>
#include <set>
#include <string>

#include "base/error.hpp"
#include "input/read.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/step/language_trainer.hpp"
#include "tests/model/registry_bits.hpp"
#include "tests/test.hpp"

namespace weft::language_model {
namespace {

constexpr std::int64_t kVocabulary = 43;

/// The hand-written kernels of a GPU compute in bf16; on a processor bf16 takes the same path as fp32, slowly.
constexpr const char* kFast = kernels::kCudaBuild ? "[device]\nprecision = \"bf16\"\n" : "";

/// `more`: keys of [language_model], then other tables. Five blocks, of which three are swapped.
Configuration configuration(const std::string& more = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 200\n[data]\nbatch_tokens = 48\nsequence = 16\nmicro_tokens = 32\n"
              "[language_model]\nlayers = 5\nheads = 2\nd_model = 32\n" +
                  more,
              "test.toml");
  read.optimizer.learning_rate = 1e-2;
  read.optimizer.warmup_steps = 2;
  return read;
}

struct Run {
  explicit Run(const Configuration& settings)
      : execution{device::planned_backend(device_settings(settings)), testing::execution().stream},
        grid(testing::world(), single_process()),
        trainer(settings, {settings.language_model, kVocabulary, settings.data.sequence}, grid, execution) {
    trainer.initialise();
  }
  void step() {
    dataset::TokenBatch batch = trainer.next_batch();
    batch.counted = batch.rows();
    for (std::int64_t row = 0; row < batch.rows(); ++row) {
      const auto at = static_cast<std::size_t>(row);
      const std::int64_t token = row * row + 7 * trainer.steps_done();
      batch.ids[at] = static_cast<std::uint32_t>(token % kVocabulary);
      batch.targets[at] = static_cast<std::int32_t>((token + row) % kVocabulary);
      batch.positions[at] = static_cast<std::int32_t>(row % batch.length);
    }
    trainer.step(batch);
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
    trainer.wait();
  }
  const kernels::Execution execution;
  parallel::Grid grid;
  Trainer trainer;
};

/// On a GPU the third and fourth step are replayed.
constexpr int kSteps = kernels::kCudaBuild ? 4 : 2;

/// The tensors in which the states of two runs differ; both have made the same steps.
std::vector<std::string> differences(Run& a, Run& b) {
  CHECK(a.trainer.metrics().loss == b.trainer.metrics().loss);
  return testing::different_tensors(a.trainer.registry(), b.trainer.registry());
}

std::int64_t planned(const std::vector<std::pair<std::string, std::int64_t>>& rows, const std::string& name) {
  const auto at = std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return row.first == name; });
  return at == rows.end() ? 0 : at->second;
}

/// 65,536 tokens of sequences of 1,024 in one micro-batch, in bf16.
Configuration gpt2_small() {
  Configuration settings;
  settings.language_model.kv_heads = 12;
  settings.data.sequence = 1024;
  settings.data.batch_tokens = 65536;
  settings.precision = Precision::bf16;
  return settings;
}

}  // namespace

TEST_CASE("optimizer state in host memory: the same bits in every storage") {
  const std::set<std::string> types = {"", kFast};
  for (const kernels::StorageType state :
       {kernels::StorageType::fp32, kernels::StorageType::bf16, kernels::StorageType::eight_bit})
    for (const std::string& type : types) {
      CAPTURE(static_cast<int>(state));
      CAPTURE(type);
      Configuration settings = configuration(type);
      settings.optimizer.state = state;
      Run resident(settings);
      settings.memory.offload_optimizer = true;
      Run offloaded(settings);
      for (Run* run : {&resident, &offloaded}) run->steps(kSteps);
      CHECK(differences(resident, offloaded).empty());
    }
}

TEST_CASE("swapped activations: the same bits with every recomputation, and with dropout") {
  for (const std::string model :
       {"", "preset = \"llama\"\nkv_heads = 1\nqk_norm = \"head\"\nnorm_position = \"both\"\n",
        "dropout = 0.2\nattention_dropout = 0.1\nsparse_blocks = 1\n"}) {
    CAPTURE(model);
    Configuration settings = configuration(model + kFast);
    Run kept(settings);
    kept.steps(kSteps);
    settings.memory.swap_activations = true;
    for (const Recompute recompute : {Recompute::none, Recompute::activation, Recompute::norm, Recompute::block}) {
      CAPTURE(static_cast<int>(recompute));
      settings.memory.recompute = recompute;
      settings.memory.offload_optimizer = recompute == Recompute::block;  // both together
      Run swapped(settings);
      swapped.steps(kSteps);
      CHECK(differences(kept, swapped).empty());
    }
  }
}

TEST_CASE("the losses of a validation are those of kept activations, and training continues after it") {
  Configuration swapped = configuration();
  swapped.memory.swap_activations = true;
  Run first(configuration()), second(swapped);
  for (Run* run : {&first, &second}) {
    run->steps(1);
    run->trainer.transformer().prepare_weights();
    run->trainer.transformer().forward(run->trainer.staging().tokens(0, 2, 16), nullptr);
    run->steps(1);
  }
  CHECK(first.trainer.transformer().logits(5) == second.trainer.transformer().logits(5));
  CHECK(testing::different_tensors(first.trainer.registry(), second.trainer.registry()).empty());
}

TEST_CASE("the plan is what a trainer allocates, on the device and on the host") {
  for (const bool offload : {false, true})
    for (const bool swap : {false, true})
      for (const char* recompute : {"none", "block"}) {
        CAPTURE(offload);
        CAPTURE(swap);
        Configuration settings = configuration(std::string("[memory]\nrecompute = \"") + recompute + "\"\n");
        settings.memory.offload_optimizer = offload;
        settings.memory.swap_activations = swap;
        settings.checkpoint.staging = checkpoint::Staging::chunked;
        const Plan plan =
            language_model::plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
        const device::MemoryUse before = device::memory_use();
        const Run run(settings);
        const device::MemoryUse after = device::memory_use();
        CHECK(after.device_bytes - before.device_bytes ==
              plan.device_total() - planned(plan.device, "CUDA context and libraries"));
        CHECK(after.host_bytes - before.host_bytes == plan.host_total());
        CHECK((planned(plan.host, "optimizer state") > 0) == offload);
        CHECK((planned(plan.host, "swapped activations") > 0) == swap);
      }
}

TEST_CASE("what moves to the host is no longer on the device") {
  const auto plan_of = [](const Configuration& settings) {
    return plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
  };
  const Configuration resident = configuration();
  Configuration moved = resident;
  moved.memory.offload_optimizer = moved.memory.swap_activations = true;
  const Plan before = plan_of(resident), after = plan_of(moved);
  // fp32: two moments of 4 bytes. Those of vectors (norms and biases: 1 % of a usual model) stay.
  std::int64_t matrices = 0;
  for (const model::ParameterSpec& spec : parameter_specs(before.architecture))
    matrices += spec.is_matrix() ? spec.elements() : 0;
  CHECK(planned(before.device, "moments") - planned(after.device, "moments") == 8 * matrices);
  CHECK(planned(after.host, "optimizer state") == 8 * matrices);
  // Of five blocks two stay, of all others the same arrays are on the host.
  const std::int64_t of_a_block = planned(after.host, "swapped activations") / 3;
  CHECK(planned(before.device, "activations") - planned(after.device, "activations") == 3 * of_a_block);
  REQUIRE(after.swap);
  CHECK(after.swap->bytes == of_a_block);
  CHECK(to_text(after, moved).find("swapping: ") != std::string::npos);
}

TEST_CASE("activations per token: a block keeps 2 C bytes with full recomputation, in bf16") {
  Configuration settings = configuration("[device]\nprecision = \"bf16\"\n");
  const auto activations = [&](std::int64_t layers, std::size_t storage) {
    settings.language_model.layers = layers;
    const Plan all = plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
    return all.activations.at(storage).second;
  };
  const std::int64_t width = settings.language_model.d_model, tokens = settings.micro_tokens();
  CHECK(activations(6, 3) - activations(5, 3) == 2 * width * tokens);
  std::int64_t more = activations(5, 0);
  for (std::size_t storage = 1; storage < 4; ++storage) {
    CHECK(activations(5, storage) < more);
    more = activations(5, storage);
  }
  // The plan prints what each costs, and that of the input is what it counts.
  settings.language_model.layers = 5;
  for (const auto& [recompute, storage] : {std::pair{Recompute::none, 0u}, {Recompute::block, 3u}}) {
    settings.memory.recompute = recompute;
    const Plan one = plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
    CHECK(planned(one.device, "activations") == one.activations.at(storage).second);
    CHECK(to_text(one, settings).find("activations by memory.recompute: none ") != std::string::npos);
  }
}

TEST_CASE("no buffer of the own attention grows with the square of the sequence") {
  for (const kernels::Backend backend : {kernels::Backend::portable, kernels::Backend::cuda}) {
    const auto bytes = [&](std::int64_t sequence) {
      Configuration settings = gpt2_small();
      settings.data.sequence = sequence;
      settings.attention.implementation = kernels::AttentionImplementation::own;
      const Architecture architecture{settings.language_model, 50257, 8192};
      const model::StepArena step = measure_step(settings, architecture, single_process(), backend);
      std::int64_t sum = 0;
      for (const model::StepArena::Bytes& part : step.bytes()) sum += part.device;
      return sum;
    };
    // As many tokens in fewer sequences: the same arrays. A matrix of scores would be 64 times as large.
    CHECK(bytes(8192) == bytes(1024));
  }
}

TEST_CASE("the head takes the logits of a chunk, in the type of the activations") {
  Configuration settings = gpt2_small();
  settings.memory.head_chunk = 8192;
  const auto bytes = [&] { return planned(plan(settings, {settings.language_model, 50257, 1024}, 0).device, "head"); };
  CHECK(bytes() == std::int64_t{2} * 8192 * 50304);
  settings.precision = Precision::fp32;
  CHECK(bytes() == std::int64_t{4} * 8192 * 50304);
  // By default at most 256 MiB, in chunks of equal size: 25 of them, the last one 2,560 rows.
  settings.memory.head_chunk = 0;
  settings.precision = Precision::bf16;
  CHECK(bytes() == std::int64_t{2} * 2624 * 50304);
  settings.data.batch_tokens = 2048;
  CHECK(bytes() == std::int64_t{2} * 2048 * 50304);
}

TEST_CASE("8-bit moments take 2.03 bytes per parameter, those of embeddings included") {
  Configuration settings = gpt2_small();
  settings.optimizer.state = kernels::StorageType::eight_bit;
  const Plan all = plan(settings, {settings.language_model, 50257, 1024}, 0);
  CHECK(all.parameters == 124439808);
  const double each = static_cast<double>(planned(all.device, "moments")) / static_cast<double>(all.parameters);
  // Two codes and two scales per 256 elements; 8 bytes for each element of a vector, 0.1 % of them.
  CHECK(each >= 2 + 8.0 / 256);
  CHECK(each <= 2 + 8.0 / 256 + 0.008);
}

TEST_CASE("the plan compares the tokens of the run with 20 per parameter") {
  Configuration settings = gpt2_small();
  settings.run.steps = 1000;
  const Plan all = plan(settings, {settings.language_model, 50257, 1024}, 0);
  const std::string text = to_text(all, settings);
  CAPTURE(text);
  CHECK(text.find("65,536,000 in this run, 0.0263 of the 2,488,796,160") != std::string::npos);
}

TEST_CASE("swapping is refused where recomputation costs less time") {
  // GPT-2 small, 65,536 tokens: 1.6 GB of each block each way, 32 ms, against 1.4 ms (one H200).
  Configuration settings = gpt2_small();
  settings.memory.swap_activations = true;
  const auto plan_of = [&] { return plan(settings, {settings.language_model, 50257, settings.data.sequence}, 0); };
  const Plan small = plan_of();
  REQUIRE(small.swap);
  CHECK(static_cast<double>(small.swap->bytes) == doctest::Approx(1.6e9).epsilon(0.05));
  CHECK(small.swap->copy_seconds == doctest::Approx(32e-3).epsilon(0.05));
  CHECK(small.swap->forward_seconds == doctest::Approx(1.4e-3).epsilon(0.2));
  try {
    require_worthwhile_swapping(small);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    CHECK(std::string(error.what()).find("take memory.recompute = \"block\"") != std::string::npos);
  }
  // Nothing is left to recompute.
  settings.memory.recompute = Recompute::block;
  require_worthwhile_swapping(plan_of());
  // Products of a block grow with the square of the width, its activations with the width.
  settings.memory.recompute = Recompute::none;
  settings.language_model.d_model = 16384;
  settings.language_model.heads = settings.language_model.kv_heads = 128;
  settings.language_model.d_mlp = 4 * 16384;
  require_worthwhile_swapping(plan_of());
}

TEST_CASE("a run that does not fit is refused with the micro-batch that fits") {
  Configuration settings = configuration();
  settings.data.batch_tokens = settings.memory.micro_tokens = 64 * 16;
  const auto plan_of = [&] {
    return plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
  };
  settings.memory.micro_tokens = 20 * 16;
  const Plan fits = plan_of();
  const std::int64_t available = fits.device_total() + 100;
  require_memory(fits, settings, {.device = available});
  settings.memory.micro_tokens = 0;
  const auto message = [&](std::int64_t host, std::int64_t device) -> std::string {
    try {
      require_memory(plan_of(), settings, {host, "test", device});
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
    return "";
  };
  CHECK(message(0, available).find("of at most data.micro_tokens = 320 (1024 now)") != std::string::npos);
  CHECK(message(0, 1000).find("micro_tokens") == std::string::npos);  // the weights alone need more
  CHECK(message(1000, 0).find("host memory (test)") != std::string::npos);
  CHECK(message(0, 0).empty());
}

TEST_CASE("the micro-batch that is chosen is the largest divisor that fits") {
  Configuration settings = configuration();
  settings.data.batch_tokens = 60 * 16;
  settings.memory.micro_tokens = 0;
  const auto plan_of = [&](std::int64_t micro_tokens) {
    Configuration with = settings;
    with.memory.micro_tokens = micro_tokens;
    return plan(with, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
  };
  CHECK(largest_micro_tokens(settings, {}, plan_of) == 60 * 16);
  // 20 sequences fit, then 19: of their divisors 15 is the largest. Nothing fits 1000 bytes: one sequence.
  const std::int64_t bytes = plan_of(20 * 16).device_total();
  CHECK(largest_micro_tokens(settings, {.device = bytes}, plan_of) == 20 * 16);
  CHECK(largest_micro_tokens(settings, {.device = bytes - 1}, plan_of) == 15 * 16);
  CHECK(largest_micro_tokens(settings, {.device = 1000}, plan_of) == 16);
  // Without a GPU all of it is host memory.
  const std::int64_t host = plan_of(20 * 16).host_total() + (kernels::kCudaBuild ? 0 : bytes);
  CHECK(largest_micro_tokens(settings, {.host = host}, plan_of) == (kernels::kCudaBuild ? 60 : 20) * 16);
  settings.parallel.data = 4;  // 15 sequences of each rank
  CHECK(largest_micro_tokens(settings, {.device = plan_of(14 * 16).device_total()}, plan_of) == 5 * 16);
}

TEST_CASE("steps after the first allocate nothing") {
  for (const bool on_host : {false, true}) {
    CAPTURE(on_host);
    Configuration settings = configuration(kFast);
    settings.optimizer.state = kernels::StorageType::eight_bit;
    settings.memory.offload_optimizer = settings.memory.swap_activations = on_host;
    Run run(settings);
    run.steps(1);
    device::reset_peak();
    const device::MemoryUse first = device::memory_use();
    run.steps(1);  // recorded on a GPU: the driver then takes memory for the graph
    const std::int64_t driver = device::driver_bytes();
    run.steps(2);
    const device::MemoryUse last = device::memory_use();
    CHECK(last.device_peak_bytes == first.device_bytes);
    CHECK(last.host_peak_bytes == first.host_bytes);
    CHECK(device::driver_bytes() == driver);
  }
}

TEST_CASE("the driver shows what the plan counts, within 1 %" * doctest::skip(!kernels::kCudaBuild)) {
  Configuration settings = configuration("[device]\nprecision = \"bf16\"\n");
  // Context, libraries and kernels are loaded by smaller steps.
  Run(settings).steps(3);
  settings.language_model.layers = 6;
  settings.language_model.heads = settings.language_model.kv_heads = 8;
  settings.language_model.d_model = 1024;
  settings.language_model.d_mlp = 4096;
  settings.data.sequence = 1024;
  settings.data.batch_tokens = settings.memory.micro_tokens = 16384;
  const Plan plan = language_model::plan(settings, {settings.language_model, kVocabulary, settings.data.sequence}, 0);
  const std::int64_t before = device::driver_bytes();
  Run run(settings);
  run.steps(3);
  const auto shown = static_cast<double>(device::driver_bytes() - before),
             counted = static_cast<double>(plan.device_total() - planned(plan.device, "CUDA context and libraries"));
  CAPTURE(shown);
  CHECK(counted == doctest::Approx(shown).epsilon(0.01));
}

}  // namespace weft::language_model
