// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as the only split of a dataset of CLT-Forge: described, then rows and token ids are read.
#include "tests/fuzz/activations.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::fuzz::Scratch scratch;
  static const std::string directory = scratch / "ctx_2";
  std::filesystem::create_directories(directory);
  weft::fuzz::write_file(directory + "/activations_split_0.safetensors", data, size);
  weft::fuzz::read_dataset(directory);
  return 0;
}
