// SPDX-License-Identifier: Apache-2.0
//
// Language models divided over the tensor axis train as on one rank: on every grid the same losses and norms to the
// rounding of sums, the same bits when repeated, equal bits of what several ranks hold, and state that any other grid
// can take over. They write the same texts and give the same rows to a transcoder.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "dataset/activations/reader.hpp"
#include "input/read.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/grid_plan.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "language_model/run/text_rows.hpp"
#include "tests/language_model/run_on_ranks.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/model/registry_bits.hpp"

namespace weft::language_model {
namespace {

/// Five heads unless `model` says otherwise: two ranks have 2 and 3, four have 1, 1, 1 and 2. `model`: further keys of
/// [language_model]; `more`: of [optimizer], then other tables.
Configuration configuration(const std::string& model, const std::string& more) {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\n"
              "[language_model]\nlayers = 2\n" +
                  std::string(model.find("heads") == model.npos ? "heads = 5\nd_model = 40\n" : "d_model = 64\n") +
                  model + "[optimizer]\nlearning_rate = 2e-3\nwarmup_steps = 2\n" + more,
              "test.toml");
  return read;
}

/// The numbers of ranks of the tensor axis that this job can have.
std::vector<std::int64_t> tensor_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size <= testing::world().size(); ++size)
    if (testing::world().size() % size == 0) sizes.push_back(size);
  return sizes;
}

struct Case {
  const char *model, *more;
  double tolerance;  // of the loss, relative
  int steps = 3;
  std::int64_t micro_tokens = 0;
};

}  // namespace

TEST_CASE("every grid learns what one rank learns, with the same bits when repeated") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  // fp32: sums of other order. Rounded activations and state: an update that rounds otherwise, now and then.
  for (const Case& one :
       {Case{"", "", 1e-6, 10}, Case{"preset = \"llama\"\nqk_norm = \"head\"\n", "clip_norm = 0.1\n", 1e-6},
        Case{"preset = \"llama\"\nheads = 8\nkv_heads = 4\nnorm_position = \"both\"\nlogit_softcap = 8.0\n", "", 1e-6},
        Case{"qk_norm = \"scaled\"\ntied = false\nmlp = \"relu2\"\nnorm_position = \"post\"\n", "", 1e-6},
        Case{"dropout = 0.2\nattention_dropout = 0.1\n", "", 1e-6},
        Case{"position = \"rope\"\nrope_columns = 4\nresidual = \"parallel\"\nmlp = \"gelu_exact\"\n", "", 1e-6},
        Case{"preset = \"llama\"\nbiases = [\"query\", \"key\", \"value\", \"down\"]\nwindow = 8\nfull_every = 2\n"
             "rope_window_base = 100.0\nunrotated_every = 2\n",
             "", 1e-6},
        Case{"", "[memory]\nrecompute = \"block\"\nhead_chunk = 27\n", 1e-6, 3, 32},
        Case{"", "[lora]\nrank = 16\nalpha = 64\n", 1e-6},
        Case{"preset = \"llama\"\n", "[lora]\nrank = 3\ntargets = [\"query\", \"value\", \"down\"]\n", 1e-6},
        Case{"preset = \"llama\"\n", "[lora]\nrank = 3\nbase = \"nf4\"\n", 1e-6}, Case{"", "state = \"bf16\"\n", 1e-3},
        Case{"", "state = \"8bit\"\n", 1e-3}, Case{"", "[device]\nprecision = \"bf16\"\n", 1e-3},
        Case{"preset = \"llama\"\n", "[device]\nprecision = \"fp16\"\n", 1e-3}}) {
    CAPTURE(std::string(one.model));
    CAPTURE(std::string(one.more));
    Configuration settings = configuration(one.model, one.more);
    settings.memory.micro_tokens = one.micro_tokens;
    Run single(settings, alone, 1);
    std::vector<Trainer::Metrics> of_one;
    for (int step = 0; step < one.steps; ++step) {
      single.step();
      of_one.push_back(single.trainer.metrics());
    }
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(tensor);
      Run run(settings, world, tensor), again(settings, world, tensor);
      for (int step = 0; step < one.steps; ++step) {
        for (Run* each : {&run, &again}) each->step();
        const Trainer::Metrics here = run.trainer.metrics(), expected = of_one[static_cast<std::size_t>(step)];
        CHECK(here.loss == doctest::Approx(expected.loss).epsilon(one.tolerance));
        // 10: a norm is a sum of squares, of which those of small gradients have larger relative errors.
        CHECK(here.gradient_norm == doctest::Approx(expected.gradient_norm).epsilon(10 * one.tolerance));
        CHECK(here.loss == again.trainer.metrics().loss);
      }
      CHECK(testing::different_tensors(run.trainer.registry(), again.trainer.registry()).empty());
    }
  }
}

