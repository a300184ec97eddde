// SPDX-License-Identifier: Apache-2.0
//
// The text of a tokeniser: Weft's own form or a tokenizer.json. An accepted one must reproduce itself; one that does
// not normalise must keep every text; the text of ids must grow with each.
#include <optional>

#include "language_model/tokenizer/tokenizer.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using language_model::Tokenizer;
  std::optional<Tokenizer> read;
  if (!fuzz::accepts({ExitCode::data}, [&] { read = Tokenizer::from_text(fuzz::text(data, size), "tokenizer.json"); }))
    return 0;
  const std::string form = read->text();
  if (Tokenizer::from_text(form, "own form").text() != form)
    fuzz::finding("the text of a tokeniser does not reproduce itself");
  const std::string text = "The café's 12 mice <|endoftext|>\t\n\n  don't 😀 !";
  std::vector<std::uint32_t> ids;
  // Refused: unknown characters, and patterns of the file that exceed the limits of matching.
  if (!fuzz::accepts({ExitCode::data}, [&] { ids = read->encode(text); })) return 0;
  const std::string decoded = read->detokenise(ids);
  const bool keeps_texts = read->special("UNK") < 0 && form.find("\"file\":{") == form.npos;
  if (keeps_texts && decoded != text) fuzz::finding("a text changes by encoding and decoding");
  std::string grown;
  for (std::size_t i = 0; i < ids.size(); ++i) grown += read->detokenise({&ids[i], 1}, i > 0);
  if (grown != decoded) fuzz::finding("the text of ids is not that of one after the other");
  return 0;
}
