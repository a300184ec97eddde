// SPDX-License-Identifier: Apache-2.0
//
// metadata.json of a dataset of two layers, eight columns and 87 rows.
#include "dataset/activations/sidecar.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  dataset::Description description;
  description.path = "data";
  description.n_layers = 2;
  description.d_model = 8;
  description.n_rows = 87;
  description.files = {{"chunk_0.hdf5", 5000, 80, 0, false}, {"chunk_1.hdf5", 900, 7, 0, false}};
  const bool accepted = fuzz::accepts(
      {ExitCode::data}, [&] { dataset::check_metadata_text("metadata.json", fuzz::text(data, size), description); });
  // Rank 0 sends the description to other ranks as text.
  if (accepted && dataset::description_from_text(dataset::to_text(description)).n_rows != 87)
    fuzz::finding("the text form of a description loses data");
  return 0;
}
