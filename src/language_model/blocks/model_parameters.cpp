// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/model_parameters.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "language_model/blocks/block_list.hpp"

namespace weft::language_model {

using model::ParameterSpec;

namespace {

/// Products over the vocabulary are fast on a GPU if it is a multiple of this.
constexpr std::int64_t kHeadRows = 64;

}  // namespace

ParameterList declared_parameters(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  ParameterList list(model);
  list.table("embedding/tokens", architecture.vocabulary);
  if (model.tied) list.pad_rows(kHeadRows);
  if (model.position == Position::learned) list.table("embedding/positions", architecture.longest_text(), true);
  for (const ResidualSublayer& sublayer : make_sublayers(architecture)) sublayer.declare(list, model);
  list.norm("final_norm");
  if (!model.tied) {
    list.table("head/weight", architecture.vocabulary);
    list.pad_rows(kHeadRows);
  }
  model::number_elements(list.specs);
  list.number_units();
  for (ParameterSpec& spec : list.specs) spec.frozen = !is_trained(architecture, spec.name);
  if (architecture.lora.rank > 0) list.add_adapters(architecture.lora);
  return list;
}

std::vector<ParameterSpec> parameter_specs(const Architecture& architecture) {
  return std::move(declared_parameters(architecture).specs);
}

bool is_of_part(const std::string& parameter, const std::string& part) {
  if (part == "norms") return parameter.find("norm/") != std::string::npos;
  if (part == "biases") return parameter.ends_with("/bias");
  const bool in_blocks = part == "attention" || part == "mlp";
  return in_blocks ? parameter.find("/" + part + "/") != std::string::npos : parameter.starts_with(part + "/");
}

bool is_trained(const Architecture& architecture, const std::string& parameter) {
  const std::vector<std::string>& train = architecture.model.train;
  return architecture.lora.rank == 0 &&
         (train.empty() || std::any_of(train.begin(), train.end(),
                                       [&](const std::string& part) { return is_of_part(parameter, part); }));
}

std::string train_problem(const ModelSettings& model) {
  const std::vector<ParameterSpec> specs = parameter_specs({.model = model});
  for (const std::string& part : model.train)
    if (std::none_of(specs.begin(), specs.end(),
                     [&](const ParameterSpec& spec) { return is_of_part(spec.name, part); }))
      return fmt::format(
          "language_model.train contains \"{}\", of which this model has no parameters{}; name embedding, attention, "
          "mlp, norms, biases, head or a block (block_0)",
          part, part == "head" && model.tied ? " (its head is the embedding)" : "");
  return {};
}

std::vector<LoraTarget> lora_targets(const ModelSettings& model) {
  ParameterList list(model);
  for (const ResidualSublayer& sublayer : make_sublayers({.model = model})) sublayer.declare(list, model);
  std::vector<LoraTarget> targets;
  for (const Product& product : list.products)
    for (const Outputs& part : product.parts) {
      const std::string in_block = product.prefix.substr(product.prefix.find('/') + 1) + part.name;
      const bool is_known = std::any_of(targets.begin(), targets.end(),
                                        [&](const LoraTarget& each) { return each.parameter == in_block; });
      if (!is_known) targets.push_back({part.name, in_block, part.width, product.inputs});
    }
  return targets;
}

std::string biases_problem(const ModelSettings& model) {
  ParameterList list(model);
  for (const ResidualSublayer& sublayer : make_sublayers({.model = model})) sublayer.declare(list, model);
  std::vector<std::string> known;
  for (const Product& product : list.products) {
    std::vector<std::string> names;
    for (const Outputs& part : product.parts) names.push_back(part.name);
    for (const std::string& name : names)
      if (model.has_bias(name) != model.has_bias(names.front()))
        return fmt::format("language_model.biases has some of {} (they are one product); name all of them, or none",
                           fmt::join(names, ", "));
    known.insert(known.end(), names.begin(), names.end());
  }
  for (auto name = model.biases.begin(); name != model.biases.end(); ++name) {
    if (std::find(known.begin(), known.end(), *name) == known.end())
      return fmt::format("language_model.biases contains \"{}\", which is no product of this model; remove it", *name);
    if (std::find(model.biases.begin(), name, *name) != name)
      return fmt::format("language_model.biases contains \"{}\" twice; remove one", *name);
  }
  return {};
}

std::int64_t parameters_of(const Architecture& architecture) {
  return model::elements_of(parameter_specs(architecture));
}

std::string sizes_text(const Architecture& architecture) {
  const ParameterList list = declared_parameters(architecture);
  const ModelSettings& model = architecture.model;
  return fmt::format("{} layer{}, d_model {}, {}, vocabulary {}, {} parameters", model.layers,
                     model.layers == 1 ? "" : "s", model.d_model, fmt::join(list.sizes, ", "), architecture.vocabulary,
                     format::grouped(model::elements_of(list.specs)));
}

double flops_per_token(const Architecture& architecture, std::int64_t length) {
  const ParameterList list = declared_parameters(architecture);
  double flops = 4.0 * static_cast<double>(model::elements_of(list.specs)) +
                 2.0 * static_cast<double>(model::trained_elements_of(list.specs));
  for (const Product& product : list.products)
    flops -= (architecture.lora.rank > 0 ? 4 : 6) * (static_cast<double>(product.elements()) - product.multiplied());
  // Three times the operations of the forward pass: recomputation of scores does not count.
  for (const ResidualSublayer& each : make_sublayers(architecture))
    for (const SublayerWork& work : each.sublayer().work(static_cast<double>(length))) flops += 3 * work.forward.flops;
  return flops;
}

}  // namespace weft::language_model
