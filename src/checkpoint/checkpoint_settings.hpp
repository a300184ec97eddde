// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace weft::input {
class Schema;
}

namespace weft::checkpoint {

enum class Verify { none, size, full };
enum class Staging { full, chunked };

/// Value of `every` for "auto".
inline constexpr std::int64_t kAutomatic = -1;

/// Table [checkpoint].
struct Settings {
  std::int64_t every = 500;  ///< steps between checkpoints; 0 = only the last step writes one; or kAutomatic
  double mean_time_between_failures = 24;  ///< hours, of the whole job; every = "auto" derives its interval from it
  std::int64_t keep = 2;                   ///< newest checkpoints kept, at least 2
  std::int64_t keep_every = 0;             ///< also keep checkpoints whose step is a multiple of this; 0 = none
  bool keep_best = false;                  ///< also write and keep the one with the lowest validation loss
  Verify verify = Verify::full;            ///< checks before resuming from a checkpoint
  Staging staging =
      Staging::full;  ///< full: one host copy of the state; chunked: less memory, training waits for the disk
  std::int64_t failures_allowed = 3;  ///< consecutive failed checkpoints after which the run ends with 6
  std::string local;  ///< directory of each node that receives checkpoints first; "" = write to the run directory
  double scrub = 0;   ///< hours between verifications of the kept checkpoints; 0 = none

  /// Most checkpoints in the run directory between two steps, but for those of keep_every.
  std::int64_t kept() const { return keep + (keep_best ? 1 : 0); }

  std::int64_t protected_step = -1;  ///< no key: the checkpoint that --resume names is never deleted; -1: none
};

/// The keys of the table, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, Settings&);

}  // namespace weft::checkpoint
