// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/memory_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "base/format.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "kernels/slow_paths.hpp"
#include "language_model/blocks/attention_sublayer.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/step/clipping_shape.hpp"
#include "language_model/step/language_trainer.hpp"
#include "privacy/account.hpp"

namespace weft::language_model {
namespace {

std::int64_t total(const std::vector<std::pair<std::string, std::int64_t>>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& part) { return sum + part.second; });
}

/// Number of tokens per parameter with which a given amount of computation gives the lowest loss (Hoffmann et al. 2022,
/// arXiv 2203.15556).
constexpr std::int64_t kTokensPerParameter = 20;

/// Settings of the last rank, whose parts are the largest.
TransformerSettings largest_part(const Configuration& configuration, const Architecture& architecture) {
  const parallel::GridShape grid = grid_shape(configuration);
  return transformer_settings(configuration, architecture, grid, grid.ranks() - 1);
}

/// Text on types: "weights fp32, moments fp32, …". It shows moments that are stored in an unintended type.
std::string types_text(const Plan& plan, const Configuration& configuration) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  std::string weights, moments;
  for (const model::ParameterSpec& spec : parameter_specs(plan.architecture)) {
    if (!spec.is_matrix() || spec.frozen) continue;
    for (const model::Plane& plane :
         model::planes_of(spec, configuration.optimizer.state, backend, configuration.moments())) {
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
                               : configuration.fp8                          ? ", products e4m3 and e5m2"
                                                                            : "";
  return fmt::format(
      "  types: weights {}, moments {}, vectors and their moments fp32, gradients fp32, activations {}, logits {}{}\n",
      weights, moments, activations, activations, products);
}

/// Text on the attention: "attention: forward cuDNN 9.19.0, backward own kernels". Empty without the CUDA kernels,
/// where there is no choice.
std::string attention_text(const Plan& plan, const Configuration& configuration) {
  if (device::planned_backend(device_settings(configuration)) != kernels::Backend::cuda) return {};
  const kernels::Attention full = attention_shapes(largest_part(configuration, plan.architecture)).back();
  bool library = true;
  const auto name = [&](kernels::AttentionPass pass) -> std::string {
    if constexpr (kernels::kCudnnBuild)
      if (kernels::planned_attention(pass, full, activation_type(configuration)) ==
          kernels::AttentionImplementation::cudnn)
        return "cuDNN " + kernels::cudnn::text_of_version(kernels::cudnn::version());
    library = false;
    return "own kernels";
  };
  const std::string forward = name(kernels::AttentionPass::forward), backward = name(kernels::AttentionPass::backward);
  return fmt::format("  attention: forward {}, backward {}\n", forward, backward) +
         slow_paths_text(plan.architecture, activation_type(configuration), library);
}

/// Text of the plan about a private step: its mode and the reason.
std::string private_text(const Plan& plan, const Configuration& configuration) {
  const parallel::GridShape grid = grid_shape(configuration);
  const Architecture part = part_of(plan.architecture, grid, grid.ranks() - 1);
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const privacy::Settings& settings = configuration.privacy;
  std::string text;
  if (plan.train_tokens > 0 && !settings.joins_sequences()) {
    const PrivateRecords records = private_records(configuration, plan.train_tokens);
    privacy::require_parts(settings, records.rate());
    privacy::require_count_noise(settings, settings.noise_multiplier, records.expected);
    text += fmt::format(
        "  private: {} records of at most {} tokens, each in a step with probability {:.4g}: {:g} expected\n",
        format::grouped(records.count), configuration.data.sequence + 1, records.rate(), records.expected);
  }
  if (settings.algorithm != privacy::Algorithm::naive)
    text += clipping_text(configuration, plan.architecture, grid, backend);
  return text + fmt::format("  norms: {}\n",
                            privacy::to_text(settings, parameter_specs(part), clipping_shape(configuration, part)));
}

const char* base_text(LoraBase base) {
  switch (base) {
    case LoraBase::stored:
      return "";
    case LoraBase::bf16:
      return ", in bf16";
    case LoraBase::int8:
      return ", in bf16 and those of the linear layers in int8";
    case LoraBase::nf4:
      return ", in bf16 and those of the linear layers in nf4";
  }
  return "";
}

constexpr std::pair<const char*, Recompute> kRecompute[] = {{"none", Recompute::none},
                                                            {"activation", Recompute::activation},
                                                            {"norm", Recompute::norm},
                                                            {"block", Recompute::block}};

/// Memory of a Transformer with another value of memory.recompute.
Transformer::Buffers transformer_buffers(const Configuration& configuration, const Architecture& architecture,
                                         Recompute recompute, bool swap, model::StepArena& arena) {
  TransformerSettings settings = largest_part(configuration, architecture);
  settings.memory.recompute = recompute;
  settings.memory.swap_activations = swap;
  return {settings, arena};
}

std::int64_t activation_bytes(const Configuration& configuration, const Architecture& architecture,
                              kernels::Backend backend, Recompute recompute) {
  model::StepArena arena(backend);
  transformer_buffers(configuration, architecture, recompute, false, arena);
  for (const model::StepArena::Bytes& bytes : arena.bytes())
    if (bytes.purpose == "activations") return bytes.device;
  return 0;
}

SwapCost swap_cost(const Configuration& configuration, const Architecture& architecture, kernels::Backend backend) {
  constexpr double kCopyRate = 50e9;
  const double products = activation_type(configuration) == kernels::Scalar::fp32 ? 60e12 : 660e12;
  const auto bytes = [&](Recompute recompute) {
    model::StepArena arena(backend);
    return transformer_buffers(configuration, architecture, recompute, true, arena).swap.bytes();
  };
  SwapCost cost;
  const ParameterList list = declared_parameters(architecture);
  double block = 0;  // elements that a token multiplies
  for (const model::ParameterSpec& spec : list.specs)
    if (spec.name.starts_with(block_name(0))) block += static_cast<double>(spec.elements());
  for (const Product& product : list.products)
    if (product.block() == block_name(0)) block -= static_cast<double>(product.elements()) - product.multiplied();
  const double attention = static_cast<double>(configuration.data.sequence * architecture.query_width());
  const double shared = static_cast<double>(configuration.parallel.tensor);
  cost.forward_seconds =
      2 / shared * (block + attention) * static_cast<double>(configuration.micro_tokens()) / products;
  // The backward pass takes twice as long as the forward pass, and as long again for what it recomputes.
  const auto added = [&](std::int64_t copied, bool recomputes) {
    const double copy = static_cast<double>(copied) / kCopyRate, forward = cost.forward_seconds;
    return (recomputes ? forward : 0) + std::max(0.0, copy - forward) +
           std::max(0.0, copy - (recomputes ? 3 : 2) * forward);
  };
  const Recompute recompute = configuration.memory.recompute;
  cost.bytes = bytes(recompute);
  cost.copy_seconds = static_cast<double>(cost.bytes) / kCopyRate;
  cost.added_seconds = added(cost.bytes, recompute == Recompute::block);
  cost.recompute_seconds = added(bytes(Recompute::block), true);
  return cost;
}

/// Largest number of tokens of a micro-batch with which `fits(plan)`, fewer than now; 0: none does.
template <class Fits>
std::int64_t fitting_micro_tokens(const Plan& plan, Configuration configuration, const Fits& fits) {
  const std::int64_t sequence = configuration.data.sequence;
  std::int64_t fitting = 0, too_many = (configuration.micro_tokens() + sequence - 1) / sequence;
  while (fitting + 1 < too_many) {
    const std::int64_t sequences = fitting + (too_many - fitting) / 2;
    configuration.memory.micro_tokens = sequences * sequence;
    (fits(language_model::plan(configuration, plan.architecture, plan.train_tokens)) ? fitting : too_many) = sequences;
  }
  return fitting * sequence;
}

/// Without a GPU the memory that the plan lists under the device is host memory.
std::int64_t needed_on_host(const Plan& plan) {
  return plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total());
}

