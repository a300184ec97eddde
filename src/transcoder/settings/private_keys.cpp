// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "transcoder/settings/settings_schema.hpp"

namespace weft::transcoder {
namespace {

constexpr double kMostRecordRows = 1 << 20;

constexpr const char* kWritten = "private steps do not form the gradients of records for it";
constexpr const char* kOneForm =
    "a private step of a transcoder forms norms and clipped sums from its sparse lists, in one way; the key is for "
    "language models";

/// Adds the conditions that exclude keys from a private run, with the reason.
void add_exclusions(input::Schema& schema) {
  const auto exclude = [&](const char* path, const char* why) { schema.at(path).not_with("privacy.enabled", {}, why); };
  const char* const of_dead = "which features are dead follows from private data, to which no noise is added";
  const char* const of_norms =
      "its gradient by the norms of decoder rows is not a product of the rows of a record, from which the norm of a "
      "record's gradient is formed; activation = \"topk\" has sparse features without it";
  exclude("transcoder.auxk", of_dead);
  exclude("transcoder.resample_every", of_dead);
  exclude("transcoder.encoder_bias_initial",
          "the biases would follow from the first batch, to which no noise is added");
  exclude("transcoder.initial", "the account would not cover the data that its weights were trained on");
  exclude("transcoder.sparsity", of_norms);
  exclude("transcoder.preactivation_penalty", of_norms);
  exclude("data.model",
          "records are drawn one by one, a language model computes blocks of rows; weft lm harvest writes "
          "its activations for data.train");
  exclude("data.statistics_rows", "mean and scale are those of the validation data, all of them");
  exclude("transcoder.ranking",
          "mean and deviation over the batch couple its records; a ranking by norms of decoder rows is not written");
  exclude("transcoder.error", "the variance of the batch couples its records; errors of raw targets are not written");
  for (const char* path : {"transcoder.skip", "transcoder.decoder_bias", "transcoder.decoder_affine"})
    exclude(path, kWritten);
  for (const char* path : {"privacy.algorithm", "privacy.mode", "privacy.tile", "privacy.products", "privacy.release"})
    exclude(path, kOneForm);
}

/// Describes a setting that a private step does not support, with the reason; "" if there is none.
std::string refusal(const Configuration& configuration) {
  const ModelSettings& model = configuration.transcoder;
  if (model.activation == Activation::batch_topk)
    return "transcoder.activation = \"batch_topk\" with privacy.enabled (a record more in the batch changes which "
           "features of the others are active: their gradients would depend on it); take \"topk\", \"relu\" or "
           "\"jumprelu\"";
  if (configuration.data.validation.empty() && !configuration.data.train.empty())  // a benchmark has neither
    return "privacy.enabled without data.validation (normalisation and measures are taken from the validation data, "
           "which are public: statistics of the training data would be released without noise); give it";
  return {};
}

}  // namespace

void add_private_keys(input::Schema& schema, Configuration& configuration) {
  schema
      .add("privacy.record_rows", configuration.privacy.record_rows,
           "unit = \"sequence\": consecutive rows of a file that are one record")
      .in("rows")
      .at_least(0)
      .at_most(kMostRecordRows);
  const privacy::Settings& privacy = configuration.privacy;
  privacy::add_rules(schema, privacy, configuration.precision);
  add_exclusions(schema);
  schema.rule({"privacy.enabled"},
              [&configuration] { return configuration.privacy.enabled ? refusal(configuration) : std::string(); });
  schema.rule({"privacy.record_rows", "privacy.unit"}, [&configuration]() -> std::string {
    const privacy::Settings& settings = configuration.privacy;
    if (!settings.enabled) return {};
    if (settings.joins_sequences())
      return "privacy.unit = \"document\", \"example\" or \"owner\" of a transcoder (activation files do not say where "
             "documents begin, and whose they are); take \"sequence\" with privacy.record_rows";
    if (settings.unit == privacy::Unit::sequence && settings.record_rows == 0)
      return "privacy.unit = \"sequence\" without privacy.record_rows (activation files do not say where a sequence "
             "ends); give the rows of a record, or take unit = \"token\", which protects each row alone";
    if (settings.unit == privacy::Unit::token && settings.record_rows > 1)
      return fmt::format(
          "privacy.record_rows = {} with privacy.unit = \"token\" (a record is one row); leave it out, or take unit = "
          "\"sequence\"",
          settings.record_rows);
    if (configuration.data.batch_tokens % record_rows(configuration) == 0) return {};
    return fmt::format(
        "data.batch_tokens = {} is not a multiple of privacy.record_rows = {} (a step consists of whole records); take "
        "{}",
        configuration.data.batch_tokens, settings.record_rows,
        (configuration.data.batch_tokens / settings.record_rows + 1) * settings.record_rows);
  });
}

}  // namespace weft::transcoder
