// SPDX-License-Identifier: Apache-2.0
//
// weft features CHECKPOINT --data DIR: what the features of a transcoder respond to and write, as features.h5 (weft
// serve shows it), and as JSON of single features.
#include <charconv>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <set>

#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "commands/transcoder/loaded_transcoder.hpp"
#include "kernels/optimize/adam.hpp"
#include "run/pass.hpp"
#include "run/usable_memory.hpp"
#include "storage/durable.hpp"
#include "transcoder/features/catalogue.hpp"

namespace weft::commands {
namespace {

constexpr std::int64_t kNearest = 5, kLogits = 10;
constexpr std::int64_t kDrawn = 1 << 24;  ///< activations from which co-active features are found

struct FeaturesOptions {
  std::string data;
  std::vector<std::string> features;  ///< LAYER:INDEX, in order
  std::int64_t top = 16;              ///< strongest activations per feature
  std::int64_t sample = 8;            ///< further activations per feature
  std::int64_t context = 10;          ///< tokens on each side of them
  std::int64_t downstream = 0;        ///< features of later layers per feature
  std::int64_t coactive = 0;          ///< features of the layer per feature
  std::string model;                  ///< "" or the language model of the activations
  std::string labels;                 ///< "" or FILE
};

/// The language model whose logits the features change: the rows of its unembedding, and the texts of its tokens.
struct Unembedding {
  Unembedding(const std::string& path, const LoadedTranscoder& loaded, const parallel::World& world)
      : opened(request_for(path, loaded.configuration()), world), part(opened, world, loaded.execution()) {
    const language_model::ModelSettings& model = opened.architecture.model;
    const transcoder::Shape& shape = loaded.model.shape();
    const language_model::Linear& head = part.model.layers().head();
    if (model.layers != shape.n_layers || model.d_model != shape.d_model)
      throw collective_error(ExitCode::usage,
                             "--model {}: has {} layers of width {}, the transcoder {} of {}; give the model of its "
                             "activations",
                             path, model.layers, model.d_model, shape.n_layers, shape.d_model);
    if (head.transposed || head.is_packed())
      throw collective_error(ExitCode::usage, "--model {}: its head is stored in another form; take the whole weights",
                             path);
    rows = {opened.architecture.vocabulary, [this, execution = loaded.execution(), parameter = head.weight](
                                                std::int64_t begin, kernels::Matrix<float> out) {
              kernels::weights_to_float(execution, part.model.layers().parameters().matrix(parameter), begin, out);
            }};
    const auto tokenizer = opened.tokenizer(world, loaded.execution());
    for (std::int64_t id = 0; tokenizer && id < tokenizer->vocabulary_size(); ++id) {
      const std::uint32_t token[] = {static_cast<std::uint32_t>(id)};
      vocabulary.push_back(tokenizer->detokenise(token, true));
    }
  }

  static Request request_for(const std::string& path, const transcoder::Configuration& configuration) {
    Request request;
    request.command = "lm evaluate";
    request.subject = path;
    request.sets = {fmt::format("device.backend=\"{}\"", configuration.device.backend)};
    return request;
  }

