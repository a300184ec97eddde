// SPDX-License-Identifier: Apache-2.0
#include "language_model/model.hpp"

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::language_model {
namespace {

/// Key of the context in Manifest::extra.
constexpr const char* kContext = "context";
/// Limits for untrusted manifests: no product of sizes exceeds 64 bits.
constexpr std::int64_t kLongestContext = 1 << 28;

}  // namespace

Model::Model(const Architecture& architecture, kernels::StatePolicy policy, const parallel::GridShape& grid,
             std::int64_t rank, const kernels::Execution& execution, training::Moments moments)
    : architecture_(architecture),
      part_(part_of(architecture, grid.size(parallel::kTensorAxis), grid.index_of(rank, parallel::kTensorAxis))),
      execution_(execution),
      parameters_(parameter_specs(architecture), policy, grid, rank, execution, moments),
      rotary_(rotary_elements(architecture)),
      tokens_(parameters_.index("embedding/tokens")),
      positions_(find("embedding/positions")),
      final_norm_(*norm("final_norm")) {
  if (rotary_.size() > 0) {
    const device::HostBuffer<float> host(rotary_.size());
    kernels::rotary_table(architecture.model.rope_base, architecture.model.rope_scaling, architecture.model.head_size(),
                          architecture.positions, host.data());
    device::copy(execution, rotary_.data(), host.data(), host.bytes(), device::Direction::to_device);
    kernels::fence(execution);
  }
  for (std::int64_t layer = 0; layer < architecture.model.layers; ++layer) blocks_.push_back(block(layer));
  if (architecture.model.tied)
    head_ = {.weight = tokens_, .matrix = token_embedding()};
  else
    head_ = linear("", {"head"});
  if (execution.backend == kernels::Backend::cuda) head_.matrix.rows = parameters_.rows_in_memory(head_.weight);
  std::size_t index = 0;
  for (Block& block : blocks_)
    for (Linear* linear : {&block.projection, &block.attention_output, &block.up, &block.down}) linear->index = index++;
  head_.index = index++;
  for (Block& block : blocks_)
    for (Linear* linear : {&block.projection, &block.attention_output, &block.up, &block.down}) {
      Adapter adapter = this->adapter(*linear);
      if (adapter.parts.empty()) continue;
      adapter.a.index = index++;
      for (Adapter::Part& part : adapter.parts) part.b.index = index++;
      linear->adapter = adapters_.size();
      adapters_.push_back(std::move(adapter));
    }
}

std::vector<const Linear*> Model::linears() const {
  std::vector<const Linear*> all;
  for (const Block& block : blocks_)
    all.insert(all.end(), {&block.projection, &block.attention_output, &block.up, &block.down});
  all.push_back(&head_);
  for (const Adapter& adapter : adapters_) {
    all.push_back(&adapter.a);
    for (const Adapter::Part& part : adapter.parts) all.push_back(&part.b);
  }
  return all;
}

Block Model::block(std::int64_t layer) const {
  const ModelSettings& model = architecture_.model;
  const std::string name = block_name(layer), attention = name + "attention/";
  Block block;
  block.first = find(name + (model.normalises_inputs() ? "attention_norm/weight" : "attention/query/weight"));
  block.attention_norm = norm(name + "attention_norm");
  block.attention_post_norm = norm(name + "attention_post_norm");
  block.projection = linear(attention, {"query", "key", "value"});
  block.attention_output = linear(attention, {"output"});
  block.query_norm = find(attention + "query_norm/weight");
  block.key_norm = find(attention + "key_norm/weight");
  block.temperature = find(attention + "temperature");
  block.query_key = {.heads = part_.model.heads,
                     .kv_heads = part_.model.kv_heads,
                     .head_size = model.head_size(),
                     .norm = model.qk_norm,
                     .epsilon = static_cast<float>(model.norm_epsilon),
                     .query_weight = values(block.query_norm),
                     .key_weight = values(block.key_norm),
                     .temperature = values(block.temperature).data,
                     .rotary = rotary_.array(),
                     .positions = {}};
  block.mlp_norm = norm(name + "mlp_norm");
  block.mlp_post_norm = norm(name + "mlp_post_norm");
  block.up = kernels::is_gated(model.mlp) ? linear(name + "mlp/", {"gate", "up"}) : linear(name + "mlp/", {"up"});
  block.down = linear(name + "mlp/", {"down"});
  return block;
}

/// The weights as products read them: of fp32 matrices that are stored as two planes, the bf16 one.
kernels::AnyMatrix Model::matrix(std::size_t parameter) const {
  const kernels::ParameterRows& rows = parameters_.matrix(parameter);
  const bool whole = rows.policy == kernels::StatePolicy::fp32 && rows.weight_rest == nullptr;
  return {rows.weight, whole ? kernels::Scalar::fp32 : kernels::Scalar::bf16, rows.rows, rows.columns, rows.columns};
}

std::size_t Model::find(const std::string& name) const {
  const std::span<const training::ParameterSpec> specs = parameters_.specs();
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (specs[i].name == name) return i;
  return kNoParameter;
}

kernels::Array<const float> Model::values(std::size_t parameter) const {
  if (parameter == kNoParameter) return {};
  return parameters_.vector(parameter).weight;
}

std::optional<NormLayer> Model::norm(const std::string& name) const {
  NormLayer layer{.weight = find(name + "/weight"), .bias = find(name + "/bias"), .values = {}};
  if (layer.weight == kNoParameter) return std::nullopt;
  layer.values = {.kind = architecture_.model.norm,
                  .weight = values(layer.weight),
                  .bias = values(layer.bias),
                  .epsilon = static_cast<float>(architecture_.model.norm_epsilon)};
  return layer;
}

Linear Model::linear(const std::string& prefix, std::initializer_list<const char*> names) const {
  const std::string first = prefix + *names.begin();
  Linear linear{.weight = find(first + "/weight"),
                .bias = find(first + "/bias"),
                .count = names.size(),
                .matrix = matrix(find(first + "/weight"))};
  linear.transposed = parameters_.specs()[linear.weight].transposed();
  linear.bias_values = values(linear.bias);
  // The others of the group follow in memory.
  for (std::size_t i = 1; i < linear.count; ++i) {
    linear.matrix.rows += parameters_.matrix(linear.weight + i).rows;
    if (linear.bias != kNoParameter) linear.bias_values.size += values(linear.bias + i).size;
  }
  return linear;
}

/// Adapters of the parameters of a product; without parts if no parameter has one.
Adapter Model::adapter(const Linear& linear) const {
  const std::span<const training::ParameterSpec> specs = parameters_.specs();
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

std::int64_t rotary_elements(const Architecture& architecture) {
  if (architecture.model.position != Position::rope) return 0;
  return architecture.positions * architecture.model.head_size();
}

Architecture stored_architecture(const Configuration& configuration, const checkpoint::Manifest& manifest) {
  Architecture architecture{.model = configuration.language_model,
                            .vocabulary = 0,
                            .positions = configuration.data.sequence,
                            .lora = configuration.lora};
  const Json extra = parse_json(manifest.extra);
  if (const auto context = extra.find(kContext); context != extra.end() && context->is_number_integer())
    architecture.context = std::min(context->get<std::int64_t>(), kLongestContext);
  for (const checkpoint::TensorEntry& tensor : manifest.tensors) {
    if (tensor.name == "embedding/tokens" && tensor.shape.size() == 2) architecture.vocabulary = tensor.shape[0];
    if (tensor.name == "embedding/positions" && tensor.shape.size() == 2) architecture.context = tensor.shape[0];
  }
  if (architecture.vocabulary == 0)
    throw collective_error(ExitCode::usage,
                           "the checkpoint has no embedding/tokens (it is not that of a language model); name another");
  return architecture;
}

Json manifest_extra(const Architecture& architecture) { return {{kContext, architecture.longest_text()}}; }

}  // namespace weft::language_model
