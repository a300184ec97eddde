// SPDX-License-Identifier: Apache-2.0
//
// Low-rank adapters: their gradients against central differences, the base model before the first step, merged weights,
// what has optimizer state, and that nothing else changes.
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/error.hpp"
#include "input/read.hpp"
#include "language_model/huggingface/peft.hpp"
#include "language_model/step/adapters.hpp"
#include "language_model/step/language_trainer.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"
#include "tests/model/registry_bits.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using weft::testing::gpt2;
using weft::testing::kLength;
using weft::testing::kSequences;
using weft::testing::llama;
using weft::testing::norm_of;
using weft::testing::SmallModel;
using weft::testing::variants;
using Gradients = std::vector<std::vector<float>>;

constexpr std::int64_t kRank = 4;

std::vector<std::string> all_targets(const ModelSettings& model) {
  std::vector<std::string> names;
  for (const LoraTarget& target : lora_targets(model)) names.push_back(target.name);
  return names;
}

TransformerSettings adapted(TransformerSettings settings, std::vector<std::string> targets = {}) {
  if (targets.empty()) targets = all_targets(settings.architecture.model);
  settings.architecture.lora = {.rank = kRank, .alpha = 6, .targets = std::move(targets)};
  return settings;
}

bool same_bits(const Gradients& a, const Gradients& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() || std::memcmp(a[i].data(), b[i].data(), 4 * a[i].size()) != 0) return false;
  return true;
}

/// The weights of `base` become those of `model` of the same names.
void copy_base(const SmallModel& model, SmallModel& base) {
  for (std::size_t i = 0; i < base.parameters().size(); ++i)
    base.set(i, model.get(model.parameters().index(base.parameters().specs()[i].name)));
}

/// A third of the weights, still five times those of a new model.
void shrink(SmallModel& model) {
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    if (!model.parameters().specs()[i].is_matrix()) continue;
    std::vector<float> values = model.get(i);
    for (float& value : values) value /= 3;
    model.set(i, values);
  }
}

}  // namespace

TEST_CASE("the parameters of adapters follow those of their block; the others are frozen and stay as they are") {
  Architecture architecture = llama().architecture;
  const std::vector<model::ParameterSpec> before = parameter_specs(architecture);
  architecture.lora = {.rank = kRank, .alpha = 6, .targets = {"query", "value", "down"}};
  const std::vector<model::ParameterSpec> specs = parameter_specs(architecture);
  std::size_t frozen = 0;
  std::vector<std::string> names;
  std::string block;
  for (const model::ParameterSpec& spec : specs) {
    if (spec.frozen) {
      // Same place in the stream of random numbers: the same model is initialised with adapters and without.
      REQUIRE(frozen < before.size());
      CHECK(spec.name == before[frozen].name);
      CHECK(spec.first_element == before[frozen++].first_element);
    } else {
      CHECK(is_adapter(spec));
      CHECK(spec.name.starts_with(block));
      names.push_back(spec.name);
    }
    block = spec.name.substr(0, spec.name.find('/') + 1);
  }
  CHECK(frozen == before.size());
  REQUIRE(names.size() == 12);
  CHECK(names[0] == "block_0/attention/query/lora_a");
  CHECK(names[1] == "block_0/attention/value/lora_a");
  CHECK(names[5] == "block_0/mlp/down/lora_b");
  const std::vector<model::ParameterSpec> alone = adapter_specs(architecture);
  CHECK(alone.size() == 12);
  // rank (inputs + outputs): 3 targets of 2 layers.
  const ModelSettings& model = architecture.model;
  CHECK(model::trained_elements_of(specs) == 2 * kRank * (4 * model.d_model + model.d_model + model.d_mlp));
  CHECK(model::elements_of(alone) == model::trained_elements_of(specs));
  CHECK(base_of(architecture).lora.rank == 0);
}

