// SPDX-License-Identifier: Apache-2.0
//
// The counted work of the answers of polychromic training.
#include "polychromic/answer_work.hpp"

#include <doctest/doctest.h>

namespace weft::polychromic {

TEST_CASE("weights are read once per token that is drawn, and passes count as often as they are made") {
  language_model::Configuration settings;
  settings.data.batch_tokens = 4096;
  settings.data.sequence = 256;
  settings.language_model.kv_heads = settings.language_model.heads;
  const language_model::Architecture architecture{settings.language_model, 50257, 1024};
  AnswerWork work{
      .prompts = 2, .samples = 4, .prompt_tokens = 16, .answer_tokens = 10, .drawn = 0.5, .scored = 0, .trained = 0.5};
  const auto bytes = [&](const char* name) {
    for (const auto& [phase, bytes] : answer_bytes(work, settings, architecture))
      if (phase == name) return bytes;
    return 0.0;
  };
  const double matrices = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  CHECK(bytes("generate") > 0.5 * 10 * matrices * 4);
  CHECK(bytes("generate") < 0.5 * 14 * matrices * 4);
  CHECK(bytes("policy forward") == 0);
  CHECK(bytes("policy backward") > 0.5 * (2 * 4 + 8) * matrices);
  const double once = bytes("policy backward");
  work.trained = 1;
  work.scored = 1;
  CHECK(bytes("policy backward") == doctest::Approx(2 * once));
  CHECK(bytes("policy forward") > matrices * 4);
  CHECK(bytes("policy forward") < bytes("policy backward") / 2);
  work.answer_tokens = 0;
  CHECK(answer_bytes(work, settings, architecture).empty());
}

}  // namespace weft::polychromic
