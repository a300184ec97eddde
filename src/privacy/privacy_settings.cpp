// SPDX-License-Identifier: Apache-2.0
#include "privacy/privacy_settings.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "dataset/dataset_settings.hpp"
#include "dataset/tokens/token_settings.hpp"
#include "input/schema.hpp"

namespace weft::privacy {
namespace {

// Beyond these the guarantee means nothing, or the noise exceeds the range of fp32.
constexpr double kLargestEpsilon = 1e3, kLargestNoise = 1e6;
constexpr double kSmallestNoise = 1e-2;
constexpr double kLargestTile = 1 << 16;
constexpr double kMostPerRecord = 1 << 20;

constexpr const char* kChangedData =
    "the steps so far are accounted for the records of the data that the run began with; records of others are cut in "
    "other places, and need a new run";

/// Message about a key that has no effect with the other keys; "" if there is none.
std::string without_effect(const Settings& privacy) {
  const bool naive = privacy.algorithm == Algorithm::naive, stores = privacy.mode == Mode::materialise;
  if (naive)
    if (const char* key = privacy.mode != Mode::automatic     ? "mode"
                          : privacy.tile > 0                  ? "tile"
                          : privacy.release != Release::eager ? "release"
                                                              : nullptr)
      return fmt::format(
          "privacy.{} has no effect with privacy.algorithm = \"naive\" (which forms the gradient of each record and "
          "sums it at once); leave it out",
          key);
  if (stores)
    if (const char* key = privacy.algorithm != Algorithm::automatic ? "algorithm" : privacy.tile > 0 ? "tile" : nullptr)
      return fmt::format(
          "privacy.{} has no effect with privacy.mode = \"materialise\" (norms are those of the stored gradients of "
          "records); leave it out",
          key);
  return {};
}

void add_value_rules(input::Schema& schema, const Settings& privacy) {
  schema.rule({"privacy.epsilon", "privacy.noise_multiplier"}, [&privacy]() -> std::string {
    if (!privacy.enabled) return {};
    if (privacy.epsilon > 0 && privacy.noise_multiplier > 0)
      return fmt::format(
          "privacy.epsilon = {} and privacy.noise_multiplier = {} (each follows from the other); give one of them",
          privacy.epsilon, privacy.noise_multiplier);
    if (privacy.epsilon == 0 && privacy.noise_multiplier == 0)
      return "privacy.enabled = true without privacy.epsilon or privacy.noise_multiplier (the strength of the "
             "guarantee has no default); give one of them";
    if (privacy.noise_multiplier > 0 && privacy.noise_multiplier < kSmallestNoise)
      return fmt::format(
          "privacy.noise_multiplier = {} is less than {} (so little noise protects nothing); take 0.3 or more",
          privacy.noise_multiplier, kSmallestNoise);
    return {};
  });
  schema.rule({"privacy.delta"}, [&privacy]() -> std::string {
    if (!privacy.enabled || privacy.delta > 0) return {};
    return "privacy.enabled = true without privacy.delta (the probability with which epsilon may not hold has no "
           "default); take less than 1 / number of records, for example 1e-5";
  });
  schema.rule({"privacy.sampling"}, [&privacy]() -> std::string {
    if (!privacy.enabled || privacy.sampling == "poisson" || privacy.truncates()) return {};
    return fmt::format(
        "privacy.sampling = \"{}\" (the accountants assume that each record joins a step independently of all others; "
        "for shuffled or fixed batches their epsilon would be too small); take \"poisson\" or \"truncated_poisson\"",
        privacy.sampling);
  });
  schema.rule({"privacy.clipping", "privacy.scheme", "privacy.clip_function"}, [&privacy]() -> std::string {
    if (!privacy.adapts_clip()) return {};
    if (privacy.scheme != Scheme::flat)
      return "privacy.clipping = \"adaptive\" with a privacy.scheme of parts (one bound follows the norms of whole "
             "gradients); take \"flat\"";
    if (privacy.clip_function == ClipFunction::automatic)
      return "privacy.clipping = \"adaptive\" with privacy.clip_function = \"automatic\" (which scales every gradient "
             "to about the bound, so that the bound changes nothing but the scale); take \"abadi\"";
    return {};
  });
  schema.rule({"privacy.bands", "privacy.sampling", "privacy.clipping"}, [&privacy]() -> std::string {
    if (!privacy.enabled || privacy.bands == 1) return {};
    if (privacy.adapts_clip())
      return "privacy.clipping = \"adaptive\" with privacy.bands (the noise of a step cancels that of steps with "
             "another "
             "bound); take \"fixed\", or bands = 1";
    if (privacy.sampling == "poisson") return {};
    return fmt::format(
        "privacy.bands = {} with privacy.sampling = \"{}\" (the account of correlated noise is that of Poisson "
        "sampling); take \"poisson\", or bands = 1",
        privacy.bands, privacy.sampling);
  });
  schema.rule({"privacy.algorithm", "privacy.mode", "privacy.tile", "privacy.release"},
              [&privacy] { return privacy.enabled ? without_effect(privacy) : std::string(); });
}

}  // namespace

// A resumed run must not change what its guarantee depends on: such keys are neither changeable nor free. algorithm,
// mode, tile, products, overlap and release change speed, memory and rounding only.
void add_keys(input::Schema& schema, Settings& privacy) {
  schema.table("privacy", "Differentially private training: the gradient of each record is clipped, noise is added.");
  schema
      .add("privacy.epsilon", privacy.epsilon,
           "the guarantee after run.steps steps; the noise follows from it. 0 = noise_multiplier is given")
      .at_least(0)
      .at_most(kLargestEpsilon);
  schema
      .add("privacy.noise_multiplier", privacy.noise_multiplier,
           "standard deviation of the noise, relative to clip; epsilon follows from it. 0 = epsilon is given")
      .at_least(0)
      .at_most(kLargestNoise);
  schema.add("privacy.enabled", privacy.enabled, "train with a guarantee of differential privacy")
      .derived("true if epsilon or noise_multiplier is given",
               [&privacy] { return input::Value(privacy.epsilon > 0 || privacy.noise_multiplier > 0); });
  schema
      .add("privacy.delta", privacy.delta,
           "probability with which epsilon may not hold; less than 1 / number of records. No default")
      .at_least(0)
      .less_than(1);
  schema.add("privacy.clip", privacy.clip, "largest norm of the gradient of a record; larger ones are scaled down")
      .more_than(0)
      .at_most(kernels::kLargestClip);
  schema.add(
      "privacy.clipping", privacy.clipping, {{"fixed", BoundRule::fixed}, {"adaptive", BoundRule::adaptive}},
      "the bound of the norms: clip in every step, or from clip on one that follows a quantile of the norms, by a "
      "count with noise of its own");
  schema
      .add("privacy.clip_quantile", privacy.clip_quantile,
           "adaptive clipping: fraction of the norms that are to be at most the bound")
      .more_than(0)
      .less_than(1)
      .only_with("privacy.clipping", {"adaptive"});
  schema
      .add("privacy.clip_rate", privacy.clip_rate,
           "adaptive clipping: each step multiplies the bound by exp(-rate * (fraction of norms within it - quantile))")
      .more_than(0)
      .at_most(10)
      .only_with("privacy.clipping", {"adaptive"});
  schema
      .add(
          "privacy.count_noise", privacy.count_noise,
          "adaptive clipping: standard deviation of the noise on the count of records within the bound, more than half "
          "the noise multiplier. The gradient gets more noise, so that the account is that of the multiplier. 0 = a "
          "twentieth of the expected records of a step")
      .at_least(0)
      .at_most(kLargestNoise)
      .only_with("privacy.clipping", {"adaptive"});
  schema.add("privacy.sampling", privacy.sampling,
             "how records are drawn: \"poisson\", each one independently with the same probability; "
             "\"truncated_poisson\", and of more than most_records a random choice of so many");
  schema
      .add("privacy.most_records", privacy.most_records,
           "truncated sampling: most records of a step on all ranks, some standard deviations more than expected")
      .at_least(0)
      .required_with("privacy.sampling", {"truncated_poisson"});
  schema
      .add("privacy.bands", privacy.bands,
           "b: the noise of a step cancels a part of that of the b - 1 steps before it, whose noise is kept (b - 1 "
           "arrays of all trained parameters in fp32). Each record is drawn in every b-th step at most, with b times "
           "the probability. 1 = independent noise")
      .at_least(1)
      .at_most(static_cast<double>(kernels::kMostBands));
  schema
      .add("privacy.algorithm", privacy.algorithm,
           {{"auto", Algorithm::automatic},
            {"input_length", Algorithm::input_length},
            {"width", Algorithm::width},
            {"naive", Algorithm::naive}},
           "how norms are computed: by products over the positions (input_length), by Gram matrices of the "
           "positions (width), the cheaper one per layer (auto), or from the gradient of each record (naive: "
           "slow, for comparison)")
      .changeable();
  schema
      .add("privacy.mode", privacy.mode,
           {{"auto", Mode::automatic},
            {"book_keeping", Mode::book_keeping},
            {"two_pass", Mode::two_pass},
            {"materialise", Mode::materialise}},
           "how the clipped sum is computed: from gradients of the records of a micro-batch in bf16 "
           "(materialise), from kept inputs and output gradients of all layers (book_keeping), or by a second "
           "pass (two_pass); auto: the first of these that fits into memory")
      .retired_value("recompute", "take \"auto\", or \"two_pass\", which takes least memory")
      .changeable();
  schema.retired("privacy.mode_of", "privacy.mode holds for all blocks and the head; leave it out");
  schema.retired("privacy.algorithm_of",
                 "privacy.algorithm = \"auto\" takes the cheaper algorithm of each matrix; leave it out");
  schema
      .add("privacy.tile", privacy.tile,
           "positions that the norm kernels of products = \"library\" process at a time; 0 = automatic; any "
           "other value selects these kernels. Results change by rounding only")
      .in("tokens")
      .at_least(0)
      .at_most(kLargestTile)
      .changeable();
  schema
      .add("privacy.products", privacy.products,
           {{"library", kernels::ProductImplementation::library}, {"fused", kernels::ProductImplementation::fused}},
           "how norms and clipped sums are computed: by the dense library in a workspace (library), or on a GPU, for "
           "16-bit rows, by kernels that keep the gradients of records in registers (fused; elsewhere as library)")
      .changeable();
  schema.add("privacy.scheme", privacy.scheme,
             {{"flat", Scheme::flat}, {"per_layer", Scheme::per_layer}, {"group", Scheme::group}},
             "what is clipped: the whole gradient (flat), each parameter (per_layer) or each block (group); the parts "
             "together have at most the norm clip");
  schema.add(
      "privacy.clip_function", privacy.clip_function,
      {{"abadi", ClipFunction::abadi}, {"automatic", ClipFunction::automatic}, {"indicator", ClipFunction::indicator}},
      "factor of a gradient of norm n: min(1, clip / n); clip / (n + 0.01); 1, or 0 if n is more than clip");
  schema.add("privacy.accountant", privacy.accountant,
             {{"prv", AccountantKind::prv},
              {"pld", AccountantKind::pld},
              {"rdp", AccountantKind::rdp},
              {"gdp", AccountantKind::gdp}},
             "how epsilon is computed: prv (tight), pld (an upper bound), rdp (an upper bound, larger) or gdp "
             "(an approximation, no bound)");
  schema.add(
      "privacy.unit", privacy.unit,
      {{"sequence", Unit::sequence},
       {"token", Unit::token},
       {"document", Unit::document},
       {"example", Unit::example},
       {"owner", Unit::owner}},
      "the record: the unit that the guarantee protects. Of a language model also a whole document (document), a line "
      "of JSON Lines (example), or all lines of JSON Lines with the same value of owner_field (owner)");
  schema
      .add("privacy.owner_field", privacy.owner_field,
           "unit = \"owner\": the key of JSON Lines, a string or an integer, that says whom a line belongs to")
      .required_with("privacy.unit", {"owner"});
  schema
      .add("privacy.max_per_owner", privacy.max_per_owner,
           "most sequences of a record (an owner, a document or an example) that are used; of one with more, as many "
           "are chosen once, by run.seed. A micro-batch must hold them")
      .in("sequences")
      .at_least(0)
      .at_most(kMostPerRecord)
      .required_with("privacy.unit", {"document", "example", "owner"});
  schema
      .add("privacy.release", privacy.release, {{"eager", Release::eager}, {"end", Release::end}},
           "when the memory of a layer is freed: after the layer, or at the end of the backward pass (for "
           "measurements)")
      .free();
  schema.add("privacy.noise_key", privacy.noise_key, {{"system", KeySource::system}, {"test", KeySource::test}},
             "the secret of noise and sampling: from the operating system, stored in the checkpoint; test: from "
             "run.seed, repeatable and not private");
  add_value_rules(schema, privacy);
}

void add_rules(input::Schema& schema, const Settings& privacy, const device::Precision& precision) {
  schema.at("run.nonfinite")
      .not_with(
          "privacy.enabled", {},
          "whether a step is skipped would depend on private data; a record without a finite gradient is left out "
          "of the sum alone");
  schema.at("data.accept_changed").not_with("privacy.enabled", {}, kChangedData);
  schema.rule({"device.precision", "privacy.enabled"}, [&privacy, &precision]() -> std::string {
    if (!privacy.enabled || precision != device::Precision::fp16) return {};
    return "device.precision = \"fp16\" with privacy.enabled (its loss scaling skips steps depending on private data); "
           "take \"bf16\"";
  });
}

void add_sequence_rules(input::Schema& schema, const Settings& privacy) {
  schema.at("data.order")
      .not_with("privacy.enabled", {},
                "each step draws every record with the same probability: the guarantee depends on it; a curriculum "
                "would also follow statistics of private data");
  schema.at("data.pack")
      .not_with("privacy.enabled", {}, "a record is a segment of sequence + 1 ids of the stream, or one document");
  schema.at("data.sequence_start")
      .not_with("privacy.enabled", {},
                "a record is a sequence: its length, and with it what is protected, would change during the run");
  schema.rule({"privacy.unit"}, [&privacy]() -> std::string {
    if (!privacy.enabled || privacy.unit != Unit::token) return {};
    return "privacy.unit = \"token\" (attention couples the tokens of a sequence: the gradient of a token's loss "
           "depends on the tokens before it, so no token has a contribution of its own); take \"sequence\"";
  });
}

}  // namespace weft::privacy
