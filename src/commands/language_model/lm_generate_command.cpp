// SPDX-License-Identifier: Apache-2.0
//
// weft lm generate MODEL --prompt TEXT | --prompts FILE: text that a language model writes. Each group of
// parallel.tensor ranks has the model and writes a contiguous part of the texts; rank 0 prints all in order.
#include <filesystem>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"
#include "commands/commands.hpp"
#include "commands/language_model/encoded_prompts.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "commands/language_model/replacement.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/generation/growing_text.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "parallel/affinity.hpp"

namespace weft::commands {
namespace {

using language_model::GenerationRequest;
using language_model::GrowingText;
using language_model::Tokenizer;

/// Rows of a step without --rows. On a GPU a step takes hardly longer than with one row; on the host the weights are
/// read once for all of them.
constexpr std::int64_t kDeviceRows = 64, kHostRows = 16;
constexpr std::int64_t kMostTexts = std::int64_t{1} << 20;

struct GenerateOptions {
  std::string prompt;             ///< "" or the text
  std::string prompts;            ///< "" or FILE
  std::int64_t samples = 1;       ///< per prompt
  std::int64_t new_tokens = 100;  ///< per sample, at most
  double temperature = 1;         ///< 0: always the most probable token
  std::int64_t top_k = 0;         ///< 0: all
  double top_p = 1;
  std::vector<std::string> stop;  ///< texts before which a sample ends
  std::uint64_t seed = 1;
  std::int64_t rows = 0;  ///< sequences computed together; 0: automatic
  bool json_lines = false;
  std::string transcoder;  ///< "" or CHECKPOINT
  InterventionOptions interventions;
};

void require_generation_options(const Request& request, const GenerateOptions& options) {
  const auto refuse = [](const std::string& why) {
    return collective_error(ExitCode::usage, "weft lm generate: {}; see weft lm generate --help", why);
  };
  if (request.json && options.json_lines) throw refuse("--json is one document and --jsonl is lines; give one of them");
  if (options.prompt.empty() == options.prompts.empty()) throw refuse("needs one of --prompt TEXT and --prompts FILE");
  if (!(options.temperature >= 0 && options.temperature <= 100))
    throw refuse(fmt::format("--temperature {} is not between 0 and 100", options.temperature));
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw refuse(fmt::format("--top-p {} is not above 0 and at most 1", options.top_p));
}

const char* reason(GrowingText::End end) {
  return end == GrowingText::End::stop ? "stop" : end == GrowingText::End::symbol ? "end" : "length";
}

/// How one text is printed: as a line of JSON, or with a heading if there are several.
std::string printed(bool as_json, const Prompt& prompt, const GenerationRequest& one, bool several,
                    const GrowingText& text, double log_probability) {
  if (as_json) {
    const Json line = {{"prompt", prompt.text},
                       {"prompt_number", one.number + 1},
                       {"sample", one.sample + 1},
                       {"text", text.text()},
                       {"tokens", text.tokens()},
                       {"finish", reason(text.end())},
                       {"log_probability", log_probability}};
    return json_text(line) + "\n";
  }
  std::string lines;
  if (several)
    lines = fmt::format("--- prompt {}, sample {} ({} tokens, {})\n", one.number + 1, one.sample + 1, text.tokens(),
                        reason(text.end()));
  return lines + printable_lines(prompt.text + text.text()) + "\n";
}

int run_generate(const Request& request, const GenerateOptions& options, const parallel::World& world) {
  // 1. The model's sizes and tokeniser, and the prompts in its tokens.
  require_generation_options(request, options);
  const std::vector<language_model::Intervention> changes = options.interventions.list(options.transcoder);
  if (changes.empty() && !options.transcoder.empty())
    throw collective_error(ExitCode::usage,
                           "--transcoder {}: is for interventions; add --set-feature or --scale-feature",
                           options.transcoder);
  const OpenedModel opened(request, world);
  const language_model::Configuration& configuration = opened.configuration();
  language_model::Architecture architecture = opened.architecture;
  if (const std::string why = language_model::generation_obstacle(architecture.model, architecture.positions);
      !why.empty())
    throw collective_error(ExitCode::usage, "{}: text of this model cannot be generated ({})", opened.name(), why);
  const std::optional<Tokenizer> tokenizer = opened.tokenizer(world, {});
  if (!tokenizer)
    throw collective_error(ExitCode::usage,
                           "{}: the model has no tokeniser (it was trained on token files without one), so that "
                           "prompts have no tokens; name another",
                           opened.name());
  // Standard output has the texts alone.
  if (world.is_root() && (request.json || request.verbose)) language_model::note_special_tokens(*tokenizer);
  std::vector<Prompt> prompts;
  parallel::on_all(world.all(), [&] {
    const std::span<const std::string> texts(&options.prompt, options.prompts.empty() ? 1u : 0u);
    prompts =
        encoded_prompts(texts, options.prompts, *tokenizer, architecture.longest_text(), "the context of the model");
  });
  if (std::ssize(prompts) * options.samples > kMostTexts)
    throw collective_error(ExitCode::usage, "--samples {} of {} prompts are more than {} texts; take fewer",
                           options.samples, prompts.size(), kMostTexts);

  // 2. The model without moments, and the cache.
  std::int64_t longest_prompt = 1;
  for (const Prompt& prompt : prompts) longest_prompt = std::max(longest_prompt, std::ssize(prompt.ids));
  architecture.positions =
      std::min(architecture.longest_text(), std::max(architecture.positions, longest_prompt + options.new_tokens));
  const bool on_device =
      device::planned_backend(language_model::device_settings(configuration)) == kernels::Backend::cuda;
  language_model::GenerationSettings generation{.architecture = {},
                                                .type = language_model::activation_type(configuration),
                                                .rows = options.rows > 0 ? options.rows
                                                        : on_device      ? kDeviceRows
                                                                         : kHostRows,
                                                .prompts = std::ssize(prompts),
                                                .vocabulary = tokenizer->vocabulary_size(),
                                                .longest_prompt = longest_prompt,
                                                .new_tokens = options.new_tokens,
                                                .prefill_rows = on_device ? language_model::kDevicePrefillRows : 0,
                                                .temperature = options.temperature,
                                                .top_k = options.top_k,
                                                .top_p = options.top_p,
                                                .graphs = configuration.device.graphs && changes.empty()};
  const std::int64_t length = longest_prompt - 1 + options.new_tokens;
  if (length > architecture.positions)
    for (const language_model::Intervention& change : changes)
      if (change.positions)
        throw collective_error(ExitCode::usage,
                               "{}: texts of up to {} tokens exceed the context of {}, after which positions begin "
                               "anew; take fewer --max-new-tokens",
                               change.text, length, architecture.positions);
  // Settings of a rank; the ranks of a group divide the model.
  const parallel::GridShape shape = language_model::one_copy(configuration.parallel.tensor);
  const auto transformer_settings = [&](std::int64_t rank) {
    generation.architecture = language_model::part_of(architecture, shape, rank);
    language_model::TransformerSettings settings =
        language_model::transformer_settings(configuration, architecture, shape, rank);
    settings.gradients = false;
    if (architecture.positions > settings.length) settings.length = settings.shortest = architecture.positions;
    settings.rows = generation.most_rows();
    settings.memory.head_chunk = generation.rows;
    return settings;
  };
  const language_model::TransformerSettings planned = transformer_settings(shape.ranks() - 1);
  language_model::Plan plan = language_model::forward_plan(configuration, architecture, planned, &generation);
  if (!changes.empty()) {
    const PlannedTranscoder of_features(options.transcoder, architecture.model, planned.rows,
                                        device::planned_backend(language_model::device_settings(configuration)), world);
    plan.device.emplace_back("transcoder", of_features.bytes);
    plan.device.emplace_back(
        "interventions", language_model::InterventionPass::bytes(planned, planned.rows, std::ssize(changes), false));
  }
  if (request.dry_run) return print_plan(request, opened, plan);
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(),
                                parallel::bind_to_cpus(world, configuration.device));
  const kernels::Execution& execution = runtime.execution();
  require_memory(opened, plan, world);
  const ModelRanks ranks(configuration.parallel.tensor, world);
  const language_model::TransformerSettings settings = transformer_settings(ranks.copy.rank());
  const language_model::Model model(architecture, configuration.optimizer.state, shape, ranks.copy.rank(), execution,
                                    model::Moments::none);
  opened.load(model, world, execution);
  run::Timers timers;
  model::StepArena arena(execution, ranks.grid);
  std::optional<model::TensorAxis> tensor =
      tensor_axis(settings, ranks, execution, arena, false, generation.gathered_bytes());
  language_model::Transformer transformer(model, settings, timers, arena, tensor ? &*tensor : nullptr);
  std::optional<TranscoderReplacement> transcoder;
  std::optional<language_model::InterventionPass> intervention;
  if (!changes.empty()) {
    transcoder.emplace(options.transcoder, architecture.model, settings.rows, execution, world);
    intervention.emplace(transcoder->changed_features(changes, length, true), settings, settings.rows, false,
                         transformer, execution);
  }
  language_model::Generator generator(generation, transformer, execution, timers, arena);

