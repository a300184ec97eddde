// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/peft.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/progress.hpp"
#include "base/text.hpp"
#include "interchange/checkpoint.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/huggingface/config.hpp"
#include "language_model/huggingface/names.hpp"
#include "language_model/huggingface/peft_config.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"
#include "storage/safetensors.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;
using model::ParameterSpec;

constexpr const char* kAdapterFile = "adapter_model.safetensors";
constexpr std::string_view kPeftPrefix = "base_model.model.", kWeightSuffix = ".weight", kLoraA = ".lora_A.weight",
                           kLoraB = ".lora_B.weight";
/// Largest relative difference of two scales alpha / r that count as equal: config files round decimals.
constexpr double kSameScale = 1e-6;

/// A linear layer of the library with adapters.
struct AdaptedLayer {
  std::string name;                      ///< "model.layers.0.self_attn.q_proj"
  std::int64_t outputs = 0, inputs = 0;  ///< of the whole layer
  struct Part {
    ParameterSpec a, b;
    Place place;
  };
  std::vector<Part> parts = {};

  std::string tensor(std::string_view matrix) const { return fmt::format("{}{}{}", kPeftPrefix, name, matrix); }
};

/// Adapted layers in the order of the model.
std::vector<AdaptedLayer> modules_of(const Architecture& architecture) {
  const Architecture base = base_of(architecture);
  const std::vector<ParameterSpec> targets = parameter_specs(base), adapters = adapter_specs(architecture);
  const std::vector<Place> all = places(family_of(base), base);
  std::map<std::string, const ParameterSpec*> by_name;
  for (const ParameterSpec& spec : adapters) by_name.emplace(spec.name, &spec);
  std::vector<AdaptedLayer> modules;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const std::string layer = targets[i].name.substr(0, targets[i].name.rfind('/'));
    const auto a = by_name.find(layer + "/lora_a");
    if (a == by_name.end() || !targets[i].is_matrix()) continue;
    const std::string name = all[i].tensor.substr(0, all[i].tensor.size() - kWeightSuffix.size());
    if (modules.empty() || modules.back().name != name)
      modules.push_back({.name = name, .outputs = all[i].outputs(), .inputs = targets[i].shape[1]});
    modules.back().parts.push_back({*a->second, *by_name.at(layer + "/lora_b"), all[i]});
  }
  return modules;
}

/// The values of a matrix as its spec has it, [shape[0], shape[1]].
std::vector<float> values_of(const model::Parameters& parameters, const ParameterSpec& spec,
                             const kernels::Execution& execution) {
  const std::size_t at = parameters.index(spec.name);
  const device::Buffer<float> staged(spec.elements());
  kernels::weights_to_float(execution, parameters.matrix(at), 0, staged.matrix(spec.rows(), spec.columns()));
  std::vector<float> stored(static_cast<std::size_t>(spec.elements()));
  device::copy(execution, stored.data(), staged.data(), staged.bytes(), device::Direction::to_host);
  kernels::fence(execution);
  if (!std::all_of(stored.begin(), stored.end(), [](float value) { return std::isfinite(value); }))
    throw error(ExitCode::numeric, "{} has values that are not finite; nothing was written", spec.name);
  if (!spec.transposed()) return stored;
  std::vector<float> values(stored.size());
  for (std::int64_t i = 0; i < spec.rows(); ++i)
    for (std::int64_t j = 0; j < spec.columns(); ++j)
      values[static_cast<std::size_t>(j * spec.rows() + i)] = stored[static_cast<std::size_t>(i * spec.columns() + j)];
  return values;
}

/// Sets the rows of this rank, the inverse of values_of.
void set_values(const model::Parameters& parameters, const ParameterSpec& spec, const std::vector<float>& values,
                const kernels::Execution& execution) {
  std::vector<float> stored = values;
  if (spec.transposed())
    for (std::int64_t i = 0; i < spec.rows(); ++i)
      for (std::int64_t j = 0; j < spec.columns(); ++j)
        stored[static_cast<std::size_t>(i * spec.columns() + j)] =
            values[static_cast<std::size_t>(j * spec.rows() + i)];
  const device::Buffer<float> staged(spec.elements());
  device::copy(execution, staged.data(), stored.data(), staged.bytes(), device::Direction::to_device);
  const std::size_t at = parameters.index(spec.name);
  const parallel::Range rows = parameters.stored(at);
  kernels::weights_from_float(
      execution, parameters.stored_matrix(at), 0,
      {staged.data() + rows.begin * spec.columns(), rows.size(), spec.columns(), spec.columns()});
  kernels::fence(execution);
}

/// Rank and alpha of a module as it is written.
std::int64_t rank_of(const AdaptedLayer& module, const LoraSettings& lora) {
  return std::ssize(module.parts) * lora.rank;
}
double alpha_of(const AdaptedLayer& module, const LoraSettings& lora) {
  return static_cast<double>(module.parts.size()) * lora.alpha;
}

/// JSON number, an integer where the value is whole: PEFT declares lora_alpha as one.
Json whole_or_decimal(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15) return static_cast<std::int64_t>(value);
  return value;
}