// Five sequences per rank: halves of three and two. On the host an exchange takes place when it is awaited, so that
// work that reads its rows too early gets other numbers than one rank.
TEST_CASE("halves of a micro-batch are computed as the whole, with exchanges beside them or not") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  for (const auto& [model, more] : std::initializer_list<std::pair<const char*, const char*>>{
           {"", ""},
           {"preset = \"llama\"\nqk_norm = \"head\"\nnorm_position = \"both\"\nsparse_blocks = 1\n", ""},
           {"dropout = 0.2\nattention_dropout = 0.1\n", "[memory]\nrecompute = \"block\"\n"},
           {"norm_position = \"post\"\n", "[memory]\nrecompute = \"block\"\n"},
           {"", "[lora]\nrank = 2\nbase = \"int8\"\n"}}) {
    CAPTURE(std::string(model));
    CAPTURE(std::string(more));
    for (const std::int64_t tensor : tensor_sizes()) {
      if (tensor == 1) continue;
      CAPTURE(tensor);
      Configuration settings = configuration(model, more);
      settings.data.document_mask = settings.memory.recompute == Recompute::block;
      settings.data.batch_tokens = 5 * 16 * world.size() / tensor;
      Configuration in_order = settings;
      in_order.parallel.overlap = false;
      Run single(settings, alone, 1), beside(settings, world, tensor), after(in_order, world, tensor);
      for (int step = 0; step < 3; ++step) {
        for (Run* each : {&single, &beside, &after}) each->step();
        CHECK(beside.trainer.metrics().loss == doctest::Approx(single.trainer.metrics().loss).epsilon(1e-6));
        CHECK(beside.trainer.metrics().loss == after.trainer.metrics().loss);
      }
      CHECK(testing::different_tensors(beside.trainer.registry(), after.trainer.registry()).empty());
    }
  }
}

TEST_CASE("a rank begins with its rows of the whole model, bit for bit, and ends with them to rounding") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  // Of packed weights too: no block of codes is divided.
  for (const char* const more : {"", "[lora]\nrank = 2\nbase = \"nf4\"\n"}) {
    CAPTURE(std::string(more));
    const Configuration settings = configuration("preset = \"llama\"\nqk_norm = \"head\"\nbias = true\n", more);
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(tensor);
      Run whole(settings, alone, 1), run(settings, world, tensor);
      for (const int steps : {0, 2}) {
        for (int step = 0; step < steps; ++step) {
          whole.step();
          run.step();
        }
        run.trainer.transformer().prepare_weights();  // those of the other ranks of the data axis arrive
        const auto all = testing::bits_of(whole.trainer.registry()), held = testing::bits_of(run.trainer.registry());
        for (const checkpoint::Tensor& tensor_here : run.trainer.registry().tensors()) {
          CAPTURE(tensor_here.name);
          const std::vector<std::byte>& part = held.at(tensor_here.name);
          const std::byte* const expected =
              all.at(tensor_here.name).data() + tensor_here.held.begin * tensor_here.row_bytes();
          if (steps == 0) {
            CHECK(std::memcmp(part.data(), expected, part.size()) == 0);
          } else if (tensor_here.type == kernels::Scalar::fp32) {
            double largest = 0, difference = 0;
            for (std::size_t i = 0; i < part.size(); i += sizeof(float)) {
              float a, b;
              std::memcpy(&a, part.data() + i, sizeof a);
              std::memcpy(&b, expected + i, sizeof b);
              largest = std::max(largest, std::abs(static_cast<double>(b)));
              difference = std::max(difference, std::abs(static_cast<double>(a) - static_cast<double>(b)));
            }
            // Adam divides by the root of a second moment: where a gradient is nearly 0 its rounding is amplified.
            CHECK(difference <= 1e-3 * std::max(largest, 1e-2));
          }
        }
      }
    }
  }
}