TEST_CASE("the gradient of each adapter is the slope of the loss, for every target of every model") {
  for (auto [name, settings] : variants())
    for (const double dropout : {0.0, 0.25}) {
      if (dropout > 0 && name != "gpt2" && name != "llama") continue;
      settings = adapted(settings);
      settings.architecture.lora.dropout = dropout;
      CAPTURE(name);
      CAPTURE(dropout);
      SmallModel model(settings, kSequences, kLength);
      shrink(model);
      Gradients gradients;
      CHECK(model.gradient(gradients) == doctest::Approx(model.loss()).epsilon(1e-6));
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const model::ParameterSpec& spec = model.parameters().specs()[i];
        CAPTURE(spec.name);
        if (spec.frozen) continue;
        const double length = norm_of(gradients[i]);
        REQUIRE(length > 1e-4);
        CHECK(slope_along(model, i, gradients[i]) == doctest::Approx(length).epsilon(0.01 + 5e-5 / length));
      }
    }
}

TEST_CASE("recomputation gives the same bits, with dropout of adapters; micro-batches add up") {
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16, kernels::Scalar::fp16})
    for (TransformerSettings settings : {adapted(gpt2()), adapted(llama(), {"key", "gate", "down"})}) {
      settings.type = type;
      settings.architecture.lora.dropout = 0.25;
      SmallModel keeps(settings, kSequences, kLength);
      Gradients expected;
      keeps.gradient(expected);
      for (const Recompute plan : {Recompute::activation, Recompute::norm, Recompute::block}) {
        settings.memory.recompute = plan;
        SmallModel recomputes(settings, kSequences, kLength);
        Gradients gradients;
        recomputes.gradient(gradients);
        CHECK(same_bits(gradients, expected));
      }
      if (type != kernels::Scalar::fp32) continue;
      Gradients parts;
      shrink(keeps);
      keeps.gradient(expected);
      keeps.gradient(parts, 2);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        double difference = 0;
        for (std::size_t k = 0; k < parts[i].size(); ++k)
          difference += std::pow(static_cast<double>(parts[i][k]) - static_cast<double>(expected[i][k]), 2);
        // Sums of other order, as in transformer_test.
        CHECK(std::sqrt(difference) <= 2e-6 * norm_of(expected[i]));
      }
    }
}

TEST_CASE("gradients of the parts that are trained are those of the whole model; the others have none") {
  const std::vector<std::pair<TransformerSettings, std::vector<std::string>>> cases = {
      {llama(), {"head"}}, {llama(), {"norms", "block_1"}}, {gpt2(), {"biases"}}, {gpt2(), {"embedding", "mlp"}}};
  for (const auto& [whole, train] : cases) {
    CAPTURE(train.front());
    TransformerSettings part = whole;
    part.architecture.model.train = train;
    SmallModel all(whole, kSequences, kLength), some(part, kSequences, kLength);
    Gradients expected, gradients;
    CHECK(some.gradient(gradients) == all.gradient(expected));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::string& name = all.parameters().specs()[i].name;
      CAPTURE(name);
      if (!is_trained(part.architecture, name)) {
        CHECK(gradients[i].empty());
        continue;
      }
      std::vector<float> difference = gradients[i];
      for (std::size_t k = 0; k < difference.size(); ++k) difference[k] -= expected[i][k];
      CHECK(norm_of(difference) <= 1e-6 * norm_of(expected[i]));  // sums of columns may be added in other parts
    }
  }
}

TEST_CASE("with B = 0 the model has the bits of its base, in every type") {
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16, kernels::Scalar::fp16})
    for (TransformerSettings settings : {gpt2(), llama()}) {
      settings.type = type;
      SmallModel model(adapted(settings), kSequences, kLength), base(settings, kSequences, kLength);
      copy_base(model, base);
      CHECK(model.loss() != base.loss());  // B of SmallModel is not 0
      for (std::size_t i = 0; i < model.parameters().size(); ++i)
        if (model.parameters().specs()[i].name.ends_with("/lora_b"))
          model.set(i, std::vector<float>(model.get(i).size(), 0.0f));
      CHECK(model.loss() == base.loss());
      for (std::int64_t row = 0; row < kSequences * kLength; row += 7) {
        const std::vector<float> of_model = model.transformer().logits(row), of_base = base.transformer().logits(row);
        CHECK(std::memcmp(of_model.data(), of_base.data(), 4 * of_base.size()) == 0);
      }
    }
}

TEST_CASE("a transformer without adapters of an adapted model is that of its base") {
  TransformerSettings settings = adapted(gpt2());
  settings.adapters = false;
  SmallModel left_out(settings, kSequences, kLength), base(gpt2(), kSequences, kLength);
  copy_base(left_out, base);
  CHECK(left_out.loss() == base.loss());
}

