// SPDX-License-Identifier: Apache-2.0
//
// norm_stats.json of a dataset of two layers and three columns, and the statistics cache of a run directory, also with
// a corrected checksum.
#include "dataset/activations/statistics.hpp"
#include "storage/digest.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  dataset::Description description;
  description.path = "data";
  description.n_layers = 2;
  description.d_model = 3;
  description.n_rows = 4;
  description.fingerprint = "f00d";
  dataset::Statistics statistics;
  statistics.n_rows = 4;
  for (dataset::SideStatistics* side : {&statistics.inputs, &statistics.targets}) {
    side->mean = {0, 1, 2, -3, 0.5, 100};
    side->standard_deviation = {1, 1, 1, 0, 2, 3};
    side->mean_norm = {2, 100};
  }
  const std::string_view text = fuzz::text(data, size);
  fuzz::accepts({ExitCode::data},
                [&] { dataset::check_against_text(statistics, description, "norm_stats.json", text); });
  fuzz::accepts({ExitCode::data}, [&] { dataset::statistics_from_text(std::string(text), description); });
  const std::string cached = storage::sha256(text) + "\n" + std::string(text) + "\n";
  dataset::Statistics read;
  if (fuzz::accepts({ExitCode::data}, [&] { read = dataset::statistics_from_text(cached, description); }))
    dataset::statistics_from_text(dataset::to_text(read, description), description);
  return 0;
}
