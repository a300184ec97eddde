// SPDX-License-Identifier: Apache-2.0
//
// Everything an input file can say, table by table. Each room owns the settings of its table; input/ knows how to read
// them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/settings.hpp"
#include "dataset/settings.hpp"
#include "device/runtime.hpp"
#include "input/schema.hpp"
#include "kernels/transcoder/activation/activation.hpp"
#include "optimizer/settings.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::transcoder {

using kernels::Activation;
enum class Scope { layer, all_layers };
enum class Precision { fp32, bf16 };
enum class NonFinite { stop, skip };

/// Table [transcoder].
struct ModelSettings {
  std::int64_t features = 0;  ///< per layer; no default: the reader must choose
  Activation activation = Activation::batch_topk;
  double k = 16;  ///< active per token and layer (batch_topk: on average, may be fractional)
  Scope scope = Scope::layer;
  std::int64_t dead_window = 1'000'000;  ///< a feature that has not fired for this many tokens is dead
};

/// Table [run].
struct RunSettings {
  std::string output = "runs/weft";
  std::int64_t steps = 1000;
  std::int64_t seed = 1;
  std::string walltime = "";  ///< hh:mm:ss; "" = no limit
  NonFinite nonfinite = NonFinite::stop;
  std::int64_t skip_at_most = 10;  ///< nonfinite = "skip": steps that may be skipped in a run
};

enum class SelectionPlace { everywhere, rank_0 };

/// Of table [parallel]: how ranks exchange. The defaults are what a run should have; the rest does the same work, to
/// the same bits, in the way that comes to mind first, so that the cost of each idea can be measured.
struct ExchangeManner {
  SelectionPlace selection = SelectionPlace::everywhere;
  bool wait = false;     ///< the host waits for each collective
  bool together = true;  ///< one collective for all layers; false: one for each
  parallel::ExchangeWay way;

  /// Whether a step never waits for the host: then it can be recorded.
  bool leaves_the_host_free() const { return selection == SelectionPlace::everywhere && !wait && way.keep_buffers; }
};

/// Table [parallel].
struct ParallelSettings {
  std::int64_t feature = 0;  ///< 0 = all ranks that `data` leaves
  std::int64_t data = 1;
  double timeout = 600;     ///< seconds without progress of any rank before the job ends; 0 = never
  std::int64_t world = 0;   ///< plan for this many ranks; dry run only
  bool nvls = false;        ///< NCCL may use NVLink multicast
  std::int64_t blocks = 4;  ///< of layers, that GPUs exchange one by one beside the computation; 1: not beside it
  ExchangeManner manner;
};

/// Table [log].
struct LogSettings {
  std::int64_t every = 20;
};

/// Table [resume].
struct ResumeSettings {
  bool accept_changed = false;      ///< go on although keys that define the run have changed
  bool ignore_no_progress = false;  ///< start although the last starts made no step
};

struct Configuration {
  RunSettings run;
  dataset::Settings data;
  ModelSettings transcoder;
  optimizer::Settings optimizer;
  ParallelSettings parallel;
  device::Settings device;
  Precision precision = Precision::fp32;  ///< device.precision
  checkpoint::Settings checkpoint;
  LogSettings log;
  ResumeSettings resume;
};

/// The table [device] as the runtime takes it: the hand-written kernels compute in bf16, so "auto" with precision
/// "fp32" means the portable ones.
device::Settings device_settings(const Configuration&);

/// Every key of the tables above, bound to the members of `configuration` (which must outlive the schema and hold its
/// initial values), with the conditions that join several keys. What depends on the data (layers, widths, the grid of
/// ranks) is checked where those are known.
input::Schema schema(Configuration& configuration);

/// The condition on k that needs the number of layers: topk over all layers has a whole budget a token. Throws a
/// collective Error(usage). For those who have read a dataset's header.
void check_layers(const ModelSettings& model, std::int64_t n_layers);

/// Seconds of "hh:mm:ss" (hours may exceed 99); nothing when the text is no such time.
std::optional<std::int64_t> parse_walltime(std::string_view text);

}  // namespace weft::transcoder
