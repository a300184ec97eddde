// SPDX-License-Identifier: Apache-2.0
//
// weft lm diversity FILE [--model MODEL] [--embedder DIR]: how much the answers to each prompt differ.
#include <cmath>
#include <map>

#include "base/log.hpp"
#include "base/text.hpp"
#include "commands/commands.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "kernels/language/diversity/set_advantages.hpp"
#include "language_model/encoder/sentence_encoder.hpp"
#include "language_model/huggingface/sentence_transformers.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/tokenizer/json_lines.hpp"
#include "language_model/tokenizer/lines.hpp"
#include "parallel/affinity.hpp"
#include "polychromic/embedder.hpp"
#include "polychromic/text_diversity.hpp"
#include "storage/json_file.hpp"

namespace weft::commands {
namespace {

using polychromic::AnswerIds;
using polychromic::TextDiversity;

/// Rows of a forward pass.
constexpr std::int64_t kRows = 4096;

/// A prompt with its answers, in the order of the file.
struct Answered {
  std::string name, prompt;  // name: its id, or the prompt
  std::vector<std::string> answers;
  std::string source;  // source of the first answer, for messages
};

void add_object(const SortedJson& object, const std::string& source, std::vector<Answered>& prompts,
                std::map<std::string, std::size_t>& places) {
  const std::string prompt = language_model::string_of(object, "prompt", source),
                    name = language_model::string_of(object, "id", source, prompt);
  const auto [place, added] = places.emplace(name, prompts.size());
  if (added) prompts.push_back({name, prompt, {}, source});
  std::vector<std::string>& answers = prompts[place->second].answers;
  if (object.contains("text")) return answers.push_back(language_model::string_of(object, "text", source));
  const auto list = object.find("answers");
  if (list == object.end() || !list->is_array())
    throw error(ExitCode::data,
                "{}: has neither a string \"text\" nor a list \"answers\"; write one object per answer (as weft lm "
                "generate does) or per prompt",
                source);
  for (const SortedJson& answer : *list) {
    if (!answer.is_string())
      throw error(ExitCode::data, "{}: \"answers\" has an element that is not a string; correct the line", source);
    answers.push_back(answer.get<std::string>());
  }
}

/// JSON Lines (tokenizer/json_lines.hpp): an object per line; other files: an answer per line, all to one prompt.
std::vector<Answered> read_answers(const std::string& path) {
  std::vector<Answered> prompts;
  std::map<std::string, std::size_t> places;
  const std::string text = language_model::text_of_file(path, "FILE");
  const bool objects = language_model::holds_json_lines(text, path);
  language_model::each_line(text, path, [&](std::string_view line, const std::string& source) {
    if (objects) return add_object(language_model::object_of(line, source), source, prompts, places);
    if (first_invalid(line) != line.npos) throw error(ExitCode::data, "{}: not UTF-8; correct the line", source);
    if (prompts.empty()) prompts.push_back({"", "", {}, source});
    prompts.front().answers.emplace_back(line);
  });
  return prompts;
}

/// Words between white space, numbered in the order of their first occurrence.
class Words {
 public:
  AnswerIds encode(std::string_view text) {
    AnswerIds ids;
    for (std::size_t begin = 0; (begin = text.find_first_not_of(kWhite, begin)) != text.npos;) {
      const std::size_t end = std::min(text.find_first_of(kWhite, begin), text.size());
      ids.push_back(
          numbers_.emplace(text.substr(begin, end - begin), static_cast<std::uint32_t>(numbers_.size())).first->second);
      begin = end;
    }
    return ids;
  }

 private:
  static constexpr const char* kWhite = " \t\n\v\f\r";
  std::map<std::string, std::uint32_t> numbers_;
};

/// Mean cosine distance of the pairs of rows, [answers, width], of those that are not zero; NaN if these are fewer than
/// two.
double mean_distance(const kernels::Execution& execution, kernels::Matrix<float> embeddings) {
  const std::int64_t count = embeddings.rows;
  const device::Buffer<std::int64_t> counts(1);
  const device::Buffer<double> rewards(count), workspace(kernels::set_advantages_workspace(1, count)), diversity(1),
      objective(1), distances(count), advantages(count);
  device::zero(execution, rewards.array());
  kernels::set_advantages(
      execution, {},
      {1,
       count,
       {embeddings.data, kernels::Scalar::fp32, count, embeddings.columns, embeddings.stride},
       {rewards.data(), count}},
      workspace.array(), {counts.array(), diversity.array(), objective.array(), distances.array(), advantages.array()});
  return device::read(execution, counts.data()) < 2 ? std::nan("") : device::read(execution, diversity.data());
}

/// Distance of embeddings by a language model, from the tokens of the answers with the prompt as their context.
class ModelDiversity {
 public:
  explicit ModelDiversity(const LoadedLanguageModel& loaded)
      : loaded_(loaded),
        settings_(polychromic::embedding_settings(
            language_model::transformer_settings(loaded.configuration(), loaded.architecture()), kRows)),
        arena_(loaded.execution(), loaded.part.ranks.grid),
        transformer_(loaded.part.model, settings_, timers_, arena_),
        staging_(settings_.rows, false, loaded.execution(), arena_),
        embedder_(settings_, transformer_, staging_, loaded.execution(), arena_) {}