std::string milliseconds_text(double seconds) { return fmt::format("{:.3g} ms", 1e3 * seconds); }

}  // namespace

std::int64_t Plan::device_total() const { return total(device); }
std::int64_t Plan::host_total() const { return total(host); }

Plan plan(const Configuration& configuration, const Architecture& architecture, std::int64_t train_tokens) {
  if (const std::string why = obstacle_to_grid(configuration, architecture); !why.empty())
    throw collective_error(ExitCode::usage, "{}", why);
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const parallel::GridShape grid = grid_shape(configuration);
  const std::vector<model::ParameterSpec> specs = parameter_specs(architecture);
  const model::StateBytes state = model::largest_state_bytes(specs, grid, configuration.optimizer.state, backend,
                                                             configuration.moments(), stored_weights(configuration));
  const OtherBytes other(configuration, architecture, backend);
  Plan plan;
  plan.architecture = architecture;
  plan.parameters = model::elements_of(specs);
  plan.trained = model::trained_elements_of(specs);
  plan.train_tokens = train_tokens;
  plan.device = {{"weights", state.weights},
                 {"moments", state.moments},
                 {"conversion of weights", state.conversion},
                 {"rotary positions", other.positions}};
  const model::StepArena step =
      measure_step(with_clipping_mode(configuration, architecture, grid, backend), architecture, grid, backend);
  for (const model::StepArena::Bytes& bytes : step.bytes()) plan.device.emplace_back(bytes.purpose, bytes.device);
  plan.device.emplace_back("samples", other.samples);
  plan.host.emplace_back("samples", other.samples_on_host);
  plan.device.emplace_back("CUDA context and libraries", other.context);
  plan.host.emplace_back("optimizer state", state.host);
  for (const model::StepArena::Bytes& bytes : step.bytes())
    plan.host.emplace_back(bytes.purpose == "tokens" ? "tokens staging" : bytes.purpose, bytes.host);
  plan.host.emplace_back(
      "order of segments",
      train_tokens > 0 ? dataset::order_bytes(configuration.data, train_tokens, architecture.vocabulary) : 0);
  plan.checkpoint_bytes = model::checkpoint_bytes(specs, configuration.optimizer.state);
  if (configuration.privacy.enabled)
    plan.checkpoint_bytes += privacy::CorrelatedNoise::bytes(specs, configuration.privacy.bands, {}, 0);
  plan.disk_bytes = (configuration.checkpoint.kept() + 1) * plan.checkpoint_bytes;
  if (configuration.checkpoint.staging == checkpoint::Staging::full)
    plan.host.emplace_back("checkpoint staging", plan.checkpoint_bytes / grid.ranks());  // a rank's own rows
  plan.flops_per_token = flops_per_token(architecture, configuration.data.sequence);
  for (const auto& [name, recompute] : kRecompute)
    plan.activations.emplace_back(name, activation_bytes(configuration, architecture, backend, recompute));
  if (configuration.memory.swap_activations) plan.swap = swap_cost(configuration, architecture, backend);
  return plan;
}