std::string adapter_config_text(const std::vector<AdaptedLayer>& modules, const Architecture& architecture,
                                const std::string& base) {
  const LoraSettings& lora = architecture.lora;
  const Family& family = family_of(architecture);
  std::vector<std::string> targets;
  Json ranks = Json::object(), alphas = Json::object();
  for (const AdaptedLayer& module : modules) {
    const std::string target = peft_target(family, module.name);
    if (std::find(targets.begin(), targets.end(), target) != targets.end()) continue;
    targets.push_back(target);
    if (module.parts.size() == 1) continue;
    ranks[target] = rank_of(module, lora);
    alphas[target] = whole_or_decimal(alpha_of(module, lora));
  }
  const Json config = {{"peft_type", "LORA"},
                       {"task_type", "CAUSAL_LM"},
                       {"base_model_name_or_path", base},
                       {"r", lora.rank},
                       {"lora_alpha", whole_or_decimal(lora.alpha)},
                       {"lora_dropout", lora.dropout},
                       {"target_modules", targets},
                       {"rank_pattern", ranks},
                       {"alpha_pattern", alphas},
                       {"fan_in_fan_out", family.inputs_first},  // of its matrices: [inputs, outputs]
                       {"bias", "none"},
                       {"modules_to_save", Json()},
                       {"use_rslora", false},
                       {"use_dora", false},
                       {"init_lora_weights", true},
                       {"inference_mode", true}};
  return json_text(config, 2) + "\n";
}

}  // namespace

bool is_peft_directory(const fs::path& path) { return fs::exists(path / kAdapterConfig); }

void write_peft(const model::Parameters& adapters, const Architecture& architecture, const std::string& base,
                kernels::Scalar type, const kernels::Execution& execution, const fs::path& directory) {
  const std::vector<AdaptedLayer> modules = modules_of(architecture);
  const std::int64_t rank = architecture.lora.rank;
  storage::write_new_directory(directory, [&](const fs::path& temporary) {
    std::vector<storage::SafetensorsWriter::Tensor> tensors;
    for (const AdaptedLayer& module : modules) {
      const std::int64_t of_module = rank_of(module, architecture.lora);
      tensors.push_back({module.tensor(kLoraA), type, {of_module, module.inputs}});
      tensors.push_back({module.tensor(kLoraB), type, {module.outputs, of_module}});
    }
    storage::SafetensorsWriter writer(temporary / kAdapterFile, tensors, {{"format", "pt"}});
    std::size_t tensor = 0;
    for (const AdaptedLayer& module : modules) {
      note_progress();
      const std::int64_t columns = rank_of(module, architecture.lora);
      std::vector<float> b(static_cast<std::size_t>(module.outputs * columns), 0.0f);
      std::int64_t first = 0;
      for (std::size_t i = 0; i < module.parts.size(); ++i) {
        const AdaptedLayer::Part& part = module.parts[i];
        const std::vector<float> a = values_of(adapters, part.a, execution),
                                 of_part = values_of(adapters, part.b, execution);
        writer.write(tensor, first, a);
        first += std::ssize(a);
        const std::int64_t column = static_cast<std::int64_t>(i) * rank;
        for (std::int64_t output = 0; output < part.b.shape[0]; ++output)
          std::copy_n(of_part.begin() + output * rank, rank, b.begin() + part.place.output(output) * columns + column);
      }
      writer.write(tensor + 1, 0, b);
      tensor += 2;
    }
    writer.finish();
    storage::write_text(temporary / kAdapterConfig, adapter_config_text(modules, architecture, base));
  });
}

// --- Reading --------------------------------------------------------------------------------------------------------

namespace {

/// An open directory, whose tensors are those of the architecture.
class PeftDirectory {
 public:
  PeftDirectory(const Architecture& architecture, const fs::path& path)
      : lora_(architecture.lora),
        modules_(modules_of(architecture)),
        config_(path / kAdapterConfig),
        file_((path / kAdapterFile).string()) {
    std::set<std::string> known;
    for (const AdaptedLayer& module : modules_) check(module, known);
    for (const storage::SafetensorsEntry& entry : file_.entries())
      if (!known.contains(entry.name))
        throw error(ExitCode::usage,
                    "{}: tensor \"{}\" belongs to no linear layer of lora.targets = [{}]; name its layer there",
                    file_.path(), printable(entry.name), fmt::join(lora_.targets, ", "));
    check_targets(architecture);
  }