  // 3. The texts of this group of ranks, in the order of prompts and samples. Rank 0 prints its own as soon as they are
  // complete,
  //    then those of the others.
  const std::vector<std::uint32_t> ends = language_model::end_symbols(*tokenizer);
  const std::int64_t all = std::ssize(prompts) * options.samples;
  const parallel::Range own = parallel::part(all, ranks.peers.size(), ranks.peers.rank());
  std::vector<GenerationRequest> requests;
  std::vector<GrowingText> texts;
  for (std::int64_t number = own.begin; number < own.end; ++number) {
    const std::int64_t prompt = number / options.samples;
    requests.push_back({.prompt = prompts[static_cast<std::size_t>(prompt)].ids,
                        .number = static_cast<std::uint32_t>(prompt),
                        .sample = static_cast<std::uint32_t>(number % options.samples)});
    texts.emplace_back(*tokenizer, options.stop, ends);
  }
  std::vector<double> log_probabilities(requests.size());
  std::size_t complete = 0;
  std::string output;
  generator.run(requests, options.seed, 0, [&](std::size_t i, const kernels::Drawn& drawn) {
    log_probabilities[i] += static_cast<double>(drawn.log_probability);
    texts[i].append(drawn.token);
    const auto over = [&](std::size_t text) {
      return texts[text].end() != GrowingText::End::none || texts[text].tokens() == options.new_tokens;
    };
    for (; complete < texts.size() && over(complete); ++complete)
      output += printed(options.json_lines || request.json, prompts[requests[complete].number], requests[complete],
                        all > 1, texts[complete], log_probabilities[complete]);
    if (world.is_root() && !request.json) std::fputs(std::exchange(output, {}).c_str(), stdout);
    return !over(i);
  });
  if (transcoder) parallel::on_all(world.all(), [&] { transcoder->require_valid_selections(); });
  for (int rank = ranks.copy.size(); rank < world.size(); rank += ranks.copy.size()) {
    const std::string theirs = world.all().broadcast(output, rank);
    if (!world.is_root()) continue;
    if (request.json)
      output += theirs;
    else
      std::fputs(theirs.c_str(), stdout);
  }
  if (request.json) {
    Json document = {{"model", opened.name()}, {"texts", Json::array()}};
    for (std::size_t begin = 0; begin < output.size();) {
      const std::size_t end = output.find('\n', begin);
      document["texts"].push_back(parse_json(std::string_view(output).substr(begin, end - begin)));
      begin = end + 1;
    }
    print_result(request, "", document);
  }
  return 0;
}

}  // namespace

