// SPDX-License-Identifier: Apache-2.0
//
// index.bin of a small dataset. The first byte gives the number of files, the next ones the rows of each file.
#include "dataset/activations/sidecar.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  fuzz::Choices choices(data, size);
  dataset::Description description;
  description.files.resize(1 + choices.byte() % 4);
  for (dataset::FileDescription& file : description.files) {
    file.name = "chunk";
    file.rows = 1 + choices.byte();
    description.n_rows += file.rows;
  }
  fuzz::accepts({ExitCode::data},
                [&] { dataset::check_index_bytes("index.bin", std::as_bytes(choices.rest()), description); });
  return 0;
}
