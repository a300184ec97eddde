// SPDX-License-Identifier: Apache-2.0
//
// weft features CHECKPOINT --data DIR: what the features of a transcoder respond to and write, as features.h5 (weft
// serve shows it), and as JSON of single features.
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/transcoder/loaded_transcoder.hpp"
#include "run/pass.hpp"
#include "storage/durable.hpp"
#include "transcoder/features/catalogue.hpp"

namespace weft::commands {
namespace {

constexpr std::int64_t kNearest = 5;

struct FeaturesOptions {
  std::string data;
  std::vector<std::string> features;  ///< LAYER:INDEX, in order
  std::int64_t top = 16;              ///< strongest activations per feature
  std::int64_t context = 10;          ///< tokens on each side of them
};

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
  facts.context = description.has_tokens ? options.context : 0;
  facts.n_nearest = std::min(kNearest, shape.n_features - 1);
  facts.has_tokens = description.has_tokens;
  if (!description.has_tokens)
    log::info("{}: no token ids; examples are given as rows of the dataset", description.path);

  // 2. One pass over the data.
  transcoder::FeatureCollection collection(shape.n_layers * loaded.model.n_local(), facts.n_top);
  transcoder::for_each_batch(description, loaded.forward, loaded.grid, loaded.execution(), loaded.batch_tokens(),
                             [&](const transcoder::SparseRows& rows) { collection.add(rows); });

  // 3. Layer by layer to rank 0, which writes.
  std::optional<dataset::RowTokens> tokens;
  if (description.has_tokens) tokens.emplace(description);
  dataset::Vocabulary vocabulary;
  std::optional<transcoder::CatalogueFile> file;
  const std::filesystem::path output = request.output;
  world.on_root([&] {
    vocabulary = dataset::read_vocabulary(description);
    if (request.output.empty()) return;
    storage::make_directory(output);
    file.emplace(output / "features.h5", facts, vocabulary);
  });
  std::string lines;
  run::Pass pass("features", shape.n_layers, "layers");
  Json document = {{"checkpoint", facts.checkpoint}, {"data", facts.data}, {"step", facts.step}};
  document["features"] = Json::array();
  for (std::int64_t layer = 0; layer < shape.n_layers; ++layer) {
    const transcoder::LayerCatalogue catalogue = transcoder::gather_layer(
        facts, layer, collection, loaded.model, tokens ? &*tokens : nullptr, loaded.grid, loaded.execution());
    world.on_root([&] {
      if (file) file->add(catalogue);
      for (const auto& [of_layer, feature] : requested)
        if (of_layer == layer)
          document["features"].push_back(transcoder::to_json(facts, catalogue, feature, vocabulary));
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
    {"features", "CHECKPOINT", "what features respond to: tokens, densities, decoder rows",
     "Collects what features respond to: their strongest activations with the tokens around them, densities and "
     "decoder rows. With --output as features.h5 (weft serve shows it), with --feature as JSON of single features."},
    run_features, [](Options& options, FeaturesOptions& own) {
      data_option(options, own.data)
          .add("--feature", own.features, "LAYER:INDEX", "print this feature as JSON; repeatable");
      options.add("--top", own.top, "N", "strongest activations per feature (default 16)", 1, 1 << 16);
      options.add("--context", own.context, "N", "tokens on each side of them (default 10)", 0, 1 << 16);
      options.set().output("receives features.h5");
    });

}  // namespace weft::commands