extern const Command lm_generate_command = with_options(
    {"lm generate", "MODEL", "text that the model writes", "Continues prompts with text that a language model writes."},
    run_generate, [](Options& options, GenerateOptions& own) {
      options.example("weft lm generate runs/verses --prompt \"And the\" --max-new-tokens 50");
      options.add("--prompt", own.prompt, "TEXT", "the beginning of the text, or");
      options.add(
          "--prompts", own.prompts, "FILE",
          "one per line; FILE.jsonl, .ndjson or .json: {\"prompt\": TEXT} per line, or segments of weft prepare");
      options.add("--samples", own.samples, "N", "texts per prompt (default 1)", 1, 1 << 20);
      options.add("--max-new-tokens", own.new_tokens, "N", "of each text (default 100)", 1, 1 << 22);
      options.add("--temperature", own.temperature, "T",
                  "logits are divided by it; 0 = the most probable token (default 1)");
      options.add("--top-k", own.top_k, "K", "draw from the K most probable tokens (default 0 = all)", 0, 1 << 23);
      options.add("--top-p", own.top_p, "P", "of these from the fewest that reach probability P (default 1)");
      options.add("--stop", own.stop, "TEXT", "end before this text; repeatable");
      options.add("--seed", own.seed, "N", "of the random numbers (default 1)");
      options.add("--rows", own.rows, "N", "texts computed together (default 64, without a GPU 16)", 1, 1 << 14);
      options.add("--transcoder", own.transcoder, "CHECKPOINT", "the transcoder whose features are changed:");
      own.interventions.add_to(options);
      options.flag("--jsonl", own.json_lines, "print one JSON object per text, each as soon as it is complete");
      options.set().dry_run();
    });

}  // namespace weft::commands