TEST_CASE("ranks that hold the same rows have the same bits") {
  const parallel::Communicator& world = testing::world().all();
  for (const char* const model : {"", "preset = \"llama\"\nqk_norm = \"head\"\n"})
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(std::string(model));
      CAPTURE(tensor);
      Run run(configuration(model, ""), world, tensor);
      for (int step = 0; step < 2; ++step) run.step();
      run.trainer.transformer().prepare_weights();
      const parallel::Communicator& ranks = run.grid.axis(parallel::kTensorAxis);
      const auto bits = testing::bits_of(run.trainer.registry());
      for (const model::ParameterSpec& spec : run.trainer.model().parameters().specs()) {
        if (!spec.cut.over.empty()) continue;
        const std::vector<std::byte>& own = bits.at(spec.name);
        std::vector<std::byte> all(own.size() * static_cast<std::size_t>(ranks.size()));
        ranks.all_gather(own.data(), all.data(), std::ssize(own));
        for (std::int64_t rank = 0; rank < ranks.size(); ++rank)
          CHECK(std::memcmp(all.data() + rank * std::ssize(own), own.data(), own.size()) == 0);
      }
    }
}

// Models with biases and a tied head, with fewer heads of keys, and with fused projections, two norms and a soft-cap.
constexpr const char* kWriters[] = {
    "bias = true\ntied = true\n", "preset = \"llama\"\nheads = 8\nkv_heads = 4\n",
    "preset = \"llama\"\nheads = 8\nkv_heads = 4\nnorm_position = \"both\"\nlogit_softcap = 8.0\nwindow = 8\n"
    "full_every = 2\ntied = true\n"};

/// Gives the ranks of `to` the weights of `whole`.
void copy_weights(const Run& whole, const Run& to) {
  checkpoint::Registry from, into;
  whole.trainer.model().parameters().add_to(from);
  to.trainer.model().parameters().add_to(into);
  const auto all = testing::bits_of(from);
  for (const checkpoint::Tensor& tensor : into.tensors()) {
    const std::byte* const rows = all.at(tensor.name).data() + tensor.held.begin * tensor.row_bytes();
    if (tensor.scatter)
      tensor.scatter(tensor.held, rows);
    else
      device::copy(testing::execution(), tensor.data, rows, tensor.held.size() * tensor.row_bytes(),
                   device::Direction::to_device);
    kernels::fence(testing::execution());
  }
}

