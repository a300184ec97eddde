// SPDX-License-Identifier: Apache-2.0
//
// weft attribute MODEL --transcoder CHECKPOINT --prompt TEXT --output FILE: attribution graphs of prompts. Each rank
// has the whole model and the whole transcoder and forms some rows of the matrix of effects.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "commands/language_model/encoded_prompts.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "commands/language_model/replacement.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/residual/residual.hpp"
#include "language_model/attribution/attribution.hpp"
#include "language_model/attribution/graph_check.hpp"
#include "language_model/attribution/graph_files.hpp"
#include "run/usable_memory.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"

namespace weft::commands {
namespace {

using namespace language_model;
using kernels::AnyMatrix;

struct AttributeOptions {
  std::string transcoder;
  std::vector<std::string> prompts;
  std::string file;  ///< "" or FILE of prompts
  std::string scan;  ///< "": the name of the model
  AttributionSettings attribution;
  double prune_nodes = 0.8, prune_edges = 0.98;
  bool matrix = false;
  std::int64_t check = 0;  ///< features per prompt whose effects are compared with interventions
};

void require_options(const Request& request, const AttributeOptions& options) {
  const auto refuse = [](const std::string& why) {
    return collective_error(ExitCode::usage, "weft attribute: {}; see weft attribute --help", why);
  };
  if (options.transcoder.empty()) throw refuse("needs --transcoder CHECKPOINT (whose features are the nodes)");
  if (options.prompts.empty() == options.file.empty())
    throw refuse("needs either --prompt TEXT, once or several times, or --prompts FILE");
  if (request.output.empty()) throw refuse("needs --output FILE (the graph is written there)");
  for (const auto& [name, part] : {std::pair{"--prune", options.prune_nodes}, {"--prune-edges", options.prune_edges}})
    if (!(part > 0 && part <= 1)) throw refuse(fmt::format("{} {} is not above 0 and at most 1", name, part));
  const double probability = options.attribution.logit_probability;
  if (!(probability > 0 && probability <= 1))
    throw refuse(fmt::format("--logit-probability {} is not above 0 and at most 1", probability));
}

std::vector<Prompt> read_prompts(const AttributeOptions& options, const Tokenizer& tokenizer,
                                 const Architecture& architecture, const parallel::World& world) {
  std::vector<Prompt> prompts;
  parallel::on_all(world.all(), [&] {
    prompts = encoded_prompts(options.prompts, options.file, tokenizer, architecture.positions, "data.sequence");
  });
  return prompts;
}

std::int64_t longest_of(const std::vector<Prompt>& prompts) {
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts) longest = std::max(longest, std::ssize(prompt.ids));
  return longest;
}

/// Features of a prompt that are listed: those with most influence, in this order.
constexpr std::size_t kListed = 10;

std::vector<std::size_t> strongest(const Graph& graph, std::span<const double> influence) {
  std::vector<std::size_t> features(graph.features.size());
  std::iota(features.begin(), features.end(), 0);
  const auto end = features.begin() + static_cast<std::ptrdiff_t>(std::min(kListed, features.size()));
  std::partial_sort(features.begin(), end, features.end(), [&](std::size_t a, std::size_t b) {
    return influence[a] != influence[b] ? influence[a] > influence[b] : a < b;
  });
  features.erase(end, features.end());
  return features;
}

Json strongest_json(const Graph& graph, std::span<const double> influence, std::span<const std::string> tokens) {
  Json features = Json::array();
  for (const std::size_t number : strongest(graph, influence)) {
    const ActiveFeature& feature = graph.features[number];
    features.push_back({{"layer", feature.layer},
                        {"feature", feature.index},
                        {"token", feature.token},
                        {"text", tokens[static_cast<std::size_t>(feature.token)]},
                        {"activation", feature.activation},
                        {"influence", influence[number]}});
  }
  return features;
}

std::string to_table(const Json& features) {
  std::string text =
      fmt::format("{:<16}{:>6}  {:<16}{:>12}{:>12}", "layer:feature", "token", "", "activation", "influence");
  for (const Json& feature : features)
    text +=
        fmt::format("\n{:<16}{:>6}  {:<16}{:>12.4g}{:>12.4g}",
                    fmt::format("{}:{}", feature["layer"].get<std::int64_t>(), feature["feature"].get<std::int64_t>()),
                    feature["token"].get<std::int64_t>(), printable(feature["text"].get<std::string>(), 16),
                    feature["activation"].get<float>(), feature["influence"].get<double>());
  return text;
}

/// FILE of one prompt, or FILE with its number before the extension.
std::filesystem::path path_of(const std::string& output, std::size_t number, std::size_t prompts,
                              const std::string& extension) {
  const std::filesystem::path path(output);
  const std::string stem = path.extension() == ".json" ? path.stem().string() : path.filename().string();
  return path.parent_path() / (stem + (prompts == 1 ? "" : fmt::format("_{}", number + 1)) + extension);
}

/// Memory of the work on the longest prompt, but for what depends on its active features.
struct Work {
  Work(const LoadedLanguageModel& loaded, std::int64_t tokens, std::span<const AnyMatrix> skip)
      : settings(freezing_settings(loaded.configuration(), loaded.architecture(), tokens)),
        arena(loaded.execution(), loaded.part.ranks.grid),
        transformer(loaded.part.model, settings, timers, arena),
        staging(tokens, false, loaded.execution(), arena),
        text(loaded.architecture().model, tokens, transformer, loaded.execution(), arena),
        targets(targets_together(loaded.architecture().model, tokens)),
        backward(text, loaded.part.model.layers(), tokens, targets, skip, loaded.execution(), arena),
        errors(arena.take<float>(tokens * loaded.architecture().model.layers * loaded.architecture().model.d_model)) {
    transformer.prepare_weights();
  }

