// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/token_settings.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "input/schema.hpp"

namespace weft::dataset {
namespace {

// Sizes are bounded so that no product of them, in bytes, exceeds 64 bits.
constexpr double kMostTokens = 1 << 28;
constexpr double kLongestSequence = 1 << 20;

}  // namespace

std::int64_t TokenSettings::length_at(std::int64_t step) const {
  if (sequence_start == 0 || step > sequence_growth_steps) return sequence;
  std::int64_t doublings = 0;
  while (sequence_start << doublings < sequence) ++doublings;
  return sequence_start << (step - 1) * doublings / sequence_growth_steps;
}

void add_text_keys(input::Schema& schema, TokenSettings& data) {
  schema
      .add("data.format", data.format,
           {{"auto", DataFormat::by_name},
            {"text", DataFormat::text},
            {"jsonl", DataFormat::jsonl},
            {"tokens", DataFormat::tokens}},
           "what these files are; \"auto\": FILE.jsonl and FILE.ndjson are JSON Lines, directories, FILE.h5, FILE.hdf5 "
           "and FILE.bin are tokens, others are text")
      .free();
  schema
      .add("data.bad_lines", data.bad_lines, {{"stop", BadLines::stop}, {"skip", BadLines::skip}},
           "a line of JSON Lines that cannot be used ends the run with an error, or is left out and counted")
      .free();
  schema
      .add("data.add_special_tokens", data.add_special_tokens,
           "texts and prompts begin and end with what the post-processor of a tokenizer.json adds: the BOS of Llama 3, "
           "for example")
      .changeable();
}

void add_keys(input::Schema& schema, TokenSettings& data) {
  schema.table("data", "Text to learn from, and how it becomes sequences.");
  schema
      .add("data.train", data.train,
           "text file (UTF-8), JSON Lines (FILE.jsonl), token file, or directory of token files")
      .path_name()
      .free();
  schema
      .add("data.validation", data.validation,
           "the same, to measure the loss on; \"\" = none, or a part of train (validation_fraction)")
      .path_name()
      .free();
  schema
      .add("data.loss_on", data.loss_on, {{"completion", LossOn::completion}, {"all", LossOn::all}},
           "tokens that count in the loss: those of completions, where the data mark them (JSON Lines, and token "
           "files written from them), or all")
      .changeable();
  add_text_keys(schema, data);
  schema
      .add("data.tokens", data.tokens,
           "\"character\", \"bytes\", or the path of a tokeniser file (of weft lm tokenize, or a tokenizer.json of "
           "Hugging Face) or of a directory with one; \"\" = that of the token files or of language_model.initial, "
           "else of a text \"character\"")
      .path_name();
  schema.add("data.special", data.special,
             "symbols added to the vocabulary of \"character\" and \"bytes\": PAD, UNK, BOS, EOS");
  schema.add("data.batch_tokens", data.batch_tokens, "tokens per step, all ranks together")
      .in("tokens")
      .at_least(1)
      .at_most(kMostTokens)
      .changeable();
  schema.add("data.sequence", data.sequence, "length of a sequence").in("tokens").at_least(1).at_most(kLongestSequence);
  schema
      .add("data.sequence_start", data.sequence_start,
           "length of sequences in the first steps; it doubles until it is data.sequence, at constant tokens per "
           "step; 0 = data.sequence throughout")
      .in("tokens")
      .at_least(0)
      .at_most(kLongestSequence)
      .changeable();
  schema
      .add("data.sequence_growth_steps", data.sequence_growth_steps,
           "steps after which sequences have their full length; each shorter length is used for an equal part of them")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .required_with("data.sequence_start")
      .changeable();
  schema.add("data.order", data.order,
             {{"random_windows", TokenOrder::random_windows},
              {"sequential", TokenOrder::sequential},
              {"shuffled", TokenOrder::shuffled},
              {"curriculum", TokenOrder::curriculum}},
             "segments at uniformly random positions (random_windows); consecutive segments, each once per epoch, in "
             "stored order (sequential) or in a random one (shuffled); or random segments, at first the easiest, whose "
             "tokens are frequent (curriculum)");
  schema.add("data.curriculum_steps", data.curriculum_steps, "steps after which segments of any difficulty are drawn")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .required_with("data.order", {"curriculum"})
      .changeable();
  schema
      .add("data.pack", data.pack, {{"stream", Pack::stream}, {"documents", Pack::documents}},
           "what a sequence is: sequence + 1 ids of the stream of all documents (stream); or consecutive whole "
           "documents of at most that many ids, with padding that does not count in the loss (documents)")
      .not_with("data.order", {"random_windows", "curriculum"}, "they begin anywhere in a document")
      .not_with("data.sequence_start", {}, "the rows of documents are laid out for one length");
  schema
      .add("data.long_documents", data.long_documents, {{"cut", LongDocuments::cut}, {"drop", LongDocuments::drop}},
           "documents of more than sequence + 1 ids: keep the first sequence + 1 ids, or drop the document; the "
           "log counts both")
      .only_with("data.pack", {"documents"});
  schema.add("data.document_mask", data.document_mask,
             "true: documents inside a sequence do not see each other, and positions restart with each");
  schema.add("data.validation_fraction", data.validation_fraction, "tail of train that is held out for validation")
      .at_least(0)
      .less_than(1)
      .not_with("data.validation", {}, "there is one validation set");
  schema.add("data.accept_changed", data.accept_changed, "resume although the fingerprint of the data changed").free();

  schema.rule({"data.batch_tokens", "data.sequence"}, [&data]() -> std::string {
    if (data.batch_tokens % data.sequence == 0) return {};
    return fmt::format(
        "data.batch_tokens = {} is not a multiple of data.sequence = {} (a step consists of whole sequences); take {}",
        data.batch_tokens, data.sequence, (data.batch_tokens / data.sequence + 1) * data.sequence);
  });
  schema.rule({"data.sequence_start", "data.sequence"}, [&data]() -> std::string {
    if (data.sequence_start == 0) return {};
    std::int64_t length = data.sequence;
    while (length > data.sequence_start && length % 2 == 0) length /= 2;
    if (length == data.sequence_start) return {};
    return fmt::format(
        "data.sequence_start = {} does not become data.sequence = {} by doubling (every length is twice the one before "
        "it); take {}",
        data.sequence_start, data.sequence, length);
  });
  schema.rule({"data.special", "data.tokens"}, [&data]() -> std::string {
    for (auto symbol = data.special.begin(); symbol != data.special.end(); ++symbol) {
      if (*symbol != "PAD" && *symbol != "UNK" && *symbol != "BOS" && *symbol != "EOS")
        return fmt::format("data.special contains \"{}\" (valid: PAD, UNK, BOS, EOS); remove it", *symbol);
      if (std::find(data.special.begin(), symbol, *symbol) != symbol)
        return fmt::format("data.special contains {} twice (each symbol has one id); remove one", *symbol);
    }
    if (!data.special.empty() && !data.tokens.empty() && data.tokens != "character" && data.tokens != "bytes")
      return fmt::format(
          "data.special is given with data.tokens = \"{}\" (a tokeniser file has its own symbols); remove data.special",
          data.tokens);
    return {};
  });
}

}  // namespace weft::dataset
