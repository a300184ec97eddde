// SPDX-License-Identifier: Apache-2.0
//
// The bytes of chunk_0.hdf5, the only file of a dataset: described and then read. Mostly executes HDF5; docs/trust.md
// lists the defects found there.
#include "dataset/activations/reader.hpp"
#include "tests/fuzz/activations.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::fuzz::Scratch scratch;
  weft::fuzz::write_file(scratch / "chunk_0.hdf5", data, size);
  weft::fuzz::read_dataset(scratch.path());
  return 0;
}
