// SPDX-License-Identifier: Apache-2.0
//
// How a private step chooses where its clipped sum comes from: the fastest modes of blocks and head by sizes that fit
// the memory, and the memory of each mixture.
#include "language_model/private_plan.hpp"

#include <algorithm>
#include <limits>

#include "tests/language_model/private_run.hpp"

namespace weft::language_model {
namespace {

using privacy::Mode;
using testing::private_configuration;

constexpr Mode kModes[] = {Mode::book_keeping, Mode::materialise, Mode::recompute};
constexpr std::int64_t kLayers = 3;

/// Of three blocks over sequences of 512, or `length`.
Configuration configuration(const std::string& privacy, const std::string& model = "", const std::string& more = "",
                            std::int64_t length = 512) {
  Configuration settings = private_configuration(model, privacy, more);
  settings.language_model.layers = kLayers;
  settings.language_model.d_model = 64;
  settings.data.sequence = length;
  settings.data.batch_tokens = settings.memory.micro_tokens = 2 * length;
  return settings;
}

Architecture architecture(const Configuration& settings) {
  return {settings.language_model, testing::kPrivateVocabulary, settings.data.sequence};
}

/// That of a trainer with these settings, for which `plan` counts.
kernels::Backend backend_of(const Configuration& settings) {
  return device::planned_backend(device_settings(settings));
}

std::int64_t bytes_of(const Configuration& settings) {
  return device_bytes(settings, architecture(settings), single_process(), backend_of(settings));
}

privacy::Settings chosen(Configuration settings, std::int64_t bytes) {
  settings.device.memory = (static_cast<double>(bytes) + 0.5) * 1e-9;
  return clipping_settings(settings, architecture(settings), single_process(), backend_of(settings));
}

std::string mixture(const std::vector<Mode>& modes) {
  std::string text = "mode_of = [";
  for (std::size_t unit = 0; unit < modes.size(); ++unit)
    text += fmt::format("\"{}: {}\", ", unit + 1 < modes.size() ? fmt::format("block_{}", unit) : "head",
                        privacy::name_of(modes[unit]));
  return text + "]\n";
}

std::vector<Mode> modes_of(const privacy::Settings& settings, const Configuration& of) {
  return privacy::unit_modes(settings, unit_names(architecture(of)));
}

double seconds_of(const Configuration& settings, const std::vector<Mode>& modes) {
  double seconds = 0;
  for (std::size_t unit = 0; unit < modes.size(); ++unit)
    seconds += unit_seconds(settings, architecture(settings), unit, modes[unit], backend_of(settings));
  return seconds;
}

/// Every assignment of modes to the blocks and the head.
std::vector<std::vector<Mode>> all_mixtures() {
  std::vector<std::vector<Mode>> all;
  for (std::size_t number = 0; number < 81; ++number)
    all.push_back({kModes[number % 3], kModes[number / 3 % 3], kModes[number / 9 % 3], kModes[number / 27]});
  return all;
}

}  // namespace

TEST_CASE("gradients of records are stored where sequences are longer than the measured crossover") {
  // On one H200, norms and sums of GPT-2 124M take the same time in both modes at 512 positions (docs/privacy.md).
  Configuration settings = private_configuration("preset = \"gpt2\"\n", "", "[device]\nprecision = \"bf16\"\n");
  settings.language_model.layers = 12;
  settings.language_model.d_model = 768;
  settings.language_model.heads = 12;
  settings.language_model.d_mlp = 3072;
  const auto stores = [&](std::int64_t length) {
    settings.data.sequence = length;
    settings.data.batch_tokens = settings.memory.micro_tokens = 32768;
    settings.privacy.mode = Mode::book_keeping;
    const Architecture model{settings.language_model, 50257, length};
    const auto seconds = [&](Mode mode) { return unit_seconds(settings, model, 0, mode, kernels::Backend::cuda); };
    CHECK(seconds(Mode::recompute) > seconds(Mode::book_keeping));
    return seconds(Mode::materialise) < seconds(Mode::book_keeping);
  };
  CHECK(!stores(256));
  CHECK(stores(768));
  for (const std::int64_t length : {1024, 4096, 16384}) CHECK(stores(length));
}

TEST_CASE("\"auto\" is the fastest of all mixtures that fit, at any memory") {
  struct Case {
    const char *privacy = "", *model = "", *more = "";
    std::int64_t length = 512;
  };
  for (const Case& one :
       {Case{}, Case{"", "tied = false\n"}, Case{"", "preset = \"llama\"\n", "[memory]\nrecompute = \"block\"\n"},
        Case{"", "norm_position = \"post\"\n"}, Case{"", "", "", 16}}) {
    CAPTURE(std::string(one.model));
    CAPTURE(one.length);
    const Configuration settings = configuration(one.privacy, one.model, one.more, one.length);
    std::vector<std::pair<std::int64_t, double>> mixtures;  // bytes, seconds
    for (const std::vector<Mode>& modes : all_mixtures()) {
      const Configuration mixed = configuration(one.privacy + mixture(modes), one.model, one.more, one.length);
      Configuration explicit_modes = mixed;
      explicit_modes.privacy.mode = Mode::book_keeping;
      mixtures.emplace_back(bytes_of(explicit_modes), seconds_of(explicit_modes, modes));
    }
    Configuration with = settings;
    with.privacy.mode = Mode::two_pass;
    const std::int64_t two_pass = bytes_of(with);
    for (const auto& [budget, unused] : mixtures)
      for (const std::int64_t bytes : {budget, budget - 1}) {
        double best = std::numeric_limits<double>::infinity();
        for (const auto& [needed, seconds] : mixtures)
          if (needed <= bytes) best = std::min(best, seconds);
        const privacy::Settings choice = chosen(settings, bytes);
        with.privacy = choice;
        if (best == std::numeric_limits<double>::infinity()) {
          CHECK(choice.mode == Mode::two_pass);
          continue;
        }
        CHECK(bytes_of(with) <= bytes);
        with.privacy.mode = Mode::book_keeping;
        CHECK(seconds_of(with, modes_of(choice, settings)) == doctest::Approx(best).epsilon(1e-9));
      }
    CHECK(chosen(settings, two_pass).mode == Mode::two_pass);
    CHECK(chosen(settings, std::int64_t{1} << 40).mode_of.empty());
  }
}

TEST_CASE("the memory of a mixture lies between those of its modes, and is what a trainer allocates") {
  for (const char* more : {"", "[memory]\nrecompute = \"block\"\n"}) {
    CAPTURE(std::string(more));
    const auto pure = [&](const char* mode) {
      return bytes_of(configuration("mode = \"" + std::string(mode) + "\"\n", "", more));
    };
    const auto [least, most] = std::minmax({pure("book_keeping"), pure("materialise"), pure("recompute")});
    std::size_t number = 0;
    for (const std::vector<Mode>& modes : all_mixtures()) {
      CAPTURE(mixture(modes));
      const Configuration settings = configuration("mode = \"book_keeping\"\n" + mixture(modes), "", more);
      const std::int64_t bytes = bytes_of(settings);
      // Output gradients of the last block whose rows stay have no later block to lie in.
      const bool alone = modes[kLayers - 1] == Mode::book_keeping && *more == '\0';
      CHECK(bytes >= least);
      CHECK(bytes <= most + (alone ? settings.micro_tokens() * 4 * 7 * 64 : 0));
      if (++number % 8 != 0) continue;
      const device::MemoryUse before = device::memory_use();
      const Trainer trainer(settings, architecture(settings), parallel::Grid(testing::world(), single_process()),
                            {backend_of(settings), testing::execution().stream});
      const Plan planned = plan(settings, architecture(settings), 0);
      CHECK(planned.device_total() == bytes);
      std::int64_t expected = bytes;
      for (const auto& [name, own] : planned.device)
        if (name == "CUDA context and libraries") expected -= own;
      CHECK(device::memory_use().device_bytes - before.device_bytes == expected);
    }
  }
}

TEST_CASE("modes of units that are given stay, also where nothing fits") {
  const Configuration settings = configuration("mode_of = [\"block_1: recompute\", \"head: book_keeping\"]\n");
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{1} << 40}) {
    const std::vector<Mode> modes = modes_of(chosen(settings, bytes), settings);
    CHECK(modes[1] == Mode::recompute);
    CHECK(modes[kLayers] == Mode::book_keeping);
  }
  CHECK_THROWS_WITH_AS(chosen(configuration("mode_of = [\"block_3: recompute\"]\n"), 1),
                       doctest::Contains("the model has no part of this name"), Error);
}

TEST_CASE("the plan of a run states the modes, their time and their memory") {
  const Configuration settings =
      configuration("mode = \"book_keeping\"\nmode_of = [\"block_2: recompute\", \"head: materialise\"]\n");
  const std::string text = to_text(plan(settings, architecture(settings), 0), settings);
  CAPTURE(text);
  for (const char* part : {"blocks 0-1    book_keeping about", "block 2       recompute    about",
                           "head          materialise  about", "beside a step without privacy"})
    CHECK(text.find(part) != std::string::npos);
}

TEST_CASE("blocks whose activations are in host memory are not formed again") {
  const auto choose = [](const std::string& unit) {
    Configuration settings = configuration("mode = \"book_keeping\"\nmode_of = [\"" + unit + ": recompute\"]\n");
    settings.memory.swap_activations = true;  // an input is refused without a GPU
    return chosen(settings, 1);
  };
  CHECK_THROWS_WITH_AS(choose("block_0"), doctest::Contains("memory.swap_activations"), Error);
  CHECK_NOTHROW(choose("head"));
}

}  // namespace weft::language_model
