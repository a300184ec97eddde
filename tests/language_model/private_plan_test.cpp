// SPDX-License-Identifier: Apache-2.0
//
// How a private step chooses where its clipped sum comes from: the first mode whose planned memory fits.
#include "language_model/run/private_plan.hpp"

#include "tests/language_model/private_run.hpp"

namespace weft::language_model {
namespace {

using privacy::Mode;
using testing::private_configuration;

/// Of three blocks over sequences of `length`.
Configuration configuration(const std::string& privacy, const std::string& model = "", const std::string& more = "",
                            std::int64_t length = 512) {
  Configuration settings = private_configuration(model, privacy, more);
  settings.language_model.layers = 3;
  settings.language_model.d_model = 64;
  settings.data.sequence = length;
  settings.data.batch_tokens = settings.memory.micro_tokens = 2 * length;
  return settings;
}

Architecture architecture(const Configuration& settings) {
  return {settings.language_model, testing::kPrivateVocabulary, settings.data.sequence};
}

kernels::Backend backend_of(const Configuration& settings) {
  return device::planned_backend(device_settings(settings));
}

std::int64_t bytes_of(Configuration settings, Mode mode) {
  settings.privacy.mode = mode;
  return device_bytes(settings, architecture(settings), single_process(), backend_of(settings));
}

Mode chosen(Configuration settings, std::int64_t bytes) {
  settings.device.memory = (static_cast<double>(bytes) + 0.5) * 1e-9;
  return with_clipping_mode(settings, architecture(settings), single_process(), backend_of(settings)).privacy.mode;
}

}  // namespace

TEST_CASE("\"auto\" is the first of materialise, book_keeping and two_pass that fits, at any memory") {
  constexpr Mode kOrder[] = {Mode::materialise, Mode::book_keeping, Mode::two_pass};
  struct Case {
    const char *model = "", *more = "";
    std::int64_t length = 512;
  };
  for (const Case& one :
       {Case{}, Case{"tied = false\n"}, Case{"preset = \"llama\"\n", "[memory]\nrecompute = \"block\"\n"},
        Case{"norm_position = \"post\"\n"}, Case{"", "", 16}}) {
    CAPTURE(std::string(one.model));
    CAPTURE(one.length);
    const Configuration settings = configuration("", one.model, one.more, one.length);
    for (const Mode tried : kOrder)
      for (const std::int64_t memory : {bytes_of(settings, tried), bytes_of(settings, tried) - 1}) {
        Mode expected = Mode::two_pass;
        for (std::size_t i = std::size(kOrder); i-- > 0;)
          if (bytes_of(settings, kOrder[i]) <= memory) expected = kOrder[i];
        CHECK(chosen(settings, memory) == expected);
      }
    CHECK(chosen(settings, 1) == Mode::two_pass);
    CHECK(chosen(settings, std::int64_t{1} << 40) == Mode::materialise);
    // A mode that is given stays.
    CHECK(chosen(configuration("mode = \"book_keeping\"\n", one.model, one.more, one.length), 1) == Mode::book_keeping);
  }
}

TEST_CASE("without device.memory \"auto\" at most doubles the memory of a step without privacy") {
  const Configuration settings = configuration("");
  Configuration open = settings;
  open.privacy.enabled = false;
  const std::int64_t limit = 2 * bytes_of(open, Mode::automatic);
  const Mode mode =
      with_clipping_mode(settings, architecture(settings), single_process(), backend_of(settings)).privacy.mode;
  CHECK(mode == chosen(settings, limit));
}

TEST_CASE("the plan of a run states the mode, why, and the memory with each one") {
  const auto text_of = [](const Configuration& settings) {
    return to_text(plan(settings, architecture(settings), 0), settings);
  };
  const std::string given = text_of(configuration("mode = \"book_keeping\"\n")),
                    automatic = text_of(configuration("mode = \"auto\"\n"));
  CAPTURE(given);
  CHECK(given.find("clipping: book_keeping, rows are kept\n") != std::string::npos);
  CHECK(automatic.find("(the first that at most doubles the memory)") != std::string::npos);
  for (const char* mode : {"materialise", "book_keeping", "two_pass"})
    for (const std::string& text : {given, automatic})
      CHECK(text.find(std::string("on the device with ") + mode) != std::string::npos);
}

}  // namespace weft::language_model
