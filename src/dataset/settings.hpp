// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace weft::input {
class Schema;
}

namespace weft::dataset {

enum class Normalise { none, scalar, per_dimension };

/// Table [data].
struct Settings {
  std::string train;                 ///< directory of the training set; environment variables are expanded
  std::string validation;            ///< directory of the held-out set; "" = none
  std::int64_t batch_tokens = 4096;  ///< tokens a step, all ranks together
  std::int64_t micro_tokens = 0;     ///< tokens decoded at a time on a rank; 0 = chosen to fit
  Normalise normalise = Normalise::per_dimension;
  std::int64_t block_rows = 256;  ///< consecutive rows read at once
  std::int64_t window_rows =
      65536;  ///< rows mixed with one another; two windows are held in memory by all ranks together
  std::string stored_as =
      "";  ///< "bf16": unsigned 16-bit integers in the files are bf16 patterns; "" = by type and attribute
  std::int64_t layers = 0;  ///< layers and width that the files must have; 0 = what they have. Both or neither
  std::int64_t d_model = 0;
  bool accept_changed = false;  ///< resume although the dataset's fingerprint changed
};

/// The keys of the table and the conditions between them, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, Settings&);

}  // namespace weft::dataset
