// SPDX-License-Identifier: Apache-2.0
//
// Table [privacy]: what enables it, and that each option that would break the guarantee is refused with its reason.

#include <algorithm>

#include "base/error.hpp"
#include "input/read.hpp"
#include "language_model/settings/configuration.hpp"
#include "privacy/privacy_settings.hpp"
#include "tests/test.hpp"

namespace weft::privacy {
namespace {

language_model::Configuration read(const std::string& text) {
  language_model::Configuration configuration;
  const input::Schema keys = language_model::schema(configuration);
  input::read(keys, text, "test.toml");
  return configuration;
}

std::string problem(const std::string& text) {
  try {
    read(text);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

const std::string kPrivate = "[privacy]\nepsilon = 8\ndelta = 1e-5\n";

/// `option` is accepted without privacy (unless it is one of this table), and refused with it for `reason`.
void check_refused(const std::string& option, const std::string& reason) {
  CAPTURE(option);
  const bool is_of_table = option.rfind("[privacy]", 0) == 0;
  if (!is_of_table) CHECK(problem(option) == "");
  const std::string text = is_of_table ? kPrivate + option.substr(10) : option + kPrivate;
  const std::string message = problem(text);
  CAPTURE(message);
  CHECK(message.find(reason) != std::string::npos);
  CHECK(message.find("test.toml:") != std::string::npos);
}

}  // namespace

TEST_CASE("a target or a noise multiplier enables private training, unless the input says otherwise") {
  CHECK(!read("").privacy.enabled);
  CHECK(read(kPrivate).privacy.enabled);
  CHECK(read("[privacy]\nnoise_multiplier = 1.0\ndelta = 1e-5\n").privacy.enabled);
  CHECK(!read(kPrivate + "enabled = false\n").privacy.enabled);
}

TEST_CASE("a resumed run cannot change what its guarantee depends on") {
  language_model::Configuration configuration;
  const input::Schema keys = language_model::schema(configuration);
  for (const char* name :
       {"enabled", "epsilon", "noise_multiplier", "delta", "clip", "clipping", "clip_quantile", "clip_rate",
        "count_noise", "sampling", "most_records", "scheme", "clip_function", "accountant", "unit", "noise_key"}) {
    CAPTURE(name);
    REQUIRE(keys.find(std::string("privacy.") + name) != nullptr);
    CHECK(keys.find(std::string("privacy.") + name)->resume == input::Resume::fixed);
  }
  // What a record is.
  for (const char* name : {"sequence", "tokens", "special", "order", "document_mask", "validation_fraction"}) {
    CAPTURE(name);
    CHECK(keys.find(std::string("data.") + name)->resume == input::Resume::fixed);
  }
}

TEST_CASE("exactly one of epsilon and noise_multiplier, and delta, are given") {
  CHECK(problem(kPrivate).empty());
  CHECK(problem("[privacy]\nenabled = true\ndelta = 1e-5\n").find("without privacy.epsilon") != std::string::npos);
  CHECK(problem(kPrivate + "noise_multiplier = 1.0\n").find("give one of them") != std::string::npos);
  CHECK(problem("[privacy]\nepsilon = 8\n").find("without privacy.delta") != std::string::npos);
  CHECK(problem("[privacy]\nnoise_multiplier = 1e-3\ndelta = 1e-5\n").find("protects nothing") != std::string::npos);
  for (const char* wrong : {"epsilon = -1", "delta = 1.0", "clip = 0", "tile = -1", "noise_multiplier = nan",
                            "epsilon = inf", "clip = \"large\""}) {
    CAPTURE(wrong);
    CHECK(!problem(std::string("[privacy]\nenabled = true\n") + wrong + "\n").empty());
  }
}

TEST_CASE("what couples records, or depends on private data without noise, is refused in a private run") {
  check_refused("[run]\nnonfinite = \"skip\"\n", "whether a step is skipped would depend on private data");
  check_refused("[device]\nprecision = \"fp16\"\n", "skips steps depending on private data");
  check_refused("[optimizer]\ntuning = \"plateau\"\n", "would follow the loss on private data");
  check_refused("[optimizer]\ntuning = \"range\"\n", "would follow the loss on private data");
  check_refused("[data]\norder = \"curriculum\"\ncurriculum_steps = 10\n", "statistics of private data");
  check_refused("[data]\norder = \"sequential\"\n", "the guarantee depends on it");
  check_refused("[data]\nsequence_start = 64\nsequence_growth_steps = 10\n", "what is protected, would change");
  check_refused("[language_model]\ndropout = 0.1\n", "drawn by the place in the batch");
  check_refused("[language_model]\nattention_dropout = 0.1\n", "drawn by the place in the batch");
  check_refused("[data]\naccept_changed = true\n", "accounted for the records of the data");
  check_refused("[privacy]\nsampling = \"shuffled\"\n", "their epsilon would be too small");
  check_refused("[privacy]\nsampling = \"truncated_poisson\"\n", "needs privacy.most_records");
  check_refused("[privacy]\nmost_records = 100\n", "privacy.most_records is for");
  check_refused("[privacy]\nclip_rate = 0.1\n", "privacy.clip_rate is for");
  check_refused("[privacy]\nclipping = \"adaptive\"\nscheme = \"group\"\n", "norms of whole gradients");
  check_refused("[privacy]\nclipping = \"adaptive\"\nclip_function = \"automatic\"\n", "nothing but the scale");
  check_refused("[privacy]\nunit = \"token\"\n", "attention couples the tokens");
  for (const char* without_effect :
       {"algorithm = \"naive\"\nmode = \"two_pass\"\n", "algorithm = \"naive\"\ntile = 64\n",
        "algorithm = \"naive\"\nrelease = \"end\"\n", "mode = \"materialise\"\nalgorithm = \"width\"\n",
        "mode = \"materialise\"\ntile = 64\n"})
    check_refused(std::string("[privacy]\n") + without_effect, "no effect");
}

TEST_CASE("keys and modes of earlier versions are errors that say what to use, and inputs of checkpoints are read") {
  const std::string text = kPrivate + "mode = \"recompute\"\nmode_of = [\"block_0: materialise\"]\nalgorithm_of = []\n";
  const std::string message = problem(text);
  CAPTURE(message);
  for (const char* part : {"mode = \"recompute\" is of an earlier version; take \"auto\", or \"two_pass\"",
                           "unknown key \"mode_of\" in [privacy] (of an earlier version); privacy.mode holds",
                           "unknown key \"algorithm_of\" in [privacy] (of an earlier version); privacy.algorithm"})
    CHECK(message.find(part) != std::string::npos);
  language_model::Configuration configuration;
  const input::Schema keys = language_model::schema(configuration);
  input::read(keys, text, "manifest.json", {}, input::Writer::checkpoint);
  CHECK(configuration.privacy.enabled);
  CHECK(configuration.privacy.mode == Mode::automatic);
  // Resumed with "auto": a change that has to be accepted.
  const std::vector<input::Change> changes = input::changed_keys(keys, text, "manifest.json");
  CHECK(std::any_of(changes.begin(), changes.end(), [](const input::Change& change) {
    return change.path == "privacy.mode" && change.resume == input::Resume::changeable;
  }));
}

}  // namespace weft::privacy