  const OpenedModel opened;
  const ForwardModel part;
  transcoder::RowBlocks rows;
  dataset::Vocabulary vocabulary;
};

/// Throws a collective Error(usage) if this rank has less host memory than the collection takes.
void require_memory(const transcoder::Model& model, const transcoder::CatalogueFacts& facts,
                    const parallel::World& world) {
  const std::int64_t coactive = facts.n_coactive > 0 ? kDrawn * (8 + 16 / facts.n_layers) : 0;
  const std::int64_t needed = coactive + transcoder::FeatureCollection::bytes(model.shape().n_layers * model.n_local(),
                                                                              facts.n_examples(), facts.context);
  const run::HostShare usable = run::usable_host_memory(world);
  if (usable.bytes > 0 && needed > usable.bytes)
    throw collective_error(ExitCode::usage,
                           "the examples of all features need {} of host memory per rank, {} are usable ({}); lower "
                           "--top, --sample or --context, or take more ranks",
                           format::binary_bytes_text(needed), format::binary_bytes_text(usable.bytes), usable.limit);
}

using FeatureName = std::pair<std::int64_t, std::int64_t>;  // layer, index

/// "3:17" -> {3, 17}. Throws a collective Error(usage) unless the transcoder has that feature.
FeatureName feature_named(const std::string& text, const transcoder::Shape& shape) {
  FeatureName name{-1, -1};
  const std::size_t colon = text.find(':');
  const auto number = [&](std::size_t begin, std::size_t end, std::int64_t& value) {
    const auto [stopped, status] = std::from_chars(text.data() + begin, text.data() + end, value);
    return status == std::errc() && stopped == text.data() + end;
  };
  if (colon == std::string::npos || !number(0, colon, name.first) || !number(colon + 1, text.size(), name.second) ||
      name.first < 0 || name.first >= shape.n_layers || name.second < 0 || name.second >= shape.n_features)
    throw collective_error(
        ExitCode::usage,
        "--feature {} is not a feature of this transcoder (LAYER:INDEX, layers 0 to {}, features 0 to "
        "{})",
        text, shape.n_layers - 1, shape.n_features - 1);
  return name;
}

int run_features(const Request& request, const FeaturesOptions& options, const parallel::World& world) {
  if (request.output.empty() && options.features.empty())
    throw collective_error(ExitCode::usage,
                           "nothing to write; give --output DIR (features.h5) or --feature LAYER:INDEX");

  // 1. The transcoder, the data, and the requested features.
  LoadedTranscoder loaded(request, options.data, world);
  const transcoder::Shape& shape = loaded.model.shape();
  std::set<FeatureName> requested;
  for (const std::string& text : options.features) requested.insert(feature_named(text, shape));
  const dataset::Description& description = loaded.description;
  transcoder::CatalogueFacts facts;
  facts.checkpoint = loaded.found.path.string();
  facts.data = loaded.data;
  facts.dataset_fingerprint = description.fingerprint;
  facts.model = description.model;
  facts.step = loaded.found.manifest.step;
  facts.tokens = description.n_rows;
  facts.n_layers = shape.n_layers;
  facts.d_model = shape.d_model;
  facts.n_features = shape.n_features;
  facts.n_top = options.top;
  facts.n_sample = options.sample;
  facts.n_downstream = options.downstream;
  facts.n_coactive = std::min(options.coactive, shape.n_features - 1);
  facts.context = description.has_tokens ? options.context : 0;
  facts.n_nearest = std::min(kNearest, shape.n_features - 1);
  facts.has_tokens = description.has_tokens;
  if (!description.has_tokens)
    log::info("{}: no token ids; examples are given as rows of the dataset", description.path);

  require_memory(loaded.model, facts, world);
  std::optional<Unembedding> unembedding;
  if (!options.model.empty()) {
    unembedding.emplace(options.model, loaded, world);
    facts.n_logits = std::min(kLogits, unembedding->rows.rows);
  }
  transcoder::Labels labels;
  if (!options.labels.empty())
    world.on_root([&] { labels = transcoder::read_labels(options.labels, shape.n_layers, shape.n_features); });

  // 2. A pass over the data, and one for what surrounds the examples.
  const std::int64_t threads = loaded.runtime.threads();
  const auto each_batch = [&](const std::function<void(const transcoder::SparseRows&)>& consume) {
    transcoder::for_each_batch(description, loaded.forward, loaded.grid, loaded.execution(), loaded.batch_tokens(),
                               consume);
  };
  transcoder::FeatureCollection collection(shape.n_layers * loaded.model.n_local(), facts.n_top, facts.n_sample);
  each_batch([&](const transcoder::SparseRows& rows) { collection.add(rows, threads); });
  collection.finish();
  std::optional<transcoder::Shades> shades;
  if (facts.has_tokens) shades.emplace(collection, facts.context);
  std::int64_t n_active[] = {std::accumulate(collection.fired().begin(), collection.fired().end(), std::int64_t{0})};
  loaded.grid.axis(parallel::kFeatureAxis).sum(n_active);
  transcoder::RowSample drawn{static_cast<double>(kDrawn) / static_cast<double>(std::max(n_active[0], kDrawn))};
  if (facts.has_tokens || facts.n_coactive > 0)
    each_batch([&](const transcoder::SparseRows& rows) {
      if (shades) shades->add(rows, threads);
      if (facts.n_coactive > 0) drawn.add(rows);
    });

  // 3. Layer by layer to rank 0, which writes.
  std::optional<dataset::RowTokens> tokens;
  if (description.has_tokens) tokens.emplace(description);
  dataset::Vocabulary vocabulary;
  std::optional<transcoder::CatalogueFile> file;
  const std::filesystem::path output = request.output;
  world.on_root([&] {
    vocabulary = dataset::read_vocabulary(description);
    if (vocabulary.empty() && unembedding) vocabulary = unembedding->vocabulary;
    if (request.output.empty()) return;
    storage::make_directory(output);
    file.emplace(output / "features.h5", facts, vocabulary, labels);
  });
  const transcoder::CatalogueSources sources{
      collection,   shades ? &*shades : nullptr, tokens ? &*tokens : nullptr,
      loaded.model, loaded.normalisation,        unembedding ? &unembedding->rows : nullptr,
      drawn};
  std::string lines;
  run::Pass pass("features", shape.n_layers, "layers");
  Json document = {{"checkpoint", facts.checkpoint}, {"data", facts.data}, {"step", facts.step}};
  document["features"] = Json::array();
  for (std::int64_t layer = 0; layer < shape.n_layers; ++layer) {
    const transcoder::LayerCatalogue catalogue =
        transcoder::gather_layer(facts, layer, sources, loaded.grid, loaded.execution());
    world.on_root([&] {
      if (file) file->add(catalogue);
      for (const auto& [of_layer, feature] : requested)
        if (of_layer == layer)
          document["features"].push_back(transcoder::to_json(facts, catalogue, feature, vocabulary, labels));
    });
    pass.done(layer + 1);
  }
  world.on_root([&] {
    if (file) {
      file->finish();
      log::info("{} features of step {} on {} tokens: {}", format::grouped(shape.n_layers * shape.n_features),
                facts.step, format::grouped(facts.tokens), (output / "features.h5").string());
      log::info("next: weft serve {}", request.output);
    }
  });
  if (!request.output.empty()) document["output"] = request.output;
  for (const Json& feature : document["features"]) lines += finite_json_text(feature) + "\n";
  if (!lines.empty()) lines.pop_back();
  if (request.json || !lines.empty()) print_result(request, lines, document);  // without --json a line per feature
  return 0;
}

}  // namespace

extern const Command features_command = with_options(
    {"features", "CHECKPOINT", "what features respond to and write",
     "Collects what features respond to: their strongest activations with the tokens around them, densities and "
     "decoder rows. With --output as features.h5 (weft serve shows it), with --feature as JSON of single features."},
    run_features, [](Options& options, FeaturesOptions& own) {
      options.example("weft features runs/transcoder --model runs/model --output features");
      data_option(options, own.data)
          .add("--feature", own.features, "LAYER:INDEX", "print this feature as JSON; repeatable");
      options.add("--top", own.top, "N", "strongest activations per feature (default 16)", 1, 1 << 16);
      options.add("--sample", own.sample, "N", "further activations per feature, drawn at random (default 8)", 0,
                  1 << 16);
      options.add("--context", own.context, "N", "tokens on each side of these (default 10)", 0, 1 << 16);
      options.add(
          "--model", own.model, "MODEL",
          "the language model of the activations (run, checkpoint or directory of Hugging Face): also the tokens "
          "whose logits each feature raises and lowers most");
      options.add("--downstream", own.downstream, "N",
                  "also the N features of later layers that each feature excites most (default 0)", 0, 1 << 10);
      options.add("--coactive", own.coactive, "N",
                  "also the N features of the layer that fire most often at the tokens of each feature (default 0)", 0,
                  1 << 10);
      options.add("--labels", own.labels, "FILE",
                  "labels of features, JSON Lines with \"layer\", \"feature\" and \"label\", for pages and JSON");
      options.set().output("directory for features.h5");
    });

}  // namespace weft::commands
