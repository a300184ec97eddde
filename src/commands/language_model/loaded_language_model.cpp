// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/loaded_language_model.hpp"

#include "base/format.hpp"
#include "commands/shared/train_model.hpp"
#include "language_model/blocks/model_parameters.hpp"
#include "language_model/run/planned_bytes.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "parallel/affinity.hpp"
#include "run/usable_memory.hpp"

namespace weft::commands {

using namespace language_model;

namespace {

std::int64_t in_whole_groups(std::int64_t tensor, const parallel::World& world) {
  require_groups(tensor, world.size());
  return tensor;
}

}  // namespace

ModelRanks::ModelRanks(std::int64_t tensor, const parallel::World& world)
    : copy(world.all().split(static_cast<int>(world.rank() / in_whole_groups(tensor, world)), world.rank())),
      peers(world.all().split(static_cast<int>(world.rank() % tensor), world.rank())),
      grid(copy, one_copy(tensor)) {}

std::optional<model::TensorAxis> tensor_axis(const TransformerSettings& settings, const ModelRanks& ranks,
                                             const kernels::Execution& execution, model::StepArena& arena, bool overlap,
                                             std::int64_t gathered) {
  if (ranks.copy.size() == 1) return std::nullopt;
  return std::optional<model::TensorAxis>(std::in_place, ranks.grid, execution,
                                          tensor_buffers(settings, ranks.grid.shape(), arena, gathered), overlap);
}

int print_plan(const Request& request, const OpenedModel& opened, const Plan& plan) {
  std::string text = fmt::format("plan of {}: {}\n", opened.name(), sizes_text(plan.architecture));
  const auto row = [&](const std::string& name, std::int64_t bytes) {
    if (bytes > 0) text += fmt::format("  {:<34}{:>14}\n", name, format::binary_bytes_text(bytes));
  };
  for (const auto& [name, bytes] : plan.device) row(name, bytes);
  row("on the device, per rank", plan.device_total());
  for (const auto& [name, bytes] : plan.host) row(name, bytes);
  row("on the host, per rank", plan.host_total());
  const std::int64_t tensor = opened.configuration().parallel.tensor;
  text += fmt::format("  parallel.tensor = {}: {}", tensor,
                      tensor == 1 ? "each rank has the whole model" : "ranks have parts of the model");
  Json document = plan_document(plan, {.device = plan.device_total(), .host = plan.host_total()});
  for (const char* of_training : {"fits", "checkpoint_bytes", "disk_bytes"}) document.erase(of_training);
  document["parallel_tensor"] = tensor;
  print_result(request, text, document);
  return 0;
}

void require_memory(const OpenedModel& opened, const Plan& plan, const parallel::World& world) {
  const auto require = [&](std::int64_t needed, std::int64_t available, const std::string& memory) {
    if (available == 0 || needed <= available) return;
    const std::int64_t tensor = opened.configuration().parallel.tensor;
    throw collective_error(ExitCode::usage,
                           "{}: needs {} of {} per rank, {} are available; divide the model over more ranks (--set "
                           "parallel.tensor={} with as many processes)",
                           opened.name(), format::binary_bytes_text(needed), memory,
                           format::binary_bytes_text(available), 2 * tensor);
  };
  const run::HostShare host = run::usable_host_memory(world);
  require(plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()), host.bytes,
          fmt::format("host memory ({})", host.limit));
  require(plan.device_total(), run::usable_device_bytes(opened.configuration().device, kContextBytes, world),
          "device memory");
}

namespace {

/// The ranks, once it is known that they have the memory of a forward pass over one sequence.
std::int64_t with_memory(const OpenedModel& opened, const parallel::World& world) {
  require_memory(opened, ForwardModel::plan(opened, opened.configuration().data.sequence), world);
  return opened.configuration().parallel.tensor;
}

}  // namespace

Plan ForwardModel::plan(const OpenedModel& opened, std::int64_t rows) {
  const parallel::GridShape grid = one_copy(opened.configuration().parallel.tensor);
  return forward_plan(opened.configuration(), opened.architecture,
                      forward_settings(opened.configuration(), opened.architecture, rows, grid, grid.ranks() - 1));
}

ForwardModel::ForwardModel(const OpenedModel& opened, const parallel::World& world, const kernels::Execution& execution)
    : ranks(with_memory(opened, world), world),
      model(opened.architecture, opened.configuration().optimizer.state, ranks.grid.shape(), ranks.copy.rank(),
            execution, model::Moments::none) {
  opened.load(model, world, execution);
}

LoadedLanguageModel::LoadedLanguageModel(const Request& request, const parallel::World& world)
    : opened(request, world),
      runtime(device_settings(configuration()), world.node_rank(),
              parallel::bind_to_cpus(world, configuration().device)),
      tokenizer(opened.tokenizer(world, runtime.execution())),
      part(opened, world, runtime.execution()) {
  if (tokenizer && world.is_root()) note_special_tokens(*tokenizer);
}

ForwardOnly::ForwardOnly(const Configuration& configuration, const ForwardModel& part, std::int64_t rows, bool overlap)
    : settings(forward_settings(configuration, part.model.architecture(), rows, part.ranks.grid.shape(),
                                part.ranks.copy.rank())),
      arena(part.model.execution(), part.ranks.grid),
      tensor(tensor_axis(settings, part.ranks, part.model.execution(), arena, overlap)),
      transformer(part.model, settings, timers, arena, tensor ? &*tensor : nullptr),
      staging(rows, configuration.data.document_mask, part.model.execution(), arena) {
  transformer.prepare_weights();
}

}  // namespace weft::commands
