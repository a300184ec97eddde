// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/parameter_list.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace weft::language_model {

using model::Cut;
using model::ParameterSpec;

namespace {

constexpr double kDeviation = 0.02;

constexpr Cut by_output(std::int64_t unit = 1) { return {0, parallel::kTensorAxis, unit}; }
constexpr Cut by_input(std::int64_t unit) { return {1, parallel::kTensorAxis, unit}; }

/// The adapter of a target; its A is cut as the inputs are, its B as the outputs are.
struct AdapterSpecs {
  ParameterSpec a, b;
  AdapterSpecs(const ParameterSpec& target, std::int64_t rank) {
    const std::string name = target.name.substr(0, target.name.size() - kAdapterTarget.size());
    const std::int64_t outputs = target.shape[0], inputs = target.shape[1];
    const bool by_input = target.cut.axis == 1;
    a = {.name = name + std::string(kAdapterA),
         .shape = {rank, inputs},
         .cut = by_input ? target.cut : Cut{},
         .initial = model::uniform(1 / std::sqrt(static_cast<double>(inputs)), kernels::Purpose::model_initial),
         .weight_decay = true,
         .group = target.group.empty() ? "" : target.group + "_lora_a",
         .unit = target.unit};
    b = {.name = name + std::string(kAdapterB),
         .shape = {outputs, rank},
         .cut = by_input ? Cut{} : target.cut,
         .initial = model::constant(0),
         .weight_decay = true,
         .unit = target.unit};
  }
};

/// Prefix of the name of a parameter: "block_3/" for a parameter of a block, "" for others.
std::string block_of(const ParameterSpec& spec) {
  return spec.name.starts_with("block_") ? spec.name.substr(0, spec.name.find('/') + 1) : "";
}

}  // namespace

std::int64_t Product::outputs() const {
  std::int64_t sum = 0;
  for (const Outputs& part : parts) sum += part.width;
  return sum;
}

/// Adds a matrix [rows, columns].
void ParameterList::matrix(std::string name, std::int64_t rows, std::int64_t columns, Cut cut, std::string group,
                           double deviation) {
  specs.push_back({.name = std::move(name),
                   .shape = {rows, columns},
                   .cut = cut,
                   .initial = model::normal(deviation, kernels::Purpose::model_initial),
                   .weight_decay = true,
                   .group = std::move(group)});
}

void ParameterList::table(std::string name, std::int64_t ids, bool whole) {
  matrix(std::move(name), ids, model_.d_model, whole ? Cut{} : by_output(), "", kDeviation);
}

void ParameterList::vector(std::string name, std::int64_t size, double value, Cut cut, std::string group) {
  specs.push_back({.name = std::move(name),
                   .shape = {size},
                   .cut = cut,
                   .update = model::Update::everywhere,
                   .initial = model::constant(value),
                   .group = std::move(group)});
}

void ParameterList::shared_by_heads(std::string name, std::int64_t size) {
  vector(std::move(name), size, 1);
  specs.back().partial_gradient = true;
}

void ParameterList::by_outputs(std::string name, const Outputs& outputs) {
  vector(std::move(name), outputs.width, 1, by_output(outputs.unit));
}

void ParameterList::norm(const std::string& name) {
  vector(name + "/weight", model_.d_model, 1);
  if (model_.norm == Norm::layer && model_.bias) vector(name + "/bias", model_.d_model, 0);
}

void ParameterList::product(const std::string& prefix, std::vector<Outputs> parts, double share) {
  std::string group = prefix;
  for (const Outputs& part : parts) group += part.name + "_";
  for (const auto& [name, width, unit] : parts)
    matrix(prefix + name + "/weight", width, model_.d_model, by_output(unit), group + "weight", kDeviation);
  // They are one product: all parts have a bias or none.
  if (model_.has_bias(parts.front().name))
    for (const auto& [name, width, unit] : parts)
      vector(prefix + name + "/bias", width, 0, by_output(unit), group + "bias");
  products.push_back({.prefix = prefix, .parts = std::move(parts), .inputs = model_.d_model, .share = share});
}

void ParameterList::output(const std::string& prefix, const std::string& name, std::int64_t inputs, std::int64_t unit,
                           double share) {
  const double deviation = kDeviation / std::sqrt(2.0 * static_cast<double>(model_.layers));
  matrix(prefix + name + "/weight", model_.d_model, inputs, by_input(unit), "", deviation);
  if (model_.has_bias(name)) vector(prefix + name + "/bias", model_.d_model, 0);
  products.push_back(
      {.prefix = prefix, .parts = {{name, model_.d_model}}, .inputs = inputs, .writes_residual = true, .share = share});
}

void ParameterList::describe(const std::string& words) {
  if (std::find(sizes.begin(), sizes.end(), words) == sizes.end()) sizes.push_back(words);
}

void ParameterList::number_units() {
  std::string block;
  std::size_t unit = 0;
  for (ParameterSpec& spec : specs) {
    const std::string of_spec = block_of(spec);
    if (of_spec != block) ++unit;
    block = of_spec;
    spec.unit = unit;
  }
}

void ParameterList::add_adapters(const LoraSettings& lora) {
  auto next = static_cast<std::uint64_t>(model::elements_of(specs));
  std::set<std::string> targets, multiplied;
  for (const Product& product : products)
    for (const Outputs& part : product.parts) {
      std::string name = product.prefix + part.name + std::string(kAdapterTarget);
      if (lora.adapts(part.name)) targets.insert(name);
      multiplied.insert(std::move(name));
    }
  std::vector<ParameterSpec> all, as, bs;  // `as` and `bs`: of this block
  const auto end_block = [&] {
    for (std::vector<ParameterSpec>* adapters : {&as, &bs}) {
      for (ParameterSpec& spec : *adapters) {
        spec.first_element = next;
        next += static_cast<std::uint64_t>(spec.elements());
        all.push_back(std::move(spec));
      }
      adapters->clear();
    }
  };
  std::string block;
  for (ParameterSpec& spec : specs) {
    if (const std::string of_spec = block_of(spec); of_spec != block) {
      end_block();
      block = of_spec;
    }
    if (targets.contains(spec.name)) {
      AdapterSpecs adapter(spec, lora.rank);
      as.push_back(std::move(adapter.a));
      bs.push_back(std::move(adapter.b));
    }
    spec.frozen = true;
    if (lora.base != LoraBase::stored && spec.is_matrix()) {
      spec.storage = kernels::StorageType::bf16;
      if (multiplied.contains(spec.name)) spec.packing = lora.packing();
    }
    all.push_back(std::move(spec));
  }
  end_block();
  specs = std::move(all);
}

bool is_adapter(const ParameterSpec& spec) { return spec.name.ends_with(kAdapterA) || spec.name.ends_with(kAdapterB); }

}  // namespace weft::language_model