TransformerSettings forward_settings(const Configuration& configuration, const Architecture& architecture,
                                     std::int64_t rows, const parallel::GridShape& grid, std::int64_t rank) {
  TransformerSettings settings = transformer_settings(configuration, architecture, grid, rank);
  settings.gradients = false;
  settings.rows = rows;
  return settings;
}

Plan forward_plan(const Configuration& configuration, const Architecture& architecture, const TransformerSettings& part,
                  const GenerationSettings* generation) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const parallel::GridShape grid = one_copy(part.architecture.tensor_ranks);
  const std::vector<model::ParameterSpec> specs = parameter_specs(architecture);
  const model::StateBytes state =
      model::largest_state_bytes(specs, grid, configuration.optimizer.state, backend, model::Moments::none);
  model::StepArena arena(backend);
  const model::TensorAxis::Buffers tensor =
      tensor_buffers(part, grid, arena, generation == nullptr ? 0 : generation->gathered_bytes());
  const Transformer::Buffers transformer(part, arena);
  std::optional<Generator::Buffers> generator;
  if (generation != nullptr) generator.emplace(*generation, arena);
  Plan plan;
  plan.architecture = architecture;
  plan.parameters = model::elements_of(specs);
  plan.device = {{"weights", state.weights},
                 {"conversion of weights", state.conversion},
                 {"rotary positions", 4 * rotary_elements(architecture)},
                 {"CUDA context and libraries", kernels::kCudaBuild ? kContextBytes : 0}};
  for (const model::StepArena::Bytes& bytes : arena.bytes()) {
    plan.device.emplace_back(bytes.purpose, bytes.device);
    plan.host.emplace_back(bytes.purpose, bytes.host);
  }
  return plan;
}

