// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as the only file of a compressed cache of CLT-Forge, converted into a dataset.
#include "interchange/compressed_activations.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::fuzz::Scratch scratch;
  const std::filesystem::path cache = scratch / "cache", output = scratch / "data";
  std::filesystem::create_directories(cache);
  std::filesystem::remove_all(output);
  weft::fuzz::write_file((cache / "activations_ctx_2_split_0.bin").string(), data, size);
  weft::fuzz::accepts({weft::ExitCode::usage, weft::ExitCode::data},
                      [&] { weft::interchange::convert_cache(cache, output); });
  return 0;
}
