// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a safetensors file: the header, and the values of every tensor that can be read.
#include <algorithm>
#include <vector>

#include "storage/safetensors.hpp"
#include "tests/fuzz/target.hpp"

using namespace weft;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Scratch scratch;
  const std::string path = scratch / "file.safetensors";
  fuzz::write_file(path, data, size);
  fuzz::accepts({ExitCode::data}, [&] {
    const storage::SafetensorsFile file(path);
    std::int64_t covered = 0;
    for (const storage::SafetensorsEntry& entry : file.entries()) {
      covered += entry.end - entry.begin;
      if (!entry.type) continue;
      std::vector<float> values(static_cast<std::size_t>(entry.elements()));
      file.read(entry, 0, entry.elements(), values.data());
      if (entry.elements() > 1) file.read(entry, entry.elements() / 2, 1, values.data());
    }
    if (covered > static_cast<std::int64_t>(size)) fuzz::finding("tensors take more bytes than the file has");
  });
  return 0;
}