std::int64_t forward_bytes(const Configuration& configuration, const Architecture& architecture, std::int64_t rows) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const parallel::GridShape grid = one_copy(configuration.parallel.tensor);
  const model::StateBytes state = model::largest_state_bytes(
      parameter_specs(architecture), grid, configuration.optimizer.state, backend, model::Moments::none);
  model::StepArena arena(backend);
  const TransformerSettings settings = forward_settings(configuration, architecture, rows, grid, grid.ranks() - 1);
  const model::TensorAxis::Buffers tensor = tensor_buffers(settings, grid, arena);
  const Transformer::Buffers transformer(settings, arena);
  const Staging::Buffers staging(rows, configuration.data.document_mask, false, arena);
  return state.weights + state.conversion + 4 * rotary_elements(architecture) + arena.device_bytes();
}

bool MemoryLimits::allow(const Plan& plan) const {
  return (host == 0 || needed_on_host(plan) <= host) && (device == 0 || plan.device_total() <= device);
}

std::int64_t largest_micro_tokens(const Configuration& configuration, const MemoryLimits& limits,
                                  const std::function<Plan(std::int64_t micro_tokens)>& plan) {
  const std::int64_t sequence = configuration.data.sequence, all = configuration.rank_tokens() / sequence;
  for (std::int64_t parts = 1; parts < all; ++parts)
    if (all % parts == 0 && limits.allow(plan(all / parts * sequence))) return all / parts * sequence;
  return sequence;
}

void require_memory(const Plan& plan, const Configuration& configuration, const MemoryLimits& limits) {
  const auto require = [&](const auto& needed, std::int64_t available, const std::string& memory,
                           const std::string& advice) {
    if (available == 0 || needed(plan) <= available) return;
    const std::int64_t fits =
        fitting_micro_tokens(plan, configuration, [&](const Plan& smaller) { return needed(smaller) <= available; });
    throw collective_error(
        ExitCode::usage,
        "the run needs {} of {}, {} are available; take {}{}a smaller optimizer.state or a smaller model",
        format::binary_bytes_text(needed(plan)), memory, format::binary_bytes_text(available),
        fits > 0 ? fmt::format("micro-batches of at most data.micro_tokens = {} ({} now), ", fits,
                               configuration.micro_tokens())
                 : "",
        advice);
  };
  const bool recomputes = configuration.memory.recompute == Recompute::block,
             moves = configuration.memory.offload_optimizer || configuration.memory.swap_activations;
  const std::string recompute = recomputes ? "" : "memory.recompute = \"block\", ";
  require(needed_on_host, limits.host, fmt::format("host memory ({})", limits.host_limit),
          !kernels::kCudaBuild ? recompute
          : moves              ? "no memory.offload_optimizer or memory.swap_activations, "
                               : "checkpoint.staging = \"chunked\", ");
  require(
      [](const Plan& p) { return p.device_total(); }, limits.device, "device memory",
      recompute +
          (kernels::kCudaBuild && !configuration.memory.offload_optimizer ? "memory.offload_optimizer = true, " : ""));
}

void require_worthwhile_swapping(const Plan& plan) {
  if (!plan.swap || plan.swap->worthwhile()) return;
  throw collective_error(
      ExitCode::usage,
      "memory.swap_activations = true costs more time than recomputation: {} of each block and micro-batch are copied "
      "each way, {} at 50 GB/s, while the forward pass of a block takes {} (per block {} are added, with "
      "memory.recompute = \"block\" {}); take memory.recompute = \"block\", with which only the inputs of blocks are "
      "swapped",
      format::binary_bytes_text(plan.swap->bytes), milliseconds_text(plan.swap->copy_seconds),
      milliseconds_text(plan.swap->forward_seconds), milliseconds_text(plan.swap->added_seconds),
      milliseconds_text(plan.swap->recompute_seconds));
}

