// SPDX-License-Identifier: Apache-2.0
#include "dataset/dataset_settings.hpp"

#include <fmt/format.h>

#include "input/schema.hpp"
#include "kernels/constants.hpp"

namespace weft::dataset {
namespace {

// Sizes are bounded so that no product of them, in bytes, exceeds 64 bits.
constexpr double kMostTokens = 1 << 28;

}  // namespace

void add_keys(input::Schema& schema, Settings& data) {
  schema.table("data", "Activations to learn from, and how they become batches.");
  schema.add("data.train", data.train, "directory of the training activations").path_name().free();
  schema.add("data.validation", data.validation, "directory of the validation activations; \"\" = none")
      .path_name()
      .free();
  schema
      .add("data.model", data.model,
           "language model that computes the activations while training runs, in place of data.train: a run, a "
           "checkpoint or a directory of Hugging Face; \"\" = none")
      .path_name()
      .not_with("data.train", {}, "rows come from a model or from files")
      .free();
  schema.add("data.text", data.text, "text or token files for data.model; [] = the text that the model was trained on")
      .path_name()
      .only_with("data.model")
      .free();
  schema
      .add(
          "data.validation_text", data.validation_text,
          "text or token files for validation with data.model; [\"held_out\"] = the part of its text that its training "
          "held out")
      .path_name()
      .only_with("data.model")
      .not_with("data.validation", {}, "one set is evaluated")
      .free();
  schema
      .add("data.sequence", data.sequence,
           "tokens per text segment of data.model; 0 = as in its training (a directory of Hugging Face: at most 1024)")
      .in("tokens")
      .at_least(0)
      .at_most(kMostTokens)
      .only_with("data.model");
  schema
      .add("data.statistics_rows", data.statistics_rows,
           "rows at the beginning of the training data from which mean and scale are computed; 0 = all")
      .in("rows")
      .at_least(0)
      .derived(fmt::format("0, with data.model {}", kModelStatisticsRows),
               [&data] { return input::Value(data.model.empty() ? std::int64_t{0} : kModelStatisticsRows); });
  schema.add("data.batch_tokens", data.batch_tokens, "tokens per step, all ranks together")
      .in("tokens")
      .at_least(1)
      .at_most(kMostTokens)
      .changeable();
  schema
      .add("data.micro_tokens", data.micro_tokens, "tokens decoded at a time on a rank; 0 = chosen to fit into memory")
      .in("tokens")
      .at_least(0)
      .at_most(kMostTokens)
      .free();
  schema.add("data.normalise", data.normalise,
             {{"per_dimension", Normalise::per_dimension}, {"scalar", Normalise::scalar}, {"none", Normalise::none}},
             "normalisation of activations: by the standard deviation of each dimension, by one number per "
             "layer, or none");
  schema.add("data.targets", data.targets, {{"outputs", Targets::outputs}, {"inputs", Targets::inputs}},
             "what is reconstructed: the targets in the files, or the inputs (a sparse autoencoder)");
  schema
      .add(
          "data.block_rows", data.block_rows,
          "consecutive rows read at once, or computed in one forward pass of data.model; part of the order of the data")
      .in("rows")
      .at_least(1)
      .at_most(kMostTokens)
      .derived(fmt::format("256, with data.model {}", kModelBlockRows),
               [&data] { return input::Value(data.model.empty() ? std::int64_t{256} : kModelBlockRows); });
  schema
      .add("data.window_rows", data.window_rows,
           "rows shuffled together; all ranks together hold twice as many in memory")
      .in("rows")
      .at_least(1)
      .at_most(kMostTokens);
  schema
      .add("data.stored_as", data.stored_as,
           "\"bf16\": 16-bit integers in the files are bf16 bit patterns; \"\" = as type and attributes of the file "
           "say")
      .one_of({"", "bf16"});
  schema
      .add("data.layers", data.layers,
           "layers that the files must have; 0 = what they have. With d_model, --dry-run plans without the files")
      .at_least(0)
      .at_most(kernels::kMostLayers)
      .free();
  schema.add("data.d_model", data.d_model, "dimensions that the files must have; 0 = what they have")
      .at_least(0)
      .at_most(1 << 20)
      .required_with("data.layers", {}, "one alone does not determine the sizes of the model")
      .free();
  schema.add("data.accept_changed", data.accept_changed, "resume although the fingerprint of the dataset changed")
      .free();

  schema.rule({"data.micro_tokens", "data.batch_tokens"}, [&data]() -> std::string {
    if (data.micro_tokens <= data.batch_tokens) return {};
    return fmt::format(
        "data.micro_tokens = {} is more than data.batch_tokens = {} (a part cannot exceed the whole); take 0 to let "
        "Weft choose",
        data.micro_tokens, data.batch_tokens);
  });
  schema.rule({"data.window_rows", "data.block_rows"}, [&data]() -> std::string {
    if (data.window_rows % data.block_rows == 0) return {};
    return fmt::format(
        "data.window_rows = {} is not a multiple of data.block_rows = {} (a window consists of whole blocks); take {}",
        data.window_rows, data.block_rows, (data.window_rows / data.block_rows + 1) * data.block_rows);
  });
}

}  // namespace weft::dataset