TEST_CASE("ranks that divide a model write the texts of one rank, and each has them") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  const std::vector<std::vector<std::uint32_t>> prompts = {{3, 1, 4, 1, 5}, {9}, {2, 6, 5}};
  struct Written {
    std::vector<std::uint32_t> text;
    double log_probability = 0;
  };
  // Beyond the context of 16: texts continue with the last half of it.
  const auto write = [&](Run& run, double temperature, std::int64_t top_k) {
    run::Timers timers;
    model::StepArena arena(testing::execution(), run.grid);
    GenerationSettings settings =
        sample_settings(run.settings, run.trainer.model().architecture(), run.grid.shape(), run.grid.world().rank());
    settings.rows = 2;
    settings.prompts = std::ssize(prompts);
    settings.vocabulary = kVocabulary - 2;
    settings.longest_prompt = 5;
    settings.new_tokens = 40;
    settings.temperature = temperature;
    settings.top_k = top_k;
    Generator generator(settings, run.trainer.transformer(), testing::execution(), timers, arena);
    std::vector<GenerationRequest> requests;
    for (std::uint32_t prompt = 0; prompt < prompts.size(); ++prompt)
      for (std::uint32_t sample = 0; sample < 2; ++sample) requests.push_back({prompts[prompt], prompt, sample});
    std::vector<Written> written(requests.size());
    generator.run(requests, 7, 0, [&](std::size_t i, const kernels::Drawn& drawn) {
      written[i].text.push_back(drawn.token);
      written[i].log_probability += static_cast<double>(drawn.log_probability);
      return drawn.token != 11;
    });
    return written;
  };
  for (const char* const model : kWriters) {
    CAPTURE(std::string(model));
    Configuration settings = configuration(model, "");
    settings.optimizer.learning_rate = 2e-2;  // biases are no longer 0
    Run single(settings, alone, 1);
    for (int step = 0; step < 6; ++step) single.step();
    for (const std::int64_t tensor : tensor_sizes()) {
      if (tensor == 1) continue;
      CAPTURE(tensor);
      Run run(settings, world, tensor);
      copy_weights(single, run);
      for (const auto& [temperature, top_k] : {std::pair{0.0, 0}, std::pair{1.0, 0}, std::pair{0.8, 5}}) {
        CAPTURE(temperature);
        const std::vector<Written> expected = write(single, temperature, top_k), found = write(run, temperature, top_k);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          CHECK(found[i].text == expected[i].text);
          CHECK(found[i].log_probability == doctest::Approx(expected[i].log_probability).epsilon(1e-5));
          double first = found[i].log_probability;
          run.grid.axis(parallel::kTensorAxis).broadcast(&first, sizeof first);
          CHECK(found[i].log_probability == first);  // the same bits
        }
      }
    }
  }
}

TEST_CASE("ranks that divide a model form the rows of each of them, which may read different numbers") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  static constexpr std::int64_t kLength = 16, kBlock = 2 * kLength;
  static constexpr Windows kWindows{.length = kLength, .windows = 11, .windows_per_file = 8};
  std::vector<std::uint32_t> ids(11 * kLength + 5);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i * i % kVocabulary);
  const TextStream stream({dataset::TokenSet("text", std::move(ids), kVocabulary, 0)});
  struct Reading {
    Reading(Run& run, const TextStream& stream)
        : recorder(kBlock, kernels::Scalar::fp32, run.settings.language_model, run.trainer.transformer(),
                   run.trainer.staging(), testing::execution()),
          rows(kWindows, stream, kBlock, recorder, &run.grid.axis(parallel::kTensorAxis)) {}
    std::vector<float> read(std::int64_t file, std::int64_t begin, std::int64_t count) {
      const std::int64_t bytes = count * recorder.row_bytes();
      std::vector<float> both(static_cast<std::size_t>(2 * bytes) / sizeof(float));
      auto* const to = reinterpret_cast<std::byte*>(both.data());
      rows.read(std::array{dataset::RowRead{file, begin, count, to, to + bytes}});
      rows.finish();
      return both;
    }
    MlpRecorder recorder;
    TextRows rows;
  };
  for (const char* const model : kWriters) {
    CAPTURE(std::string(model));
    const Configuration settings = configuration(model, "");
    Run single(settings, alone, 1);
    single.trainer.transformer().complete_weights();
    Reading whole(single, stream);
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(tensor);
      Run run(settings, world, tensor);
      run.trainer.transformer().complete_weights();
      Reading part(run, stream);
      for (std::int64_t i = 0; i <= world.rank(); ++i) {
        const std::int64_t begin = 7 * i + world.rank();
        const std::vector<float> found = part.read(i % 2, begin, 17), expected = whole.read(i % 2, begin, 17);
        double difference = 0, largest = 0;
        for (std::size_t k = 0; k < found.size(); ++k) {
          difference = std::max(difference, std::abs(static_cast<double>(found[k] - expected[k])));
          largest = std::max(largest, std::abs(static_cast<double>(expected[k])));
        }
        CHECK(largest > 0.1);
        CHECK(difference <= 2e-6 * largest);
      }
      part.rows.conclude();
    }
  }
}