std::string slow_paths_text(const Architecture& architecture, kernels::Scalar type, bool library) {
  const ModelSettings& model = architecture.model;
  std::string text;
  const auto slow = [&](const char* phase, const std::string& reason) {
    if (!reason.empty()) text += fmt::format("  {}: slow portable kernels, because of {}\n", phase, reason);
  };
  if (!library) slow("attention", kernels::slow_attention(model.head_size(), type, model.attention_dropout > 0));
  if (model.position == Position::rope || model.qk_norm != QueryKeyNorm::none)
    slow("queries and keys",
         kernels::slow_query_key(model.head_size(), model.position == Position::rope ? model.rotated_columns() : 0));
  slow("norms", kernels::slow_norm(model.d_model));
  return text;
}

std::string to_text(const Plan& plan, const Configuration& configuration) {
  std::string text = fmt::format("plan: {}\n", sizes_text(plan.architecture));
  const auto row = [&](const std::string& name, const std::string& value) {
    text += fmt::format("  {:<34}{:>14}\n", name, value);
  };
  for (const auto& [name, bytes] : plan.device)
    if (bytes > 0) row(name, format::binary_bytes_text(bytes));
  row("on the device", format::binary_bytes_text(plan.device_total()));
  for (const auto& [name, bytes] : plan.host)
    if (bytes > 0) row(name, format::binary_bytes_text(bytes));
  row("on the host", format::binary_bytes_text(plan.host_total()));
  row("one checkpoint", format::binary_bytes_text(plan.checkpoint_bytes));
  row(fmt::format("checkpoints on disk, {} + 1", configuration.checkpoint.kept()),
      format::binary_bytes_text(plan.disk_bytes));
  const std::int64_t micro = configuration.micro_tokens(), rank = configuration.rank_tokens();
  row("tokens of a micro-batch", fmt::format("{} x {}", (rank + micro - 1) / micro, format::grouped(micro)));
  row("work per token", fmt::format("{:.4g} MFLOP", plan.flops_per_token * 1e-6));
  text += types_text(plan, configuration) + attention_text(plan, configuration);
  if (const LoraSettings& lora = plan.architecture.lora; lora.rank > 0)
    text += fmt::format("  adapters of rank {} for {}: {} of the parameters are trained, the others are frozen{}\n",
                        lora.rank, fmt::join(lora.targets, ", "), format::grouped(plan.trained), base_text(lora.base));
  if (configuration.shard() == parallel::Shard::full) {
    const std::int64_t blocks = std::min(configuration.parallel.gathered_blocks, plan.architecture.model.layers);
    text += fmt::format(
        "  weights: gathered {}, with memory for {} of {} blocks\n",
        blocks == plan.architecture.model.layers ? "once per step" : "in each forward and backward pass of a block",
        blocks, plan.architecture.model.layers);
  }
  text += "  activations by memory.recompute:";
  for (const auto& [name, bytes] : plan.activations)
    text += fmt::format("{} {} {}", name == plan.activations.front().first ? "" : ",", name,
                        format::binary_bytes_text(bytes));
  text += '\n';
  if (plan.swap)
    text += fmt::format(
        "  swapping: {} of each block and micro-batch each way, {} at 50 GB/s; forward pass of a block {} on one "
        "H200\n",
        format::binary_bytes_text(plan.swap->bytes), milliseconds_text(plan.swap->copy_seconds),
        milliseconds_text(plan.swap->forward_seconds));
  const std::int64_t run = configuration.run.steps * configuration.data.batch_tokens,
                     best = kTokensPerParameter * plan.parameters;
  text += fmt::format(
      "  tokens: {} in this run, {:.3g} of the {} with which this size makes the best use of its computation\n",
      format::grouped(run), static_cast<double>(run) / static_cast<double>(best), format::grouped(best));
  if (configuration.privacy.enabled) text += private_text(plan, configuration);
  if (plan.train_tokens > 0) {
    text += fmt::format("  the training set has {} tokens", format::grouped(plan.train_tokens));
    // Rows of documents have padding: their number is in the log.
    if (configuration.data.pack == dataset::Pack::stream)
      text += fmt::format(": {:.3g} epochs", static_cast<double>(run) / static_cast<double>(plan.train_tokens));
    text += '\n';
  }
  return text;
}

}  // namespace weft::language_model
