// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/layers.hpp"

#include <algorithm>
#include <utility>

namespace weft::language_model {

Layers::Layers(const model::Parameters& parameters, std::span<const Product> products, const ModelSettings& model,
               const kernels::Execution& execution, kernels::Array<const float> rotary)
    : parameters_(parameters),
      model_(model),
      rotary_(rotary),
      tokens_(parameters.index("embedding/tokens")),
      positions_(find("embedding/positions")),
      n_products_(products.size()) {
  for (const Product& product : products) {
    linears_.push_back(linear(product.prefix + product.parts.front().name, product.parts.size()));
    if (!product.writes_residual) linears_.back().norm = norm(product.sublayer() + "_norm");
  }
  linears_.push_back(model.tied ? Linear{.weight = tokens_, .matrix = token_embedding()} : linear("head", 1));
  if (execution.backend == kernels::Backend::cuda)
    linears_.back().matrix.rows = parameters.rows_in_memory(linears_.back().weight);
  for (std::size_t i = 0; i < n_products_; ++i) {
    Adapter adapter = this->adapter(linears_[i]);
    if (adapter.parts.empty()) continue;
    adapter.a.index = linears_.size();
    linears_.push_back(adapter.a);
    for (Adapter::Part& part : adapter.parts) {
      part.b.index = linears_.size();
      linears_.push_back(part.b);
    }
    linears_[i].adapter = adapters_.size();
    adapters_.push_back(std::move(adapter));
  }
  for (std::size_t i = 0; i <= n_products_; ++i) linears_[i].index = i;
}

kernels::Array<const float> Layers::rotary(std::int64_t block) const {
  const std::int64_t table = model_.rotary_table_of(block);
  if (table < 0) return {};
  const std::int64_t size = rotary_.size / model_.rotary_tables();
  return {rotary_.data + table * size, size};
}

/// The weights as products read them: of fp32 matrices that are stored as two planes, the bf16 one. A packed matrix has
/// the size and the type to which it is unpacked.
kernels::AnyMatrix Layers::matrix(std::size_t parameter) const {
  const kernels::ParameterRows& rows = parameters_.matrix(parameter);
  const bool packed = rows.packing != kernels::Packing::none;
  return {packed ? nullptr : rows.weight, packed ? kernels::Scalar::bf16 : parameters_.read_type(parameter), rows.rows,
          rows.columns, rows.columns};
}

std::size_t Layers::find(const std::string& name) const {
  const std::span<const model::ParameterSpec> specs = parameters_.specs();
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (specs[i].name == name) return i;
  return kNoParameter;
}

std::size_t Layers::first_of(const std::string& prefix) const {
  const std::span<const model::ParameterSpec> specs = parameters_.specs();
  return static_cast<std::size_t>(
      std::find_if(specs.begin(), specs.end(), [&](const auto& spec) { return spec.name.starts_with(prefix); }) -
      specs.begin());
}

const Linear& Layers::product(const std::string& name) const {
  const std::size_t weight = find(name + "/weight");
  return *std::find_if(linears_.begin(), linears_.end(), [&](const Linear& linear) { return linear.weight == weight; });
}

kernels::Array<const float> Layers::values(std::size_t parameter) const {
  if (parameter == kNoParameter) return {};
  return parameters_.vector(parameter).weight;
}

std::optional<NormLayer> Layers::norm(const std::string& name) const {
  NormLayer layer{.weight = find(name + "/weight"), .bias = find(name + "/bias"), .values = {}};
  if (layer.weight == kNoParameter) return std::nullopt;
  layer.values = {.kind = model_.norm,
                  .weight = values(layer.weight),
                  .bias = values(layer.bias),
                  .epsilon = static_cast<float>(model_.norm_epsilon)};
  return layer;
}

/// The product of `count` parameters, of which the first has this name.
Linear Layers::linear(const std::string& name, std::size_t count) const {
  Linear linear{.weight = find(name + "/weight"),
                .bias = find(name + "/bias"),
                .count = count,
                .matrix = matrix(find(name + "/weight"))};
  if (parameters_.specs()[linear.weight].packing != kernels::Packing::none)
    linear.packed = parameters_.matrix(linear.weight);
  linear.transposed = parameters_.specs()[linear.weight].transposed();
  linear.bias_values = values(linear.bias);
  // The others of the group follow in memory.
  for (std::size_t i = 1; i < linear.count; ++i) {
    linear.matrix.rows += parameters_.matrix(linear.weight + i).rows;
    linear.packed.rows = linear.matrix.rows;
    if (linear.bias != kNoParameter) linear.bias_values.size += values(linear.bias + i).size;
  }
  return linear;
}

/// Adapters of the parameters of a product; without parts if no parameter has one.
Adapter Layers::adapter(const Linear& linear) const {
  const std::span<const model::ParameterSpec> specs = parameters_.specs();
  const auto matrix_of = [&](const std::string& name) -> Linear {
    const std::size_t weight = find(name);
    return {.weight = weight, .matrix = matrix(weight), .transposed = specs[weight].transposed()};
  };
  Adapter adapter;
  std::int64_t output = 0;
  for (std::size_t i = linear.weight; i < linear.weight + linear.count; ++i) {
    const std::string name = specs[i].name.substr(0, specs[i].name.rfind('/'));
    if (find(name + "/lora_a") != kNoParameter) {
      Linear a = matrix_of(name + "/lora_a");
      if (adapter.parts.empty()) {
        adapter.a = std::move(a);
      } else {  // follows in memory
        ++adapter.a.count;
        adapter.a.matrix.rows += a.matrix.rows;
      }
      adapter.parts.push_back({matrix_of(name + "/lora_b"), output});
    }
    output += linear.transposed ? linear.outputs() : parameters_.matrix(i).rows;
  }
  return adapter;
}

}  // namespace weft::language_model