TEST_CASE("an evaluation has the loss of one rank") {
  const parallel::Communicator& world = testing::world().all();
  const parallel::Communicator alone = world.split(world.rank(), 0);
  std::vector<std::uint32_t> ids(16 * 21 + 6);  // the last batch and the last window are short
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i * i % kVocabulary);
  const dataset::TokenSet text("text", std::move(ids), kVocabulary, 1000);
  const auto measure = [&](Run& run) {
    return evaluate(text, 16, 16, run.trainer.transformer(), run.trainer.staging(), testing::execution(),
                    &run.trainer.ranks());
  };
  for (const char* const model : kWriters) {
    CAPTURE(std::string(model));
    const Configuration settings = configuration(model, "");
    Run single(settings, alone, 1);
    single.step();
    const EvaluationResult expected = measure(single);
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(tensor);
      Run run(settings, world, tensor);
      run.step();
      const EvaluationResult here = measure(run);
      CHECK(here.tokens == expected.tokens);
      CHECK(here.loss == doctest::Approx(expected.loss).epsilon(1e-6));
    }
  }
}

TEST_CASE("the plan is what the largest rank takes, and sends in a step") {
  const parallel::Communicator& world = testing::world().all();
  for (const char* const more : {"", "[memory]\nrecompute = \"block\"\n"})
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(tensor);
      CAPTURE(std::string(more));
      const std::int64_t before = device::memory_use().device_bytes;
      Run run(configuration("", more), world, tensor);
      const Architecture architecture{run.settings.language_model, kVocabulary, run.settings.data.sequence};
      const Plan planned = plan(run.settings, architecture, 0);
      std::int64_t context = 0, taken = device::memory_use().device_bytes - before;
      for (const auto& [name, bytes] : planned.device)
        if (name == "CUDA context and libraries") context = bytes;
      world.maximum({&taken, 1});
      CHECK(taken <= planned.device_total() - context);
      CHECK(static_cast<double>(taken) >= 0.95 * static_cast<double>(planned.device_total() - context));
      if (world.size() == 1) continue;
      for (int step = 0; step < 2; ++step) run.step();  // the second sends the weights of the first
      run.trainer.wait();
      std::int64_t sent = run.trainer.step_bytes_sent();
      world.maximum({&sent, 1});
      // Rows are divided unevenly; the norm is not counted.
      CHECK(static_cast<double>(sent) ==
            doctest::Approx(static_cast<double>(bytes_sent(run.settings, architecture))).epsilon(0.03));
    }
}

TEST_CASE("what cannot be divided is refused with its name") {
  const auto why = [](const std::string& model, std::int64_t tensor, std::int64_t vocabulary = kVocabulary) {
    return obstacle_to_division({configuration(model, "").language_model, vocabulary, 16}, tensor);
  };
  CHECK(why("", 5).empty());
  CHECK(why("", 6).find("kv_heads = 5") != std::string::npos);
  CHECK(why("heads = 8\nkv_heads = 1\n", 2).find("kv_heads = 1") != std::string::npos);
  CHECK(why("d_mlp = 8\n", 2).find("d_mlp = 8") != std::string::npos);
  CHECK(why("", 5, 4).find("vocabulary of 4") != std::string::npos);
  for (const auto& [key, table] : {std::pair("language_model.qk_norm", "[language_model]\nqk_norm = \"width\"\n"),
                                   std::pair("lora.dropout", "[lora]\nrank = 2\ndropout = 0.1\n")}) {
    CAPTURE(key);
    Configuration read;
    const input::Schema keys = schema(read);
    CHECK_THROWS_WITH_AS(input::read(keys, std::string("[parallel]\ntensor = 2\n") + table, "test.toml"),
                         doctest::Contains(key), Error);
    CHECK(obstacle_to_grid(read, {.model = read.language_model, .vocabulary = 9}).find("parallel.tensor") !=
          std::string::npos);
    read.parallel.tensor = 1;
    CHECK(obstacle_to_grid(read, {.model = read.language_model, .vocabulary = 9}).empty());
  }
}

}  // namespace weft::language_model