  /// The same sizes without memory, but for the transformer's.
  static model::StepArena sizes(const TransformerSettings& settings, std::int64_t tokens, kernels::Backend backend) {
    const ModelSettings& model = settings.architecture.model;
    model::StepArena arena(backend);
    const Staging::Buffers staging(tokens, false, false, arena);
    const FrozenText::Buffers text(model, tokens, arena);
    const FrozenBackward::Buffers backward(model,
                                           kernels::product_type(settings.storage, backend == kernels::Backend::cuda),
                                           tokens, targets_together(model, tokens), arena);
    arena.take<float>(tokens * model.layers * model.d_model);
    return arena;
  }
  static std::int64_t bytes(const Configuration& configuration, const Architecture& architecture, std::int64_t tokens,
                            kernels::Backend backend) {
    const TransformerSettings settings = freezing_settings(configuration, architecture, tokens);
    model::StepArena arena(backend);
    const Transformer::Buffers transformer(settings, arena);
    return arena.device_bytes() + sizes(settings, tokens, backend).device_bytes();
  }

  const TransformerSettings settings;
  run::Timers timers;
  model::StepArena arena;
  Transformer transformer;
  Staging staging;
  FrozenText text;
  const std::int64_t targets;
  FrozenBackward backward;
  const kernels::Array<float> errors;  ///< [tokens, L * C]
};

/// Throws a collective Error(usage) if this rank has less.
void require_host_memory(std::int64_t bytes, const std::string& what, const char* remedy,
                         const parallel::World& world) {
  const run::HostShare usable = run::usable_host_memory(world);
  if (usable.bytes > 0 && bytes > usable.bytes)
    throw collective_error(ExitCode::usage, "{} need {} per rank, {} are usable ({}); {}", what,
                           format::binary_bytes_text(bytes), format::binary_bytes_text(usable.bytes), usable.limit,
                           remedy);
}

/// The forward pass over a prompt. Leaves what is frozen, and in `errors` what the reconstruction lacks.
void freeze(const Prompt& prompt, Work& work, TranscoderReplacement& transcoder, const parallel::World& world,
            const kernels::Execution& execution) {
  dataset::TokenBatch batch = work.staging.next(1, std::ssize(prompt.ids));
  std::copy(prompt.ids.begin(), prompt.ids.end(), batch.ids.begin());
  std::fill(batch.targets.begin(), batch.targets.end(), kernels::kIgnored);
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  work.staging.send(batch, 0);
  work.text.freeze(work.staging.tokens(0, 1, std::ssize(prompt.ids)));
  const AnyMatrix inputs = work.text.mlp_inputs();
  const AnyMatrix errors{work.errors.data, kernels::Scalar::fp32, inputs.rows, inputs.columns, inputs.columns};
  transcoder.reconstruction().form(inputs, {work.errors.data, inputs.rows, inputs.columns, inputs.columns});
  parallel::on_all(world.all(), [&] { transcoder.require_valid_selections(); });
  kernels::scale_rows(execution, errors, -1);
  kernels::add_rows(execution, work.text.mlp_outputs(), errors, errors);
}

std::vector<std::string> texts_of(const Tokenizer& tokenizer, const std::vector<std::uint32_t>& ids) {
  std::vector<std::string> texts;
  for (const std::uint32_t id : ids)
    texts.push_back(id < static_cast<std::uint32_t>(tokenizer.vocabulary_size()) ? tokenizer.detokenise({{id}}, true)
                                                                                 : fmt::format("<{}>", id));
  return texts;
}

Error refusal(const std::string& name, const std::string& why) {
  return collective_error(ExitCode::usage, "{}: no attribution graph ({})", name, why);
}

/// --dry-run: memory but for what depends on the features that are active.
int plan_attribution(const Request& request, const AttributeOptions& options, const parallel::World& world) {
  const OpenedModel opened(request, world);
  if (const std::string why = freezing_obstacle(opened.architecture); !why.empty()) throw refusal(opened.name(), why);
  const std::optional<Tokenizer> tokenizer = opened.tokenizer(world, {});
  if (!tokenizer) throw refusal(opened.name(), "the model has no tokeniser; name another");
  const std::int64_t tokens = longest_of(read_prompts(options, *tokenizer, opened.architecture, world));
  const TransformerSettings settings = freezing_settings(opened.configuration(), opened.architecture, tokens);
  Plan plan = forward_plan(opened.configuration(), opened.architecture, settings);
  const kernels::Backend backend = device::planned_backend(device_settings(opened.configuration()));
  const model::StepArena arena = Work::sizes(settings, tokens, backend);
  for (const model::StepArena::Bytes& bytes : arena.bytes()) plan.device.emplace_back(bytes.purpose, bytes.device);
  const PlannedTranscoder transcoder(options.transcoder, opened.architecture.model, tokens, backend, world);
  plan.device.emplace_back("transcoder", transcoder.bytes);
  if (options.check > 0) plan.device.emplace_back("interventions", check_bytes(settings, tokens, 1));
  return print_plan(request, opened, plan);
}

int run_attribute(const Request& request, const AttributeOptions& options, const parallel::World& world) {
  // 1. The model and the transcoder, and the prompts in the model's tokens.
  require_options(request, options);
  if (request.dry_run) return plan_attribution(request, options, world);
  const LoadedLanguageModel loaded(request, world);
  const Architecture& architecture = loaded.architecture();
  const kernels::Execution& execution = loaded.execution();
  if (loaded.part.ranks.copy.size() > 1)
    throw refusal(loaded.opened.name(), "each rank needs the whole model; give --set parallel.tensor=1");
  if (const std::string why = freezing_obstacle(architecture); !why.empty()) throw refusal(loaded.opened.name(), why);
  if (!loaded.tokenizer) throw refusal(loaded.opened.name(), "the model has no tokeniser; name another");
  const Tokenizer& tokenizer = *loaded.tokenizer;
  const std::vector<Prompt> prompts = read_prompts(options, tokenizer, architecture, world);
  const std::int64_t longest = longest_of(prompts);
  require_host_memory(Work::bytes(loaded.configuration(), architecture, longest, execution.backend),
                      fmt::format("{} tokens", longest), "give shorter prompts", world);
  TranscoderReplacement transcoder(options.transcoder, architecture.model, longest, execution, world);
  if (const std::string why = transcoder.attribution_obstacle(); !why.empty())
    throw refusal(transcoder.found().path.string(), why);
  const std::vector<device::Buffer<float>> skip_matrices = transcoder.skip_matrices();
  std::vector<AnyMatrix> skip;
  for (const device::Buffer<float>& matrix : skip_matrices)
    skip.push_back({matrix.data(), kernels::Scalar::fp32, architecture.model.d_model, architecture.model.d_model,
                    architecture.model.d_model});
  Work work(loaded, longest, skip);

  // 2. The graph of each prompt.
  std::string printed;
  Json documents = Json::array();
  for (std::size_t number = 0; number < prompts.size(); ++number) {
    const Prompt& prompt = prompts[number];
    const std::int64_t tokens = std::ssize(prompt.ids);
    freeze(prompt, work, transcoder, world, execution);
    const std::vector<float> of_tokens = work.transformer.logits(tokens - 1);
    if (!std::all_of(of_tokens.begin(), of_tokens.end(), [](float logit) { return std::isfinite(logit); }))
      throw collective_error(ExitCode::numeric,
                             "{}: a logit of the model is not finite (it has weights that are not, or too large)",
                             prompt.source);
    const std::vector<Graph::Logit> logits = salient_logits(of_tokens, options.attribution);
    std::vector<ActiveFeature> active = transcoder.active_features();
    const std::int64_t n_active = std::ssize(active);
    require_host_memory(transcoder.vector_bytes(active) +
                            (options.check > 0 ? check_bytes(work.settings, tokens, n_active) : 0) +
                            Attribution::matrix_bytes(n_active, architecture.model.layers, tokens, options.attribution),
                        fmt::format("{} active features", format::grouped(n_active)), "take fewer --max-nodes", world);
    const ActiveFeatures features = transcoder.vectors_of(std::move(active));
    model::StepArena arena(execution, loaded.part.ranks.grid);
    Attribution attribution(work.backward, loaded.part.model, features,
                            {work.errors.data, kernels::Scalar::fp32, tokens, work.text.mlp_inputs().columns,
                             work.text.mlp_inputs().columns},
                            prompt.ids, work.targets, execution, arena);
    const Graph graph = attribution.graph(logits, options.attribution, world.all());

    // 3. Its scores and its files.
    world.on_root([&] {
      const std::filesystem::path path = path_of(request.output, number, prompts.size(), ".json");
      const std::vector<double> of_nodes = influence(graph);
      const GraphScores measured = scores(graph, of_nodes);
      const Pruned pruned = prune(graph, of_nodes, options.prune_nodes, options.prune_edges);
      std::vector<std::uint32_t> ids;
      for (const Graph::Logit& logit : graph.logits) ids.push_back(logit.id);
      GraphFacts facts{
          .slug = path.stem().string(),
          .scan = options.scan.empty() ? std::filesystem::path(request.subject).filename().string() : options.scan,
          .prompt = tokenizer.detokenise(prompt.ids),
          .tokens = texts_of(tokenizer, prompt.ids),
          .logits = texts_of(tokenizer, ids),
          .model = loaded.opened.name(),
          .transcoder = transcoder.found().path.string(),
          .generation = {{"max_n_logits", options.attribution.max_logits},
                         {"desired_logit_prob", options.attribution.logit_probability}},
          .prune_nodes = options.prune_nodes,
          .prune_edges = options.prune_edges};
      if (options.attribution.max_nodes > 0) facts.generation["max_feature_nodes"] = options.attribution.max_nodes;
      storage::PendingOutput file(path, storage::PendingOutput::Kind::file);
      storage::write_text(file.place(), graph_json(graph, pruned, measured, facts));
      file.publish();
      if (options.matrix)
        write_graph_matrix(path_of(request.output, number, prompts.size(), ".h5"), graph, of_nodes, measured, facts);
      const auto kept = std::count(pruned.sources.begin(), pruned.sources.end(), 1) + std::ssize(graph.logits);
      printed += fmt::format(
          "{}{}: {} of {} active features, replacement {:.4f}, completeness {:.4f}; after pruning {} nodes, {} edges",
          printed.empty() ? "" : "\n", path.string(), format::grouped(std::ssize(graph.features)),
          format::grouped(graph.active), measured.replacement, measured.completeness, format::grouped(kept),
          format::grouped(std::ssize(pruned.edges)));
      const Json listed = strongest_json(graph, of_nodes, facts.tokens);
      if (prompts.size() == 1) printed += "\n" + to_table(listed);
      const std::vector<CheckedFeature> checked =
          options.check == 0
              ? std::vector<CheckedFeature>{}
              : check_graph(graph, of_nodes, options.check, features,
                            {work.settings, work.transformer, work.text, work.staging.tokens(0, 1, tokens), skip},
                            execution);
      if (!checked.empty()) printed += "\n" + to_table(checked, graph, printable(facts.logits[0]));
      documents.push_back({{"output", path.string()},
                           {"tokens", tokens},
                           {"active_features", graph.active},
                           {"features", graph.features.size()},
                           {"replacement", measured.replacement},
                           {"completeness", measured.completeness},
                           {"nodes", kept},
                           {"edges", pruned.edges.size()},
                           {"strongest", listed}});
      if (options.check > 0) documents.back()["check"] = to_json(checked, graph);
    });
  }
  print_written(
      request, printed,
      {{"model", loaded.opened.name()}, {"transcoder", transcoder.found().path.string()}, {"graphs", documents}});
  log::info("next: weft serve {} FEATURES, with the directory of weft features",
            path_of(request.output, 0, prompts.size(), ".json").string());
  return 0;
}

}  // namespace

