// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a token file in HDF5. Mostly executes HDF5; docs/trust.md lists the defects found there.
#include "tests/fuzz/tokens.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::fuzz::Scratch scratch;
  weft::fuzz::write_file(scratch / "tokens.h5", data, size);
  weft::fuzz::read_tokens(scratch / "tokens.h5");
  return 0;
}
