// SPDX-License-Identifier: Apache-2.0
//
// vocabulary.json.
#include "dataset/activations/row_tokens.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  fuzz::accepts({ExitCode::data}, [&] {
    const dataset::Vocabulary vocabulary = dataset::vocabulary_from_text("vocabulary.json", fuzz::text(data, size));
    if (dataset::vocabulary_from_text("vocabulary.json", dataset::vocabulary_text(vocabulary)) != vocabulary)
      fuzz::finding("the text form of a vocabulary loses data");
  });
  return 0;
}