TEST_CASE("merged weights give the logits of the adapters") {
  for (const auto& [name, settings] : variants()) {
    CAPTURE(name);
    if (settings.architecture.model.dropout > 0 || settings.architecture.model.attention_dropout > 0) continue;
    SmallModel model(adapted(settings), kSequences, kLength), base(settings, kSequences, kLength);
    shrink(model);
    copy_base(model, base);
    const double before = base.loss();
    model::Parameters adapters(adapter_specs(adapted(settings).architecture), settings.storage, single_process(), 0,
                               weft::testing::execution(), model::Moments::none);
    for (std::size_t i = 0; i < adapters.size(); ++i) {
      const std::vector<float> values = model.get(model.parameters().index(adapters.specs()[i].name));
      const model::ParameterSpec& spec = adapters.specs()[i];
      const device::Buffer<float> staged(spec.elements());
      device::copy(weft::testing::execution(), staged.data(), values.data(), staged.bytes(),
                   device::Direction::to_device);
      kernels::weights_from_float(weft::testing::execution(), adapters.matrix(i), 0,
                                  staged.matrix(spec.rows(), spec.columns()));
      kernels::fence(weft::testing::execution());
    }
    merge(adapters, adapted(settings).architecture, base.parameters(), weft::testing::execution());
    const double merged = base.loss(), expected = model.loss();
    CHECK(std::abs(before - expected) > 5e-4);  // far above the tolerance
    // Rounding of fp32 sums in another order.
    CHECK(merged == doctest::Approx(expected).epsilon(1e-5));
    const std::vector<float> a = base.transformer().logits(3), b = model.transformer().logits(3);
    for (std::size_t k = 0; k < a.size(); ++k) CHECK(std::abs(a[k] - b[k]) <= 2e-4f);
  }
}

// --- Packed weights of the frozen model
// ---------------------------------------------------------------------------------

namespace {

constexpr LoraBase kPackedBases[] = {LoraBase::int8, LoraBase::nf4};

/// Blocks of 64 and of 32 columns.
TransformerSettings widened(TransformerSettings settings) {
  settings.architecture.model.d_model = 96;
  return adapted(settings);
}

}  // namespace

TEST_CASE("only the linear layers of the blocks are packed; embedding, positions and head stay bf16") {
  for (const TransformerSettings& settings : {widened(gpt2()), widened(llama())})
    for (const LoraBase base : {LoraBase::bf16, LoraBase::int8, LoraBase::nf4}) {
      Architecture architecture = settings.architecture;
      architecture.lora.base = base;
      for (const model::ParameterSpec& spec : parameter_specs(architecture)) {
        CAPTURE(spec.name);
        const bool frozen_matrix = spec.is_matrix() && spec.frozen;
        CHECK(spec.storage.has_value() == frozen_matrix);
        CHECK((spec.packing != kernels::Packing::none) ==
              (frozen_matrix && base != LoraBase::bf16 && spec.name.starts_with("block_")));
      }
    }
}

TEST_CASE("with packed weights loss and gradients have the bits of those with the unpacked weights") {
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16})
    for (TransformerSettings settings : {widened(gpt2()), widened(llama())})
      for (const LoraBase base : kPackedBases) {
        settings.type = type;
        settings.architecture.lora.base = base;
        SmallModel packed(settings, kSequences, kLength);
        settings.architecture.lora.base = LoraBase::bf16;
        SmallModel unpacked(settings, kSequences, kLength);
        for (std::size_t i = 0; i < packed.parameters().size(); ++i) unpacked.set(i, packed.get(i));
        Gradients expected, gradients;
        const double loss = unpacked.gradient(expected);
        CHECK(packed.gradient(gradients) == loss);
        CHECK(same_bits(gradients, expected));
        settings.architecture.lora.base = base;
        settings.memory.recompute = Recompute::block;
        SmallModel recomputes(settings, kSequences, kLength);
        CHECK(recomputes.gradient(gradients) == loss);
        CHECK(same_bits(gradients, expected));
      }
}

