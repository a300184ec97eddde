// SPDX-License-Identifier: Apache-2.0
#include "language_model/settings/adapter_keys.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "language_model/blocks/model_parameters.hpp"

namespace weft::language_model {
namespace {

constexpr double kMostRank = 1 << 16, kMostAlpha = 1e6;

std::vector<std::string> names_of_targets(const ModelSettings& model) {
  std::vector<std::string> names;
  for (LoraTarget& target : lora_targets(model)) names.push_back(std::move(target.name));
  return names;
}

std::string targets_problem(const LoraSettings& lora, const ModelSettings& model) {
  if (lora.targets.empty()) return "lora.targets is empty (nothing would be trained); name linear layers";
  const std::vector<LoraTarget> known = lora_targets(model);
  for (auto name = lora.targets.begin(); name != lora.targets.end(); ++name) {
    const auto target =
        std::find_if(known.begin(), known.end(), [&](const LoraTarget& each) { return each.name == *name; });
    if (target == known.end())
      return fmt::format(
          "lora.targets contains \"{}\", which this model does not have (its linear layers: {}); "
          "remove it",
          *name, fmt::join(names_of_targets(model), ", "));
    if (std::find(lora.targets.begin(), name, *name) != name)
      return fmt::format("lora.targets contains \"{}\" twice (a linear layer has one adapter); remove one", *name);
    if (const std::int64_t most = std::min(target->outputs, target->inputs); lora.rank > most)
      return fmt::format(
          "lora.rank = {} is more than the smaller dimension of \"{}\", {} x {} (its product has no "
          "larger rank); take at most {}",
          lora.rank, *name, target->outputs, target->inputs, most);
  }
  return {};
}

}  // namespace

void add_keys(input::Schema& schema, LoraSettings& lora, const ModelSettings& model) {
  schema.table("lora", "Low-rank adapters: the initial model is frozen, additional small matrices are trained.");
  schema
      .add("lora.rank", lora.rank,
           "rows of A and columns of B in W + alpha / rank B A; 0 = no adapters, all parameters are trained")
      .at_least(0)
      .at_most(kMostRank);
  schema.add("lora.alpha", lora.alpha, "the product B A is multiplied by alpha / rank")
      .more_than(0)
      .at_most(kMostAlpha)
      .only_with("lora.rank", {}, "there are no adapters");
  schema
      .add("lora.targets", lora.targets,
           "linear layers of each block with adapters: query, key, value, output (of the attention), gate (of a gated "
           "MLP), up, down")
      .derived("all of the model", [&model] { return input::Value(names_of_targets(model)); })
      .only_with("lora.rank", {}, "there are no adapters");
  schema
      .add("lora.dropout", lora.dropout,
           "probability with which an element of the input of an adapter is dropped in training")
      .at_least(0)
      .at_most(0.99)
      .only_with("lora.rank", {}, "there are no adapters")
      .not_with("parallel.tensor", {}, "masks follow the columns of whole inputs, of which a rank has some")
      .not_with(
          "privacy.enabled", {},
          "masks are drawn by the place in the batch, so that one record more would change the gradients of the others")
      .changeable();
  schema
      .add("lora.initial", lora.initial,
           "directory with the adapters of a PEFT library (adapter_config.json) that the training begins with; \"\" = "
           "new ones, with which the model begins as it is")
      .path_name()
      .only_with("lora.rank", {}, "there are no adapters");
  schema
      .add("lora.base", lora.base,
           {{"stored", LoraBase::stored}, {"bf16", LoraBase::bf16}, {"int8", LoraBase::int8}, {"nf4", LoraBase::nf4}},
           "storage of the frozen weights: stored as optimizer.state stores trained ones; bf16; int8 and nf4: those of "
           "the linear layers of the blocks in 8 or 4 bits with coded scales (QLoRA), embedding and head in bf16")
      .only_with("lora.rank", {}, "there are no adapters");
  schema.rule({"lora.targets", "lora.rank"}, [&lora, &model]() -> std::string {
    return lora.rank > 0 ? targets_problem(lora, model) : std::string();
  });
}

}  // namespace weft::language_model
