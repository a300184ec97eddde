// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_settings.hpp"

#include "input/schema.hpp"

namespace weft::checkpoint {

void add_keys(input::Schema& schema, Settings& checkpoint) {
  schema.table("checkpoint", "Checkpoints to resume from. The last step always writes one.");
  schema
      .add("checkpoint.every", checkpoint.every,
           "steps between checkpoints; 0 = only the last step writes one; auto: an interval in time, from the measured "
           "cost of a checkpoint and mean_time_between_failures")
      .in("steps")
      .at_least(0)
      .or_word("auto", kAutomatic)
      .free();
  schema
      .add("checkpoint.mean_time_between_failures", checkpoint.mean_time_between_failures,
           "every = \"auto\": mean time between failures of the job, on all its nodes")
      .in("h")
      .more_than(0)
      .free();
  schema.add("checkpoint.keep", checkpoint.keep, "newest checkpoints kept").at_least(2).free();
  schema
      .add("checkpoint.keep_every", checkpoint.keep_every,
           "also keep each checkpoint whose step is a multiple of this; 0 = none")
      .in("steps")
      .at_least(0)
      .free();
  schema
      .add("checkpoint.keep_best", checkpoint.keep_best,
           "keep the checkpoint with the lowest validation loss, which the evaluation writes; commands read it "
           "as RUN/best")
      .free();
  schema
      .add("checkpoint.verify", checkpoint.verify,
           {{"none", Verify::none}, {"size", Verify::size}, {"full", Verify::full}},
           "what is checked before a run resumes from a checkpoint: nothing, sizes, every digest")
      .free();
  schema
      .add("checkpoint.staging", checkpoint.staging, {{"full", Staging::full}, {"chunked", Staging::chunked}},
           "full: a host copy of the state, written while training continues; chunked: less memory, training waits for "
           "the disk")
      .free();
  schema
      .add("checkpoint.failures_allowed", checkpoint.failures_allowed,
           "consecutive checkpoints that may fail before the run ends with exit code 6")
      .at_least(0)
      .free();
  schema
      .add("checkpoint.local", checkpoint.local,
           "directory on a disk of each node: checkpoints are written there first, then copied to the run "
           "directory while training continues; \"\" = none")
      .path_name()
      .not_with("checkpoint.keep_best", {}, "only the newest checkpoint on the nodes is copied")
      .free();
  schema
      .add("checkpoint.scrub", checkpoint.scrub,
           "time between verifications of all kept checkpoints while training continues; 0 = none")
      .in("h")
      .at_least(0)
      .free();
}

}  // namespace weft::checkpoint