TEST_CASE("the gradient of each adapter of a packed model is the slope of the loss") {
  for (const LoraBase base : kPackedBases) {
    TransformerSettings settings = adapted(llama());
    settings.architecture.lora.base = base;
    SmallModel model(settings, kSequences, kLength);
    shrink(model);
    Gradients gradients;
    model.gradient(gradients);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const model::ParameterSpec& spec = model.parameters().specs()[i];
      CAPTURE(spec.name);
      if (spec.frozen) continue;
      const double length = norm_of(gradients[i]);
      REQUIRE(length > 1e-4);
      CHECK(slope_along(model, i, gradients[i]) == doctest::Approx(length).epsilon(0.01 + 5e-5 / length));
    }
  }
}

TEST_CASE("copied weights are the unpacked ones") {
  for (const LoraBase base : {LoraBase::bf16, LoraBase::int8, LoraBase::nf4}) {
    TransformerSettings settings = widened(gpt2());
    settings.architecture.lora.base = base;
    const SmallModel packed(settings, kSequences, kLength);
    settings.architecture.lora = {};
    const SmallModel whole(settings, kSequences, kLength);
    copy_weights(packed.parameters(), whole.parameters(), weft::testing::execution());
    for (std::size_t i = 0; i < whole.parameters().size(); ++i)
      CHECK(whole.get(i) == packed.get(packed.parameters().index(whole.parameters().specs()[i].name)));
  }
}

// --- Training -------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kVocabulary = 11;

Configuration configuration(const std::string& more = "", const std::string& data = "") {
  Configuration read;
  const input::Schema keys = schema(read);
  input::read(keys,
              "[run]\nsteps = 60\n[data]\nbatch_tokens = 96\nsequence = 16\nmicro_tokens = 64\n" + data +
                  "[language_model]\nlayers = 2\nheads = 2\nd_model = 32\n[lora]\nrank = 4\nalpha = 8\n"
                  "[optimizer]\nlearning_rate = 3e-2\nwarmup_steps = 5\nweight_decay = 0\n" +
                  more,
              "test.toml");
  return read;
}

Architecture architecture_of(const Configuration& settings) {
  return {settings.language_model, kVocabulary, settings.data.sequence, settings.lora};
}

struct Run {
  explicit Run(const Configuration& settings)
      : grid(weft::testing::world(), single_process()),
        execution{device::planned_backend(device_settings(settings)), weft::testing::execution().stream},
        trainer(settings, architecture_of(settings), grid, execution) {
    trainer.initialise();
  }
  double step() {
    dataset::TokenBatch batch = trainer.next_batch();
    for (std::int64_t row = 0; row < batch.rows(); ++row) {
      const auto at = static_cast<std::size_t>(row);
      const std::int64_t token = 3 * (row / batch.length) + trainer.steps_done() + row % batch.length;
      batch.ids[at] = static_cast<std::uint32_t>(token % kVocabulary);
      batch.targets[at] = static_cast<std::int32_t>((token + 1) % kVocabulary);
      batch.positions[at] = static_cast<std::int32_t>(row % batch.length);
    }
    batch.counted = batch.rows();
    trainer.step(batch);
    return trainer.metrics().loss;
  }
  parallel::Grid grid;
  const kernels::Execution execution;
  Trainer trainer;
};

}  // namespace

TEST_CASE("training changes the adapters alone, and the loss falls, in every storage and type") {
  for (const char* more : {"", "state = \"bf16\"\n", "state = \"8bit\"\n", "[device]\nprecision = \"bf16\"\n",
                           "[device]\nprecision = \"fp16\"\n", "[memory]\nrecompute = \"block\"\n"}) {
    CAPTURE(more);
    Run run(configuration(more));
    const auto before = weft::testing::bits_of(run.trainer.registry());
    const double first = run.step();
    CHECK(first == doctest::Approx(std::log(11.0)).epsilon(0.03));
    double last = first;
    for (int i = 1; i < 60; ++i) last = run.step();
    CHECK(last < first - 0.1);
    run.trainer.wait();
    const auto after = weft::testing::bits_of(run.trainer.registry());
    for (const model::ParameterSpec& spec : run.trainer.model().parameters().specs()) {
      CAPTURE(spec.name);
      CHECK((before.at(spec.name) == after.at(spec.name)) == spec.frozen);
      CHECK(after.contains(spec.name + ".first_moment") == !spec.frozen);
    }
  }
}