  double operator()(const AnswerIds& prompt, const std::vector<AnswerIds>& answers) {
    const std::int64_t count = std::ssize(answers), width = settings_.architecture.model.d_model;
    std::vector<AnswerIds> texts(answers.size(), prompt);
    std::vector<polychromic::EmbeddedText> given;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      texts[i].insert(texts[i].end(), answers[i].begin(), answers[i].end());
      given.push_back({texts[i], std::ssize(prompt)});
    }
    const device::Buffer<float> embeddings(count * width);
    embedder_.embed(given, embeddings.matrix(count, width));
    return mean_distance(loaded_.execution(), embeddings.matrix(count, width));
  }

 private:
  const LoadedLanguageModel& loaded_;
  const language_model::TransformerSettings settings_;
  run::Timers timers_;
  model::StepArena arena_;
  language_model::Transformer transformer_;
  language_model::Staging staging_;
  polychromic::Embedder embedder_;
};

/// Distance of embeddings by an encoder of sentences, from the answers alone.
class SentenceDiversity {
 public:
  SentenceDiversity(const std::string& directory, const kernels::Execution& execution)
      : execution_(execution), encoder_(directory, execution) {}

  double operator()(const std::vector<std::string>& answers) {
    const std::int64_t count = std::ssize(answers), width = encoder_.width();
    const device::Buffer<float> embeddings(count * width);
    encoder_.embed(answers, embeddings.matrix(count, width));
    return mean_distance(execution_, embeddings.matrix(count, width));
  }

 private:
  const kernels::Execution execution_;
  language_model::SentenceEncoder encoder_;
};

/// Means over the prompts, of each value over those that have it.
Json means(const Json& prompts) {
  Json sums = Json::object(), counts = Json::object();
  for (const Json& prompt : prompts)
    for (const auto& [key, value] : prompt.items()) {
      if (!value.is_number() || !std::isfinite(value.get<double>())) continue;
      sums[key] = sums.value(key, 0.0) + value.get<double>();
      counts[key] = counts.value(key, 0.0) + 1;
    }
  for (auto& [key, value] : sums.items()) value = value.get<double>() / counts[key].get<double>();
  return sums;
}

struct Column {
  const char *title, *key;
  int decimals;
};

std::string table(const Json& prompts, const Json& mean, const char* unit) {
  std::vector<Column> columns = {{"answers", "answers", 0},       {"empty", "empty", 0},
                                 {"unique", "unique", 0},         {unit, "mean_length", 1},
                                 {"distinct-1", "distinct_1", 3}, {"distinct-2", "distinct_2", 3},
                                 {"distinct-3", "distinct_3", 3}, {"self-BLEU", "self_bleu", 3}};
  if (mean.contains("semantic")) columns.push_back({"semantic", "semantic", 4});
  constexpr std::size_t kName = 24;
  std::string text = fmt::format("{:{}}", "prompt", kName);
  for (const Column& column : columns) text += fmt::format("  {:>10}", column.title);
  const auto row = [&](const std::string& name, const Json& values, bool is_mean) {
    text += fmt::format("\n{:{}.{}}", name, kName, kName);
    for (const Column& column : columns) {
      const auto value = values.find(column.key);
      text += value == values.end() || !std::isfinite(value->get<double>())
                  ? fmt::format("  {:>10}", "-")
                  : fmt::format("  {:>10.{}f}", value->get<double>(),
                                is_mean && column.decimals == 0 ? 1 : column.decimals);
    }
  };
  for (std::size_t i = 0; i < prompts.size(); ++i)
    row(fmt::format("{} {}", i + 1, printable(prompts[i]["prompt"].get<std::string>(), kName)), prompts[i], false);
  if (prompts.size() > 1) row("mean", mean, true);
  return text;
}

struct DiversityOptions {
  std::string model;     ///< "": none
  std::string embedder;  ///< directory of an encoder; "": the model, if there is one
};

int run_diversity(const Request& request, const DiversityOptions& options, const parallel::World& world) {
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft lm diversity with {} processes (one is supported); start one process",
                           world.size());
  // 1. The answers, the model whose tokens they are measured in, without one in words, and what forms embeddings.
  const std::vector<Answered> prompts = read_answers(request.subject);
  std::optional<LoadedLanguageModel> loaded;
  std::optional<device::Runtime> runtime;
  std::optional<ModelDiversity> by_model;
  std::optional<SentenceDiversity> by_encoder;
  std::optional<std::int64_t> longest;  // most tokens of a prompt and an answer, where the model has such a limit
  if (!options.model.empty()) {
    Request of_model = request;
    of_model.subject = options.model;
    loaded.emplace(of_model, world);
    if (!loaded->tokenizer)
      throw collective_error(ExitCode::usage,
                             "{}: the model has no tokeniser (it was trained on token files without one), so that "
                             "answers have no tokens; name another",
                             loaded->opened.name());
    if (options.embedder.empty()) {
      if (loaded->opened.directory)
        longest = language_model::require_mean_embedding(loaded->opened.directory->path(), *loaded->tokenizer);
      by_model.emplace(*loaded);
    }
  }
  if (!options.embedder.empty()) {
    if (!loaded) {
      const device::Settings settings = language_model::device_settings({});
      runtime.emplace(settings, world.node_rank(), parallel::bind_to_cpus(world, settings));
    }
    by_encoder.emplace(options.embedder, loaded ? loaded->execution() : runtime->execution());
  }

