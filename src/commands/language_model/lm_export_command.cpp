// SPDX-License-Identifier: Apache-2.0
//
// weft lm export MODEL --output DIR: a language model in the files of the transformers library of Hugging Face, its
// adapters merged; with --adapters these alone, in the files of PEFT.
#include <fmt/ranges.h>

#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/language_model/opened.hpp"
#include "device/runtime.hpp"
#include "language_model/huggingface/peft.hpp"
#include "parallel/affinity.hpp"

namespace weft::commands {
namespace {

/// Bytes of a file of weights: as the transformers library divides them.
constexpr std::int64_t kFileBytes = 5'000'000'000;

struct LanguageExportOptions {
  bool adapters = false;    ///< these alone
  std::string stored_type;  ///< "" or bf16 | fp32
};

int export_adapters(const Request& request, const OpenedModel& opened, kernels::Scalar type,
                    const parallel::World& world, const device::Runtime& runtime) {
  const language_model::LoraSettings& lora = opened.architecture.lora;
  const model::Parameters adapters = opened.adapters(world, runtime.execution());
  const std::string& base = opened.configuration().initial;
  language_model::write_peft(adapters, opened.architecture, base, type, runtime.execution(), request.output);
  print_written(request,
                fmt::format("{}: adapters of rank {} for {}, {} parameters, of {}\n  they belong to {}", request.output,
                            lora.rank, fmt::join(lora.targets, ", "),
                            format::grouped(model::elements_of(adapters.specs())), opened.name(), base),
                {{"output", request.output},
                 {"model", opened.name()},
                 {"base", base},
                 {"rank", lora.rank},
                 {"targets", lora.targets},
                 {"type", type == kernels::Scalar::bf16 ? "bf16" : "fp32"}});
  return 0;
}

int run_language_export(const Request& request, const LanguageExportOptions& options, const parallel::World& world) {
  // 1. The model, which the library must be able to express.
  if (request.output.empty())
    throw collective_error(ExitCode::usage, "weft lm export needs the directory to write: --output DIR");
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft lm export runs on one process (it is bound by the disk); use one");
  const OpenedModel opened(request, world);
  language_model::family_of(opened.architecture);
  const bool bf16 = options.stored_type == "bf16";
  const kernels::Scalar type = bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;

  const device::Runtime runtime(language_model::device_settings(opened.configuration()), world.node_rank(),
                                parallel::bind_to_cpus(world, opened.configuration().device));
  if (options.adapters) return export_adapters(request, opened, type, world, runtime);

  // 2. Its weights, with adapters merged. No text is computed, but the longest one is written.
  language_model::Architecture architecture = language_model::base_of(opened.architecture);
  architecture.context = architecture.longest_text();
  architecture.positions = 1;
  const parallel::Grid grid(world, language_model::single_process());
  const language_model::Model model(architecture, opened.configuration().optimizer.state, grid.shape(), 0,
                                    runtime.execution(), model::Moments::none);
  opened.load(model, world, runtime.execution());
  const std::optional<language_model::Tokenizer> tokenizer = opened.tokenizer(world, runtime.execution());

  // 3. Write, and read what was written.
  language_model::write_huggingface(model.parameters(), architecture, tokenizer, type, kFileBytes, runtime.execution(),
                                    request.output);
  const language_model::HuggingfaceDirectory written(request.output);
  print_written(request, written.summary(),
                {{"output", request.output},
                 {"model", opened.name()},
                 {"family", written.config().family->name},
                 {"type", bf16 ? "bf16" : "fp32"}});
  if (!tokenizer)
    log::warning("{}: has no tokeniser (the model was trained on token files without one)", request.output);
  return 0;
}

}  // namespace

extern const Command lm_export_command = with_options(
    {"lm export", "MODEL", "a model in the files of Hugging Face",
     "Writes a language model in the files of the transformers library of Hugging Face. Adapters ([lora]) are merged "
     "into its weights; with --adapters they alone are written, in the files of PEFT."},
    run_language_export, [](Options& options, LanguageExportOptions& own) {
      options.example("weft lm export runs/verses --output exported --type bf16");
      options.flag("--adapters", own.adapters, "the adapters of a run with [lora] alone, in the files of PEFT");
      options.add("--type", own.stored_type, "TYPE", "storage of the weights, bf16 or fp32 (default fp32)",
                  {"bf16", "fp32"});
      options.add("--output", options.request.output, "DIR", "the directory to write");
    });

}  // namespace weft::commands