TEST_CASE("adapters learn over a packed model, with a loss near that over bf16 weights") {
  const auto last_loss = [](LoraBase base) {
    Configuration settings = configuration();
    settings.lora.base = base;
    Run run(settings);
    double last = 0;
    for (int i = 0; i < 60; ++i) last = run.step();
    return last;
  };
  const double expected = last_loss(LoraBase::bf16);
  CHECK(expected < std::log(11.0) - 0.1);
  CHECK(last_loss(LoraBase::int8) == doctest::Approx(expected).epsilon(0.01));
  CHECK(last_loss(LoraBase::nf4) == doctest::Approx(expected).epsilon(0.05));
}

TEST_CASE("the plan of a model of 8 B parameters has at most 6.5 GB of weights with nf4") {
  Configuration settings;
  const input::Schema keys = schema(settings);
  input::read(
      keys,
      "[data]\nbatch_tokens = 8192\nsequence = 4096\nmicro_tokens = 4096\n[language_model]\npreset = \"llama\"\n"
      "layers = 32\nheads = 32\nkv_heads = 8\nd_model = 4096\nd_mlp = 14336\ntied = false\n"
      "[lora]\nrank = 16\nbase = \"nf4\"\n[optimizer]\nstate = \"bf16\"\n[device]\nprecision = \"bf16\"\n",
      "test.toml");
  const Architecture architecture{settings.language_model, 128256, settings.data.sequence, settings.lora};
  const Plan planned = plan(settings, architecture, 0);
  CHECK(planned.parameters - planned.trained == 8'030'261'248);
  for (const auto& [name, bytes] : planned.device) {
    if (name == "weights") CHECK(bytes < 6'500'000'000);
    if (name == "weights") CHECK(bytes > 5'500'000'000);
    // One matrix in bf16: gate and up of a block.
    if (name == "unpacked weights") CHECK(bytes == 2 * 2 * 4096 * 14336);
  }
}

TEST_CASE("only adapters have optimizer state and gradients, in the plan and in memory") {
  for (const auto& [more, base] : {std::pair{"", LoraBase::stored},
                                   {"", LoraBase::bf16},
                                   {"", LoraBase::int8},
                                   {"", LoraBase::nf4},
                                   {"state = \"bf16\"\n", LoraBase::stored},
                                   {"state = \"8bit\"\n[device]\nprecision = \"bf16\"\n", LoraBase::stored},
                                   {"[device]\nprecision = \"fp16\"\n", LoraBase::bf16}}) {
    CAPTURE(more);
    CAPTURE(base);
    Configuration settings = configuration(more);
    settings.lora.base = base;
    settings.lora.dropout = 0.1;
    const Architecture architecture = architecture_of(settings);
    const Plan planned = plan(settings, architecture, 0);
    const device::MemoryUse before = device::memory_use();
    const Run run(settings);
    const device::MemoryUse after = device::memory_use();
    std::int64_t expected = planned.device_total(), moments = 0, gradients = 0;
    for (const auto& [name, bytes] : planned.device) {
      if (name == "CUDA context and libraries") expected -= bytes;
      if (name == "moments") moments = bytes;
      if (name == "gradients") gradients = bytes;
    }
    CHECK(after.device_bytes - before.device_bytes == expected);
    const std::vector<model::ParameterSpec> adapters = adapter_specs(architecture);
    std::int64_t of_adapters = 0;
    for (const model::ParameterSpec& spec : adapters)
      of_adapters += model::moment_bytes(settings.optimizer.state, spec.rows(), spec.columns(), spec.columns());
    CHECK(moments == of_adapters);
    CHECK(run.trainer.model().parameters().bytes().moments == of_adapters);
    CHECK(planned.trained == model::elements_of(adapters));
    CHECK(gradients == model::AccumulatingSink::bytes(adapters, single_process(), 0, settings.micro_tokens()));
  }
}

// --- PEFT -----------------------------------------------------------------------------------------------------------

namespace {

std::string refusal(const Architecture& architecture, const std::filesystem::path& path) {
  try {
    require_peft(architecture, path);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("adapters come back from the files of PEFT; those of another rank, scale or target are refused") {
  for (const TransformerSettings& settings :
       {adapted(gpt2()), adapted(gpt2(), {"query", "value", "output"}), adapted(llama()), adapted(llama(), {"gate"})}) {
    const weft::testing::Scratch folder;
    const Architecture& architecture = settings.architecture;
    SmallModel model(settings, kSequences, kLength), read(settings, kSequences, kLength);
    write_peft(model.parameters(), architecture, "base", kernels::Scalar::fp32, weft::testing::execution(),
               folder.path);
    CHECK(is_peft_directory(folder.path));
    for (std::size_t i = 0; i < read.parameters().size(); ++i)
      if (is_adapter(read.parameters().specs()[i])) read.set(i, std::vector<float>(read.get(i).size(), 0.0f));
    load_peft(read.parameters(), architecture, weft::testing::execution(), folder.path);
    for (std::size_t i = 0; i < read.parameters().size(); ++i) CHECK(read.get(i) == model.get(i));

    Architecture other = architecture;
    other.lora.rank = 3;
    CHECK(refusal(other, folder.path).find("correct lora.rank") != std::string::npos);
    other = architecture;
    other.lora.alpha = 7;
    CHECK(refusal(other, folder.path).find("set lora.alpha = ") != std::string::npos);
    other = architecture;
    other.lora.targets = {"up"};
    CHECK(refusal(other, folder.path) != "");
    other = architecture;
    other.model.d_mlp = 64;
    if (architecture.lora.adapts("gate") || architecture.lora.adapts("up"))
      CHECK(refusal(other, folder.path).find("does it belong to this model?") != std::string::npos);
    std::ofstream(folder.path / "adapter_config.json") << "{\"peft_type\": \"IA3\"}";
    CHECK(refusal(architecture, folder.path).find("peft_type") != std::string::npos);
    std::ofstream(folder.path / "adapter_config.json") << "{";
    CHECK(refusal(architecture, folder.path).find("is it complete?") != std::string::npos);
  }
}

// --- Settings -------------------------------------------------------------------------------------------------------

TEST_CASE("inputs that make no sense are refused with the reason") {
  const auto refused = [](const std::string& text, const std::string& reason) {
    std::string message;
    try {
      Configuration read;
      const input::Schema keys = schema(read);
      input::read(keys, text, "test.toml");
    } catch (const std::exception& error) {
      message = error.what();
    }
    CHECK_MESSAGE(message.find(reason) != std::string::npos, text, " -> ", message);
  };
  refused("[lora]\nrank = 1000\n", "lora.rank = 1000 is more than the smaller dimension of \"query\", 768 x 768");
  refused("[lora]\nrank = 300\n[language_model]\npreset = \"llama\"\nkv_heads = 4\n", "\"key\", 256 x 768");
  refused("[lora]\nrank = 8\ntargets = [\"query\", \"head\"]\n", "contains \"head\", which this model does not have");
  refused("[lora]\nrank = 8\ntargets = [\"gate\"]\n", "query, key, value, output, up, down");
  refused("[lora]\nrank = 8\ntargets = [\"up\", \"up\"]\n", "twice");
  refused("[lora]\nrank = 8\ntargets = []\n", "nothing would be trained");
  refused("[lora]\nrank = -1\n", "lora.rank");
  refused("[lora]\nalpha = 4\n", "lora.alpha has no effect without lora.rank (there are no adapters)");
  refused("[lora]\ntargets = [\"up\"]\n", "lora.targets has no effect");
  refused("[lora]\ninitial = \"adapters\"\n", "lora.initial has no effect");
  refused("[lora]\nrank = 8\nalpha = 0\n", "lora.alpha");
  refused("[lora]\nrank = 8\ndropout = 1.0\n", "lora.dropout");
  refused("[lora]\nbase = \"nf4\"\n", "lora.base has no effect");
  refused("[lora]\nrank = 8\nbase = \"nf4\"\n[device]\nprecision = \"fp16\"\n", "multiplied in bf16");
  refused("[lora]\nrank = 8\nbase = \"int8\"\n[device]\nprecision = \"bf16\"\nfp8 = true\n",
          "device.fp8 does not go with lora.rank");
  refused("[lora]\nrank = 8\ndropout = 0.1\n[privacy]\nenabled = true\nepsilon = 8\ndelta = 1e-5\nclip = 1\n",
          "lora.dropout does not go with privacy.enabled");
  refused("[language_model]\ntrain = [\"head\"]\n", "its head is the embedding");
  refused("[language_model]\ntrain = [\"norms\"]\n[lora]\nrank = 8\n",
          "language_model.train does not go with lora.rank");
}

}  // namespace weft::language_model