  // 2. The metrics of each prompt, and their means.
  Words words;
  Json list = Json::array();
  for (const Answered& one : prompts) {
    const auto encode = [&](const std::string& text) {
      return text.empty() ? AnswerIds() : loaded ? loaded->tokenizer->encode(text, one.source) : words.encode(text);
    };
    std::vector<AnswerIds> answers;
    for (const std::string& answer : one.answers) answers.push_back(encode(answer));
    Json entry = {{"prompt", one.name}};
    entry.update(polychromic::to_json(polychromic::text_diversity(answers)));
    if (by_encoder) entry["semantic"] = (*by_encoder)(one.answers);
    if (by_model) {
      const AnswerIds prompt = loaded->tokenizer->with_begin(encode(one.prompt));
      for (const AnswerIds& answer : answers)
        if (longest && std::ssize(prompt) + std::ssize(answer) > *longest)
          throw error(
              ExitCode::usage,
              "{}: a prompt of {} and an answer of {} tokens are longer than the texts of {}, which "
              "sentence-transformers cuts after {} tokens; shorten them, or name a copy of the directory without "
              "modules.json",
              one.source, prompt.size(), answer.size(), loaded->opened.name(), *longest);
      entry["semantic"] = (*by_model)(prompt, answers);
    }
    if (entry.contains("semantic")) {
      const double value = entry["semantic"];
      if (std::isinf(value) || (std::isnan(value) && entry["answers"].get<int>() - entry["empty"].get<int>() >= 2))
        throw error(ExitCode::numeric,
                    "{}: the embeddings of the answers are not finite (the model has parameters that are not, or too "
                    "large); use another one",
                    by_encoder ? options.embedder : loaded->opened.name());
    }
    list.push_back(std::move(entry));
  }
  const Json mean = means(list);

  // 3. The result.
  const char* const unit = loaded ? "tokens" : "words";
  const std::string text = table(list, mean, unit);
  Json document = {{"file", request.subject}, {"unit", unit}};
  if (loaded) document["model"] = loaded->opened.name();
  if (by_encoder) document["embedder"] = options.embedder;
  document["prompts"] = std::move(list);
  document["mean"] = mean;
  print_result(request, text, document);
  return 0;
}

}  // namespace

extern const Command lm_diversity_command = with_options(
    {"lm diversity", "FILE", "how much the answers to each prompt differ",
     "Measures how much the answers to each prompt differ: distinct n-grams, self-BLEU and, with --model or "
     "--embedder, the distance of their embeddings. FILE.jsonl (or .ndjson, .json) has {\"prompt\": TEXT, \"text\": "
     "TEXT} per line, "
     "as weft lm generate writes, or {\"prompt\": TEXT, \"answers\": [TEXT]}; other files have one answer per "
     "line."},
    run_diversity, [](Options& options, DiversityOptions& own) {
      options.example("weft lm diversity answers.jsonl --model gpt2");
      options.add("--model", own.model, "MODEL",
                  "measure in its tokens, not in words, and add the distance of the answers' embeddings by this model");
      options.add("--embedder", own.embedder, "DIR",
                  "add the distance of the answers' embeddings by this encoder, a directory that sentence-transformers "
                  "has saved (model_type bert)");
      options.set();
    });

}  // namespace weft::commands
