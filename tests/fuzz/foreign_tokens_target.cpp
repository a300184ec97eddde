// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a token file of llm.c.
#include "tests/fuzz/tokens.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::fuzz::Scratch scratch;
  weft::fuzz::write_file(scratch / "tokens.bin", data, size);
  weft::fuzz::read_tokens(scratch / "tokens.bin");
  return 0;
}