  void load(const model::Parameters& parameters, const kernels::Execution& execution) const {
    for (const AdaptedLayer& module : modules_) {
      note_progress();
      const std::vector<float> a = read(module.tensor(kLoraA)), b = read(module.tensor(kLoraB));
      const std::int64_t columns = std::ssize(a) / module.inputs;
      for (std::size_t i = 0; i < module.parts.size(); ++i) {
        const AdaptedLayer::Part& part = module.parts[i];
        const std::int64_t column = columns_of(i, columns).first;
        set_values(parameters, part.a,
                   {a.begin() + column * module.inputs, a.begin() + (column + lora_.rank) * module.inputs}, execution);
        std::vector<float> of_part(static_cast<std::size_t>(part.b.elements()));
        for (std::int64_t output = 0; output < part.b.shape[0]; ++output)
          std::copy_n(b.begin() + part.place.output(output) * columns + column, lora_.rank,
                      of_part.begin() + output * lora_.rank);
        set_values(parameters, part.b, of_part, execution);
      }
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw error(ExitCode::usage, "{}: {}", config_.path(), why);
  }

  /// Checks shapes, rank and scale of a module.
  void check(const AdaptedLayer& module, std::set<std::string>& known) const {
    const std::int64_t own = rank_of(module, lora_);
    const double rank = config_.rank(module.name);
    if (rank != static_cast<double>(lora_.rank) && rank != static_cast<double>(own))
      refuse(fmt::format("the adapters of {} have rank {}, not lora.rank = {}; correct lora.rank", module.name, rank,
                         lora_.rank));
    const double scale = config_.scale(module.name), needed = lora_.alpha / static_cast<double>(lora_.rank);
    if (std::abs(scale - needed) > kSameScale * needed)
      refuse(
          fmt::format("the product of the adapters of {} has the factor {}, not lora.alpha / lora.rank = {}; set "
                      "lora.alpha = {}",
                      module.name, scale, needed, scale * static_cast<double>(lora_.rank)));
    const auto columns = static_cast<std::int64_t>(rank);
    const auto require = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
      const storage::SafetensorsEntry* const entry = file_.find(name);
      if (entry == nullptr)
        throw error(ExitCode::usage, "{}: has no tensor \"{}\" (lora.targets names its layer{}); {}", file_.path(),
                    name,
                    config_.exclusion().empty()
                        ? ""
                        : fmt::format(", and {} of {} leaves it out", config_.exclusion(), kAdapterConfig),
                    config_.exclusion().empty() ? "correct lora.targets"
                                                : "merge the adapters with PEFT: all layers or none have one here");
      if (entry->shape != shape)
        throw error(ExitCode::data, "{}: tensor \"{}\" has shape [{}], not [{}]; does it belong to this model?",
                    file_.path(), name, fmt::join(entry->shape, ", "), fmt::join(shape, ", "));
      if (!entry->type)
        throw error(ExitCode::usage, "{}: tensor \"{}\" is stored as {} (floating-point numbers are read); convert it",
                    file_.path(), name, printable(entry->dtype));
      known.insert(name);
    };
    require(module.tensor(kLoraA), {columns, module.inputs});
    require(module.tensor(kLoraB), {module.outputs, columns});
    if (module.parts.size() == 1 && module.parts[0].b.shape[0] == module.outputs) return;
    // A layer of several parts: its B must be zero outside the blocks of the parts, or values would be lost.
    std::vector<float> b = read(module.tensor(kLoraB));
    for (std::size_t i = 0; i < module.parts.size(); ++i) {
      const AdaptedLayer::Part& part = module.parts[i];
      const auto [column, count] = columns_of(i, columns);
      for (std::int64_t output = 0; output < part.b.shape[0]; ++output)
        std::fill_n(b.begin() + part.place.output(output) * columns + column, count, 0.0f);
    }
    if (std::any_of(b.begin(), b.end(), [](float value) { return value != 0; }))
      refuse(
          fmt::format("the adapters of {} change outputs beyond those of lora.targets = [{}]; add query, key or value "
                      "there",
                      module.name, fmt::join(lora_.targets, ", ")));
  }

  /// Requires tensors for every layer that target_modules names.
  void check_targets(Architecture architecture) const {
    architecture.lora.targets.clear();
    for (const LoraTarget& target : lora_targets(architecture.model)) architecture.lora.targets.push_back(target.name);
    for (const AdaptedLayer& module : modules_of(architecture))
      if (config_.requires_adapter(module.name) && file_.find(module.tensor(kLoraA)) == nullptr)
        throw error(ExitCode::data, "{}: has no tensor \"{}\" (target_modules of {} names its layer); is it complete?",
                    file_.path(), module.tensor(kLoraA), kAdapterConfig);
  }

  /// Columns of B that belong to a part, where B has so many: first and number.
  std::pair<std::int64_t, std::int64_t> columns_of(std::size_t part, std::int64_t columns) const {
    return {columns == lora_.rank ? 0 : static_cast<std::int64_t>(part) * lora_.rank, lora_.rank};
  }

  std::vector<float> read(const std::string& name) const {
    const storage::SafetensorsEntry& entry = *file_.find(name);
    std::vector<float> values(static_cast<std::size_t>(entry.elements()));
    file_.read(entry, 0, std::ssize(values), values.data());
    return values;
  }

  const LoraSettings lora_;
  const std::vector<AdaptedLayer> modules_;
  const PeftConfig config_;
  const storage::SafetensorsFile file_;
};

}  // namespace

void require_peft(const Architecture& architecture, const fs::path& directory) {
  const PeftDirectory checked(architecture, directory);
}

void load_peft(const model::Parameters& parameters, const Architecture& architecture,
               const kernels::Execution& execution, const fs::path& directory) {
  PeftDirectory(architecture, directory).load(parameters, execution);
}

}  // namespace weft::language_model
