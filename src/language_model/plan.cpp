// SPDX-License-Identifier: Apache-2.0
#include "language_model/plan.hpp"

#include <fmt/format.h>

#include <numeric>

#include "base/error.hpp"
#include "language_model/trainer.hpp"
#include "report/format.hpp"

namespace weft::language_model {
namespace {

std::int64_t total(const std::vector<std::pair<std::string, std::int64_t>>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& part) { return sum + part.second; });
}

/// Number of tokens per parameter with which a given amount of computation gives the lowest loss (Hoffmann et al. 2022,
/// arXiv 2203.15556).
constexpr std::int64_t kTokensPerParameter = 20;

/// "weights fp32, moments fp32, …": a moment that is stored in another type than intended shows here.
std::string types_text(const Plan& plan, const Configuration& configuration) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  std::string weights, moments;
  for (const training::ParameterSpec& spec : parameter_specs(plan.architecture)) {
    if (!spec.is_matrix()) continue;
    for (const training::Plane& plane :
         training::planes_of(spec, configuration.optimizer.state, backend, training::Moments::held)) {
      const std::string type(checkpoint::name_of(plane.type));
      if (plane.key == "weight") weights = type;
      if (plane.key == "weight_rest") weights += " + " + type + " (fp32)";
      if (plane.key == "first_moment") moments = type;
      if (plane.key == "second_moment" && type != moments) moments += ", " + type;
      if (plane.key == "first_scale") moments += " with scales of blocks";
    }
    break;  // matrices are stored alike
  }
  const std::string_view activations = checkpoint::name_of(activation_type(configuration));
  const char* const products = configuration.precision == Precision::tf32   ? ", products tf32"
                               : configuration.precision == Precision::fp16 ? ", weights of products fp16"
                               : configuration.fp8_forward                  ? ", forward products of blocks e4m3"
                                                                            : "";
  return fmt::format(
      "  types: weights {}, moments {}, vectors and their moments fp32, gradients fp32, activations {}, logits {}{}\n",
      weights, moments, activations, activations, products);
}

}  // namespace

parallel::GridShape single_process() {
  return parallel::GridShape({{std::string(parallel::kDataAxis), 1}, {std::string(parallel::kTensorAxis), 1}});
}

std::int64_t Plan::device_total() const { return total(device); }
std::int64_t Plan::host_total() const { return total(host); }

Plan plan(const Configuration& configuration, const Architecture& architecture, std::int64_t train_tokens) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const parallel::GridShape grid = single_process();
  const std::vector<training::ParameterSpec> specs = parameter_specs(architecture);
  const training::StateBytes state =
      training::largest_state_bytes(specs, grid, configuration.optimizer.state, backend, training::Moments::held);
  Plan plan;
  plan.architecture = architecture;
  plan.parameters = training::elements_of(specs);
  plan.train_tokens = train_tokens;
  plan.device = {{"weights", state.weights},
                 {"moments", state.moments},
                 {"conversion of weights", state.conversion},
                 {"rotary positions", 4 * rotary_elements(architecture)}};
  const training::StepArena step = measure_step(configuration, architecture, grid, backend);
  for (const training::StepArena::Bytes& bytes : step.bytes()) plan.device.emplace_back(bytes.purpose, bytes.device);
  plan.device.emplace_back("CUDA context and libraries", kernels::kCudaBuild ? kContextBytes : 0);
  plan.host = {
      {"tokens staging", step.host_bytes()},
      {"order of the curriculum",
       train_tokens > 0 ? dataset::order_bytes(configuration.data, train_tokens, architecture.vocabulary) : 0}};
  plan.checkpoint_bytes = training::checkpoint_bytes(specs, configuration.optimizer.state);
  plan.disk_bytes = (configuration.checkpoint.keep + 1) * plan.checkpoint_bytes;
  if (configuration.checkpoint.staging == checkpoint::Staging::full)
    plan.host.emplace_back("checkpoint staging", plan.checkpoint_bytes);
  plan.flops_per_token = flops_per_token(architecture, configuration.data.sequence);
  return plan;
}

void require_memory(const Plan& plan, const Configuration& configuration, std::int64_t host,
                    const std::string& host_limit, std::int64_t device) {
  const auto require = [&](std::int64_t needed, std::int64_t available, const std::string& memory) {
    if (available == 0 || needed <= available) return;
    throw collective_error(
        ExitCode::usage,
        "the run needs {} of {}, {} are available; take smaller micro-batches (data.micro_tokens = {} now), "
        "memory.recompute = \"block\", a smaller optimizer.state or a smaller model",
        report::binary_bytes_text(needed), memory, report::binary_bytes_text(available), configuration.micro_tokens());
  };
  // Without a GPU what the plan lists under the device is host memory as well.
  require(plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()), host,
          fmt::format("host memory ({})", host_limit));
  require(plan.device_total(), device, "device memory");
}

std::string to_text(const Plan& plan, const Configuration& configuration) {
  const ModelSettings& model = plan.architecture.model;
  std::string text =
      fmt::format("plan: {} layer{}, d_model {}, {} head{} of {}{}, d_mlp {}, vocabulary {}, {} parameters\n",
                  model.layers, model.layers == 1 ? "" : "s", model.d_model, model.heads, model.heads == 1 ? "" : "s",
                  model.head_size(), model.kv_heads == model.heads ? "" : fmt::format(" ({} of keys)", model.kv_heads),
                  model.d_mlp, plan.architecture.vocabulary, report::grouped(plan.parameters));
  const auto row = [&](const std::string& name, const std::string& value) {
    text += fmt::format("  {:<34}{:>14}\n", name, value);
  };
  for (const auto& [name, bytes] : plan.device)
    if (bytes > 0) row(name, report::binary_bytes_text(bytes));
  row("on the device", report::binary_bytes_text(plan.device_total()));
  for (const auto& [name, bytes] : plan.host)
    if (bytes > 0) row(name, report::binary_bytes_text(bytes));
  row("on the host", report::binary_bytes_text(plan.host_total()));
  row("one checkpoint", report::binary_bytes_text(plan.checkpoint_bytes));
  row(fmt::format("checkpoints on disk, {} + 1", configuration.checkpoint.keep),
      report::binary_bytes_text(plan.disk_bytes));
  row("work per token", fmt::format("{:.4g} MFLOP", plan.flops_per_token * 1e-6));
  text += types_text(plan, configuration);
  const std::int64_t run = configuration.run.steps * configuration.data.batch_tokens,
                     best = kTokensPerParameter * plan.parameters;
  text += fmt::format(
      "  tokens: {} in this run, {:.3g} of the {} with which this size makes the best use of its computation\n",
      report::grouped(run), static_cast<double>(run) / static_cast<double>(best), report::grouped(best));
  if (plan.train_tokens > 0)
    text += fmt::format("  the training set has {} tokens: {:.3g} epochs\n", report::grouped(plan.train_tokens),
                        static_cast<double>(run) / static_cast<double>(plan.train_tokens));
  return text;
}

}  // namespace weft::language_model
