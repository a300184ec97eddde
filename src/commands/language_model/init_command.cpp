// SPDX-License-Identifier: Apache-2.0
//
// weft init --model MODEL --text FILES: prints the input of a transcoder of this model, to begin with.
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <filesystem>

#include "base/format.hpp"
#include "commands/language_model/opened.hpp"
#include "dataset/dataset_settings.hpp"
#include "input/print.hpp"
#include "input/strings.hpp"

namespace weft::commands {
namespace {

struct InitOptions {
  std::string model;
  std::vector<std::string> texts;
  std::string validation;  ///< "" or a directory of activations
};

// The default of data.batch_tokens; text has about four bytes per token.
constexpr std::int64_t kBatchTokens = 4096, kLongestSequence = 256, kBytesPerToken = 4;
constexpr std::int64_t kFewestSteps = 1000, kMostSteps = 20000;
// On a machine or GPU with 16 GB: of weights and moments; of rows that are shuffled together.
constexpr std::int64_t kMostBytes = std::int64_t{12} << 30, kMostWindowBytes = std::int64_t{3} << 30;

struct Size {
  std::int64_t features;
  bool cross_layer;
  std::int64_t bytes;  ///< of weights and moments in fp32
};

std::int64_t power_of_two(std::int64_t most) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most)));
}

/// 4 to 8 features per dimension. They write to all later layers if that fits a machine or GPU with 16 GB, else to
/// their own layer.
Size size_of(std::int64_t layers, std::int64_t d_model) {
  constexpr std::int64_t kBytesPerWeight = 12;
  const std::int64_t features = power_of_two(8 * d_model), row = features * d_model * kBytesPerWeight;
  const std::int64_t cross_layer = (layers + layers * (layers + 1) / 2) * row;
  if (cross_layer <= kMostBytes) return {features, true, cross_layer};
  return {features, false, 2 * layers * row};
}

/// Throws unless the model and the texts are there.
void require_files(const InitOptions& options) {
  if (options.model.empty() || options.texts.empty())
    throw error(ExitCode::usage, "weft init: needs --model MODEL and --text FILES; see weft init --help");
  require_no_hub_name(options.model);
  if (!std::filesystem::exists(options.model))
    throw error(ExitCode::usage,
                "{}: no such run or directory; name a run, a checkpoint or a directory of Hugging Face", options.model);
  for (const std::string& text : options.texts)
    if (!std::filesystem::is_regular_file(text))
      throw error(ExitCode::usage, "--text {}: no such file; name text files", text);
}

/// As TOML. A "${" of a path is no variable of the environment.
std::string quoted(const std::string& path) { return input::toml_value(input::protect_from_expansion(path)); }

int run_init(const Request& request, const InitOptions& options, const parallel::World& world) {
  world.on_root([&] { require_files(options); });
  Request named = request;
  named.subject = options.model;
  const OpenedModel opened(named, world);
  if (opened.directory && !opened.directory->tokenizer())
    throw collective_error(ExitCode::usage,
                           "{}: has no tokeniser (tokenizer.json), which text needs; put that of the model there",
                           options.model);

  const language_model::ModelSettings& model = opened.configuration().language_model;
  std::int64_t bytes = 0;
  std::vector<std::string> texts;
  for (const std::string& text : options.texts) texts.push_back(quoted(text));
  world.on_root([&] {
    for (const std::string& text : options.texts) bytes += static_cast<std::int64_t>(std::filesystem::file_size(text));
  });
  const std::int64_t steps = std::clamp(bytes / kBytesPerToken / kBatchTokens, kFewestSteps, kMostSteps);
  // Powers of two: a forward pass holds whole windows. Two windows of rows are in memory, with input and output in
  // bf16.
  const std::int64_t sequence = power_of_two(std::min(opened.configuration().data.sequence, kLongestSequence));
  const std::int64_t window =
      std::clamp<std::int64_t>(power_of_two(kMostWindowBytes / (8 * model.layers * model.d_model)), kBatchTokens,
                               dataset::Settings{}.window_rows);
  const Size size = size_of(model.layers, model.d_model);
  const std::filesystem::path path = std::filesystem::path(options.model).lexically_normal();
  const std::string name = (path.has_filename() ? path.filename() : path.parent_path().filename()).string();
  const std::string output = fmt::format("runs/{}_transcoder", name);

  const std::string text = fmt::format(
      "[run]\n"
      "output = {}\n"
      "steps  = {:<8}    # {} tokens; at 4 bytes per token the text has {}\n"
      "[data]\n"
      "model      = {}\n"
      "text       = {}\n{}"
      "sequence   = {:<8}# tokens that the model reads at a time\n{}"
      "[transcoder]\n"
      "features   = {:<8}# per layer; {} layers of width {}; {} for weights and moments\n"
      "decoder    = {}\n"
      "activation = \"batch_topk\"\n"
      "k          = 16      # active per token and layer, on average{}",
      quoted(output), steps, format::grouped(steps * kBatchTokens), format::grouped(bytes / kBytesPerToken),
      quoted(options.model), fmt::format("[{}]", fmt::join(texts, ", ")),
      options.validation.empty() ? "" : fmt::format("validation = {}\n", quoted(options.validation)), sequence,
      window == dataset::Settings{}.window_rows
          ? ""
          : fmt::format("window_rows = {:<7}# rows that are shuffled together\n", window),
      size.features, model.layers, model.d_model, format::decimal_bytes_text(static_cast<double>(size.bytes)),
      size.cross_layer ? "\"cross_layer\"   # a feature writes to its layer and all later ones"
                       : "\"per_layer\"   # to its own layer: cross_layer exceeds 12 GiB",
      kernels::kCudaBuild ? "\n[device]\nprecision = \"bf16\"    # as the fast kernels of a GPU need it" : "");
  print_result(request, text,
               {{"input", text},
                {"output", output},
                {"steps", steps},
                {"features", size.features},
                {"decoder", size.cross_layer ? "cross_layer" : "per_layer"},
                {"sequence", sequence}});
  return 0;
}

}  // namespace

extern const Command init_command = with_options(
    {"init", "", "the input of a transcoder of a language model",
     "Prints the input of a transcoder of a language model on a text, to begin with: weft init --model "
     "DIR --text FILE > "
     "transcoder.toml, then weft train transcoder.toml --dry-run.",
     Needs::nothing},
    run_init, [](Options& options, InitOptions& own) {
      options.example("weft init --model gpt2 --text corpus.txt > transcoder.toml");
      options.add("--model", own.model, "MODEL", "a run, a checkpoint, or a directory of Hugging Face")
          .add("--text", own.texts, "FILE", "text to train on; repeatable")
          .add("--validation", own.validation, "DIR", "activations of other text, as weft lm harvest writes them");
    });

}  // namespace weft::commands