extern const Command attribute_command = with_options(
    {"attribute", "MODEL", "which features lead to the next token: a graph",
     "Writes attribution graphs: the direct effects of features of a transcoder, of its errors and of the tokens on "
     "one "
     "another and on the most probable next tokens, with attention patterns and norm denominators frozen."},
    run_attribute, [](Options& options, AttributeOptions& own) {
      options.example("weft attribute gpt2 --transcoder thresholds --prompt \"The\" --output g.json");
      options.add("--transcoder", own.transcoder, "CHECKPOINT", "the transcoder whose features are nodes");
      options.add("--prompt", own.prompts, "TEXT", "the text; repeatable, a graph for each; or");
      options.add(
          "--prompts", own.file, "FILE",
          "one per line; FILE.jsonl, .ndjson or .json: {\"prompt\": TEXT} per line, or segments of weft prepare");
      options.add("--output", options.request.output, "FILE",
                  "the graph as JSON; of several prompts with their number before .json");
      options.flag("--matrix", own.matrix, "also write all effects as HDF5, next to the JSON file");
      options.add("--max-nodes", own.attribution.max_nodes, "N",
                  "features of the graph, those with most influence (default: all that are active)", 1, 1 << 24);
      options.add("--max-logits", own.attribution.max_logits, "N", "next tokens that are nodes, at most (default 10)",
                  1, 1024);
      options.add("--logit-probability", own.attribution.logit_probability, "P",
                  "the fewest next tokens that hold it are nodes (default 0.95)");
      options.add("--prune", own.prune_nodes, "P",
                  "nodes of the JSON file hold this part of the influence (default 0.8)");
      options.add("--prune-edges", own.prune_edges, "P", "and its edges this part (default 0.98)");
      options.add(
          "--check", own.check, "[N]",
          "compare effects of the N features with most influence with interventions on the model (without N: 10)", 1,
          1 << 16);
      options.last().implied = "10";
      options.add("--scan", own.scan, "NAME", "name of model and transcoder in the file (default: that of MODEL)");
      options.set().dry_run();
    });

}  // namespace weft::commands
