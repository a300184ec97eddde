// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/named_cases.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.hpp"
#include "kernels/execution.hpp"
#include "language_model/blocks/activation_swap.hpp"

namespace weft::bench {
namespace {

constexpr std::string_view kInput = "input";
constexpr std::string_view kHandWritten = "hand-written kernels";
constexpr std::string_view kFp8 = "fp8";

/// One optimisation: "key=value" of both positions. Those of one key exclude each other.
struct Toggle {
  std::string name;
  std::string key, off, on;
  std::string obstacle;  ///< why it is not available; "": it is
};

/// batch_tokens: of a step of the cases.
std::vector<Toggle> toggles(const language_model::Configuration& configuration, std::int64_t batch_tokens) {
  const std::string no_gpu = kernels::kCudaBuild ? "" : "it needs a GPU and a build with CUDA";
  const std::int64_t sequence = configuration.data.sequence, sequences = batch_tokens / sequence,
                     micro_tokens = (sequences + 3) / 4 * sequence;
  const std::string one_micro_batch = sequences > 1 ? "" : "a step has one sequence";
  const std::string too_few_blocks =
      configuration.language_model.layers > language_model::kResidentBlocks ? "" : "all blocks stay on the device";
  // The first and the last block multiply in bf16.
  const std::string few_blocks = configuration.language_model.layers >= 3 ? "" : "it needs three blocks";
  return {
      {"bf16", "device.precision", "fp32", "bf16", ""},
      {"fp16", "device.precision", "fp32", "fp16", ""},
      {"TF32", "device.precision", "fp32", "tf32", no_gpu},
      {std::string(kFp8), "device.fp8", "false", "true", few_blocks},
      {std::string(kHandWritten), "device.backend", "portable", "auto", no_gpu},
      {"flash attention", "benchmark.attention", "matrix", "flash", ""},
      // All rows: more than any micro-batch has.
      {"chunked head", "memory.head_chunk", fmt::to_string(batch_tokens),
       fmt::to_string(configuration.memory.head_chunk), ""},
      {"recompute activation", "memory.recompute", "none", "activation", ""},
      {"recompute norms", "memory.recompute", "none", "norm", ""},
      {"recompute blocks", "memory.recompute", "none", "block", ""},
      {"bf16 state", "optimizer.state", "fp32", "bf16", ""},
      {"8-bit state", "optimizer.state", "fp32", "8bit", ""},
      {"host-resident state", "memory.offload_optimizer", "false", "true", no_gpu},
      {"activation swapping", "memory.swap_activations", "false", "true", !no_gpu.empty() ? no_gpu : too_few_blocks},
      {"graphs", "device.graphs", "false", "true", no_gpu},
      {"accumulation", "data.micro_tokens", "0", fmt::to_string(micro_tokens), one_micro_batch},
  };
}

struct Combination {
  std::string_view name;
  std::vector<std::string> toggles;
};

std::vector<Combination> combinations() {
  return {{kBaseline, {}},
          {"baseline again", {}},
          {"A", {"graphs", "accumulation", "bf16"}},
          {"B", {"flash attention", "recompute blocks", "8-bit state"}},
          {"safe", {"flash attention", "chunked head", "graphs"}},
          {"all",
           {"bf16", std::string(kFp8), std::string(kHandWritten), "flash attention", "chunked head", "recompute blocks",
            "8-bit state", "graphs", "accumulation"}}};
}

/// The names joined by " + ".
std::vector<std::string> joined(const std::string& name) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= name.size();) {
    constexpr std::string_view kJoin = " + ";
    const std::size_t end = std::min(name.find(kJoin, begin), name.size());
    names.push_back(name.substr(begin, end - begin));
    begin = end + kJoin.size();
  }
  return names;
}

}  // namespace

std::vector<std::string> default_cases() {
  std::vector<std::string> names = {std::string(kInput), std::string(kBaseline)};
  for (const Toggle& one : toggles({}, 0)) names.push_back(one.name);
  for (const std::string_view name : {kHandWritten, kFp8}) names.push_back(fmt::format("bf16 + {}", name));
  for (const char* name : {"8-bit state + recompute blocks", "A", "B", "safe", "all", "baseline again"})
    names.emplace_back(name);
  return names;
}

void resolve(const language_model::Configuration& configuration, std::int64_t batch_tokens, BenchmarkCase& one) {
  if (!one.sets.empty() || one.name == kInput) return;
  if (batch_tokens == 0) batch_tokens = configuration.data.batch_tokens;
  const std::vector<Toggle> all = toggles(configuration, batch_tokens);
  const std::vector<Combination> combinations = bench::combinations();
  const auto named = std::find_if(combinations.begin(), combinations.end(),
                                  [&](const Combination& each) { return each.name == one.name; });
  const bool combined = named != combinations.end();
  const std::vector<std::string> names = combined ? named->toggles : joined(one.name);
  const auto find = [&](const std::string& name) {
    return std::find_if(all.begin(), all.end(), [&](const Toggle& toggle) { return toggle.name == name; });
  };
  one.sets.push_back(fmt::format("data.batch_tokens={}", batch_tokens));
  for (const Toggle& toggle : all) {
    if (toggle.key.empty()) continue;
    const std::string off = fmt::format("{}={}", toggle.key, toggle.off);
    if (std::find(one.sets.begin(), one.sets.end(), off) == one.sets.end()) one.sets.push_back(off);
  }
  for (const std::string& name : names) {
    const auto toggle = find(name);
    if (toggle == all.end()) {
      std::vector<std::string> known;
      for (const Toggle& each : all) known.push_back(each.name);
      for (const Combination& each : combinations) known.emplace_back(each.name);
      throw collective_error(ExitCode::usage,
                             "benchmark.cases: \"{}\" stands for no case (known: input, {}); give a known name, or "
                             "\"name: table.key=value\"",
                             one.name, fmt::join(known, ", "));
    }
    const std::string off = fmt::format("{}={}", toggle->key, toggle->off);
    const auto set = std::find(one.sets.begin(), one.sets.end(), off);
    if (!toggle->obstacle.empty())
      one.left_out += fmt::format("{}{} ({})", one.left_out.empty() ? "" : ", ", name, toggle->obstacle);
    else if (set == one.sets.end())
      throw collective_error(ExitCode::usage,
                             "benchmark.cases: \"{}\" has two values of {} (its optimisations exclude each other); "
                             "leave one out",
                             one.name, toggle->key);
    else {
      *set = fmt::format("{}={}", toggle->key, toggle->on);
      one.toggles.push_back(name);
    }
  }
  // A named combination is measured with those of its optimisations that are available.
  if (!one.left_out.empty() && (!combined || one.toggles.empty()))
    one.obstacle = names.size() == 1 ? find(names.front())->obstacle : one.left_out;
  // These two toggles need bf16 activations: without them the kernels would be those of the baseline.
  for (const std::string_view name : {kHandWritten, kFp8})
    if (one.toggles == std::vector<std::string>{std::string(name)})
      one.obstacle = fmt::format("only with bf16: see \"bf16 + {}\"", name);
}

}  // namespace weft::bench
