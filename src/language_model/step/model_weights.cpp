// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/model_weights.hpp"

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/rope/query_key.hpp"
#include "language_model/blocks/model_parameters.hpp"

namespace weft::language_model {
namespace {

/// Keys in Manifest::extra.
constexpr const char *kContext = "context", *kFamily = "family";
/// Limits for untrusted manifests: no product of sizes exceeds 64 bits.
constexpr std::int64_t kLongestContext = 1 << 28;

}  // namespace

Model::Model(const Architecture& architecture, kernels::StorageType storage, const parallel::GridShape& grid,
             std::int64_t rank, const kernels::Execution& execution, model::Moments moments,
             const model::WeightSlots* slots)
    : architecture_(architecture),
      execution_(execution),
      parameters_(parameter_specs(architecture), storage, grid, rank, execution, moments,
                  slots != nullptr ? slots->places() : std::vector<std::vector<std::byte*>>()),
      rotary_(rotary_elements(architecture)),
      layers_(parameters_, declared_parameters(architecture).products, architecture.model, execution, rotary_.array()) {
  if (rotary_.size() == 0) return;
  const device::HostBuffer<float> host(rotary_.size());
  const ModelSettings& settings = architecture.model;
  const std::int64_t columns = settings.rotated_columns(), positions = architecture.positions;
  kernels::rotary_table(settings.rope_base, settings.rope_scaling, columns, positions, host.data());
  if (settings.rotary_tables() > 1)
    kernels::rotary_table(settings.rope_window_base, {}, columns, positions, host.data() + positions * columns);
  device::copy(execution, rotary_.data(), host.data(), host.bytes(), device::Direction::to_device);
  kernels::fence(execution);
}

std::int64_t rotary_elements(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  return model.rotary_tables() * architecture.positions * model.rotated_columns();
}

Architecture stored_architecture(const Configuration& configuration, const checkpoint::Manifest& manifest) {
  Architecture architecture{.model = configuration.language_model,
                            .vocabulary = 0,
                            .positions = configuration.data.sequence,
                            .lora = configuration.lora};
  const Json extra = parse_json(manifest.extra);
  if (const auto context = extra.find(kContext); context != extra.end() && context->is_number_integer())
    architecture.context = std::min(context->get<std::int64_t>(), kLongestContext);
  if (const auto family = extra.find(kFamily); family != extra.end() && family->is_string())
    architecture.family = family->get<std::string>();
  for (const checkpoint::TensorEntry& tensor : manifest.tensors) {
    if (tensor.name == "embedding/tokens" && tensor.shape.size() == 2) architecture.vocabulary = tensor.shape[0];
    if (tensor.name == "embedding/positions" && tensor.shape.size() == 2) architecture.context = tensor.shape[0];
  }
  if (architecture.vocabulary == 0)
    throw collective_error(ExitCode::usage,
                           "the checkpoint has no embedding/tokens (it is not that of a language model); name another");
  return architecture;
}

Json manifest_extra(const Architecture& architecture) {
  Json extra = {{kContext, architecture.longest_text()}};
  if (!architecture.family.empty()) extra[kFamily] = architecture.family;
  return extra;
}

}  // namespace weft::language_model
