// SPDX-License-Identifier: Apache-2.0
//
// Rows of JSON Lines, with and without bad lines, and their ids: as many as marks, with the same text.
#include "language_model/tokenizer/encoded_rows.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using namespace weft::language_model;
  const Tokenizer tokenizer = Tokenizer::bytes({"EOS"});
  const std::string_view text = fuzz::text(data, size);
  for (const auto bad_lines : {dataset::BadLines::stop, dataset::BadLines::skip})
    fuzz::accepts({ExitCode::data}, [&] {
      PieceCache cache;
      JsonRowReader reader(text, "rows.jsonl", bad_lines);
      for (JsonRow row; reader.next(row);) {
        const EncodedRow encoded = encode_row(tokenizer, end_symbol(tokenizer), row, "row", cache);
        if (encoded.ids.size() != encoded.counted.size()) fuzz::finding("an id has no mark");
        if (tokenizer.detokenise(encoded.ids) != row.text) fuzz::finding("the text of a row changes");
      }
    });
  return 0;
}
