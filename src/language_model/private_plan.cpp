// SPDX-License-Identifier: Apache-2.0
#include "language_model/private_plan.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "language_model/plan.hpp"
#include "language_model/trainer.hpp"
#include "report/format.hpp"

namespace weft::language_model {

using privacy::Mode;

namespace {

std::int64_t block_columns(const Architecture& part) {
  return 4 * part.model.d_model + part.projection_width() + part.query_width() + part.hidden_width() + part.model.d_mlp;
}

/// Columns of inputs and output gradients of the products of a unit that are copied if they are kept.
std::int64_t copied_columns(const TransformerSettings& settings, std::size_t unit) {
  const Architecture& part = settings.architecture;
  if (unit == static_cast<std::size_t>(part.model.layers))
    return settings.keeps_head_rows() ? 0 : part.model.d_model + aligned_columns(part.vocabulary);
  if (!settings.keeps_rows(unit)) return block_columns(part);
  return part.model.normalises_outputs() ? 2 * part.model.d_model : 0;
}

}  // namespace

privacy::ClippingShape clipping_shape(const Configuration& configuration, const Architecture& part) {
  const ModelSettings& model = part.model;
  const std::int64_t length = configuration.data.sequence, rows = configuration.micro_tokens();
  privacy::ClippingShape shape{.examples = {.examples = rows / length, .most_rows = length, .rows = rows},
                               .sum_rows = model.qk_norm == QueryKeyNorm::head ? model.heads : 1,
                               .type = activation_type(configuration),
                               .tensor_ranks = part.tensor_ranks};
  const std::vector<training::ParameterSpec> specs = parameter_specs(part);
  const std::vector<std::string> names = unit_names(part);
  for (const std::string& name : names) shape.units.push_back({name, specs.size(), 0});
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const bool tied = specs[i].name == "embedding/tokens" && model.tied;
    const std::string name = tied ? "head" : specs[i].name.substr(0, specs[i].name.find('/'));
    const auto unit = std::find(names.begin(), names.end(), name);
    if (unit != names.end()) {
      privacy::ClippingUnit& of_name = shape.units[static_cast<std::size_t>(unit - names.begin())];
      of_name.first = std::min(of_name.first, i);
      of_name.end = i + 1;
    }
    if (tied) shape.tied = i;
    if (specs[i].name == "embedding/positions" || (specs[i].name == "embedding/tokens" && !tied))
      shape.tables.push_back(i);
  }
  const TransformerSettings settings = transformer_settings(configuration, part);
  const std::vector<Mode> modes = privacy::unit_modes(configuration.privacy, names);
  const bool all = configuration.privacy.release == privacy::Release::end;
  for (std::size_t unit = 0; unit < modes.size(); ++unit) {
    if (!all && modes[unit] != Mode::book_keeping) continue;
    // One block at a time.
    if (configuration.privacy.sums_by_part() && unit > 0 && unit + 1 < modes.size()) continue;
    shape.kept_columns += copied_columns(settings, unit);
  }
  return shape;
}

// --- Time -----------------------------------------------------------------------------------------------------------

namespace {

/// Operations and bytes per second of large products and of rows, and the time of a product beside its operations.
struct Rates {
  double products, direct, gram, sums, memory, product_seconds;
  double passes, attention;  ///< of forward and backward pass
};

/// Measured on one H200 (docs/privacy.md, "Speed"): products of the library, of K1 (direct norms), K2 (Gram norms) and
/// K3 (clipped sums); tiles of a small matrix do not fill the GPU, which takes as long as 20 us more for each product.
/// The portable kernels: on one core, where gradients of records take their conversion to bf16.
Rates rates_of(kernels::Backend backend, const Configuration& configuration) {
  if (backend == kernels::Backend::portable) return {60e9, 60e9, 60e9, 60e9, 1.2e9, 1e-6, 60e9, 10e9};
  if (configuration.precision == Precision::fp32) return {50e12, 50e12, 50e12, 50e12, 4.1e12, 20e-6, 50e12, 25e12};
  if (configuration.precision == Precision::tf32) return {380e12, 50e12, 50e12, 50e12, 4.1e12, 20e-6, 290e12, 25e12};
  return {766e12, 740e12, 590e12, 700e12, 4.1e12, 20e-6, 580e12, 190e12};
}

double number(std::int64_t value) { return static_cast<double>(value); }

/// Forming the rows of a unit once more (Transformer::repeat_block, repeat_head).
double seconds_again(const Configuration& configuration, const Architecture& part, bool is_head, const Rates& rates) {
  const ModelSettings& model = part.model;
  const double rows = number(configuration.micro_tokens()), width = number(model.d_model),
               bytes = rows * number(kernels::bytes_of(activation_type(configuration)));
  if (is_head) {
    const double vocabulary = number(part.vocabulary);
    return 2 * rows * width * vocabulary / rates.passes + 2 * bytes * vocabulary / rates.memory;
  }
  const double projection = width * number(part.projection_width()), up = width * number(part.hidden_width()),
               rest = width * number(part.query_width() + model.d_mlp);
  const double attention = 2 * rows * number(configuration.data.sequence * part.query_width());
  const bool forward = configuration.memory.recompute != Recompute::none;
  // Forward pass but for the last product; then gradients of all inputs but that of the first product.
  const double products = up + (forward ? projection + width * number(part.query_width()) : 0) + up + rest;
  return 2 * rows * products / rates.passes + (forward ? 3.5 : 2.5) * attention / rates.attention +
         (forward ? 2 : 1) * bytes * number(block_columns(part)) / rates.memory;
}

}  // namespace

double unit_seconds(const Configuration& configuration, const Architecture& part, std::size_t unit, Mode mode,
                    kernels::Backend backend) {
  const Rates rates = rates_of(backend, configuration);
  const std::vector<training::ParameterSpec> specs = parameter_specs(part);
  const privacy::ClippingShape shape = clipping_shape(configuration, part);
  const privacy::ProductWork work = privacy::product_work(configuration.privacy, specs, shape, shape.units[unit]);
  const double kernels = number(work.products) * rates.product_seconds;
  // A gradient of a record is written once and read twice: for its norm and for the sum.
  if (mode == Mode::materialise)
    return kernels + work.operations / rates.products + 3 * 2 * work.stored_elements / rates.memory;
  double seconds = 2 * kernels + work.direct / rates.direct + work.gram / rates.gram + work.operations / rates.sums;
  if (mode == Mode::recompute)
    seconds += seconds_again(configuration, part, unit + 1 == shape.units.size(), rates);
  else if (unit + 1 < shape.units.size() && configuration.memory.recompute != Recompute::none)  // copies
    seconds +=
        2 * number(configuration.micro_tokens() * kernels::bytes_of(shape.type) * block_columns(part)) / rates.memory;
  return seconds;
}

// --- The choice -----------------------------------------------------------------------------------------------------

namespace {

Architecture largest_part(const Architecture& architecture, const parallel::GridShape& grid) {
  return part_of(architecture, grid, grid.ranks() - 1);
}

/// mode and mode_of that mean these modes of units.
void express(const std::vector<Mode>& modes, const std::vector<std::string>& names, privacy::Settings& settings) {
  settings.mode_of.clear();
  const bool alike = std::all_of(modes.begin(), modes.end(), [&](Mode mode) { return mode == modes.front(); });
  settings.mode = alike ? modes.front() : Mode::book_keeping;
  for (std::size_t unit = 0; unit < modes.size() && !alike; ++unit)
    if (modes[unit] != Mode::book_keeping)
      settings.mode_of.push_back(fmt::format("{}: {}", names[unit], privacy::name_of(modes[unit])));
}

}  // namespace

namespace {

/// Throws a collective Error(usage) if blocks are to be formed again whose activations are in host memory.
void refuse_swapped(const Configuration& configuration, const Architecture& architecture) {
  if (!configuration.privacy.enabled || !transformer_settings(configuration, architecture).swaps()) return;
  const std::vector<Mode> modes = privacy::unit_modes(configuration.privacy, unit_names(architecture));
  const auto repeated = std::find(modes.begin(), modes.end() - 1, Mode::recompute);
  if (repeated == modes.end() - 1) return;
  throw collective_error(
      ExitCode::usage,
      "privacy recomputes block_{} with memory.swap_activations = true (the backward pass brings the "
      "activations of a block to the device once); take memory.recompute = \"block\" instead, or "
      "another mode",
      repeated - modes.begin());
}

/// The search for the modes of the units whose mode is automatic. Blocks are equal: the time of a plan depends on how
/// many blocks have each mode, not on which, so that all plans are a few numbers. Their order is the one with least
/// memory and time: repeated blocks last, blocks whose rows stay first. Rows that stay lie where the activations of the
/// next block were; those of the last block need memory of their own if other blocks have another mode; and a repeated
/// block after one whose rows stay has more to form again.
class Search {
 public:
  Search(const Configuration& configuration, const Architecture& architecture, const parallel::GridShape& grid,
         kernels::Backend backend, std::int64_t most)
      : with_(configuration),
        architecture_(architecture),
        grid_(grid),
        backend_(backend),
        most_(most),
        names_(unit_names(architecture)),
        given_(privacy::unit_modes(configuration.privacy, names_)),
        free_(static_cast<std::size_t>(std::count(given_.begin(), given_.end() - 1, Mode::automatic))) {
    with_.privacy.mode = Mode::book_keeping;
    with_.privacy.mode_of.clear();
    const Architecture part = largest_part(architecture, grid);
    for (const Mode mode : kModes) {
      block_seconds_[mode] = unit_seconds(with_, part, 0, mode, backend);
      head_seconds_[mode] = unit_seconds(with_, part, given_.size() - 1, mode, backend);
    }
    repeats_blocks_ = !transformer_settings(with_, part).swaps();
  }

  /// Per number of repeated blocks and mode of the head, the fewest blocks in the slower of the two other modes that
  /// fit: the slower one is of use where it takes less memory, which then falls from block to block.
  void run() {
    const bool stores_faster = block_seconds_[Mode::materialise] < block_seconds_[Mode::book_keeping];
    const Mode slow = stores_faster ? Mode::book_keeping : Mode::materialise;
    for (const Mode head : kModes) {
      if (given_.back() != Mode::automatic && given_.back() != head) continue;
      for (std::size_t repeated = 0; repeated <= (repeats_blocks_ ? free_ : 0); ++repeated) {
        const std::size_t others = free_ - repeated;
        const auto with_slow = [&](std::size_t count) {
          return assigned(head, repeated, slow == Mode::materialise ? count : others - count);
        };
        if (found_ && seconds_of(with_slow(0)) >= seconds_) continue;
        std::size_t fits = others, too_large = 0;
        if (others > 0 && try_out(with_slow(0))) continue;
        if (!try_out(with_slow(others))) continue;
        while (too_large + 1 < fits) {
          const std::size_t middle = too_large + (fits - too_large) / 2;
          (try_out(with_slow(middle)) ? fits : too_large) = middle;
        }
      }
    }
  }

  bool found() const { return found_; }
  /// The fastest that fits; if none does, the one with least memory of those that were tried.
  const privacy::Settings& best() const { return best_; }

 private:
  static constexpr Mode kModes[] = {Mode::materialise, Mode::book_keeping, Mode::recompute};

  std::vector<Mode> assigned(Mode head, std::size_t repeated, std::size_t stored) const {
    std::vector<Mode> modes = given_;
    modes.back() = head;
    std::size_t next = 0;
    for (std::size_t block = modes.size() - 1; block-- > 0;) {
      if (modes[block] != Mode::automatic) continue;
      modes[block] = next < repeated            ? Mode::recompute
                     : next < repeated + stored ? Mode::materialise
                                                : Mode::book_keeping;
      ++next;
    }
    return modes;
  }

  double seconds_of(const std::vector<Mode>& modes) const {
    double seconds = head_seconds_.at(modes.back());
    for (std::size_t block = 0; block + 1 < modes.size(); ++block) seconds += block_seconds_.at(modes[block]);
    return seconds;
  }

  bool try_out(const std::vector<Mode>& modes) {
    express(modes, names_, with_.privacy);
    const std::int64_t bytes = device_bytes(with_, architecture_, grid_, backend_);
    const bool fits = bytes <= most_;
    const double seconds = seconds_of(modes);
    if (fits ? !found_ || seconds < seconds_ : !found_ && (bytes_ == 0 || bytes < bytes_)) {
      best_ = with_.privacy;
      seconds_ = seconds;
      bytes_ = bytes;
    }
    found_ = found_ || fits;
    return fits;
  }

  Configuration with_;
  const Architecture& architecture_;
  const parallel::GridShape& grid_;
  const kernels::Backend backend_;
  const std::int64_t most_;
  const std::vector<std::string> names_;
  const std::vector<Mode> given_;
  const std::size_t free_;  // blocks
  std::map<Mode, double> block_seconds_, head_seconds_;
  bool repeats_blocks_ = true, found_ = false;
  privacy::Settings best_;
  double seconds_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace

privacy::Settings clipping_settings(const Configuration& configuration, const Architecture& architecture,
                                    const parallel::GridShape& grid, kernels::Backend backend) {
  const privacy::Settings& given = configuration.privacy;
  refuse_swapped(configuration, architecture);
  if (!given.enabled || given.mode != Mode::automatic || given.algorithm == privacy::Algorithm::naive) return given;
  Configuration other = configuration;
  const auto bytes = [&] { return device_bytes(other, architecture, grid, backend); };
  other.privacy.enabled = false;
  const std::int64_t most =
      configuration.device.memory > 0 ? static_cast<std::int64_t>(configuration.device.memory * 1e9) : 2 * bytes();
  other.privacy.enabled = true;
  if (given.release == privacy::Release::end) {  // all rows are kept anyway
    const Architecture part = largest_part(architecture, grid);
    other.privacy.mode = Mode::book_keeping;
    const auto seconds = [&](Mode mode) { return unit_seconds(other, part, 0, mode, backend); };
    if (seconds(Mode::materialise) < seconds(Mode::book_keeping)) other.privacy.mode = Mode::materialise;
    if (bytes() > most) other.privacy.mode = Mode::book_keeping;
    if (bytes() > most) other.privacy.mode = Mode::two_pass;
    return other.privacy;
  }
  Search search(configuration, architecture, grid, backend, most);
  search.run();
  if (search.found() || !given.mode_of.empty()) return search.best();
  other.privacy.mode = Mode::two_pass;
  return other.privacy;
}

namespace {

/// Units of one mode that follow one another.
struct Span {
  std::size_t first, end;
  Mode mode;
  std::string name() const {
    return end - first == 1 ? fmt::format("block {}", first) : fmt::format("blocks {}-{}", first, end - 1);
  }
};

std::string time_text(double seconds) {
  return seconds < 10 ? fmt::format("{:.3g} ms", 1e3 * seconds) : fmt::format("{:.3g} s", seconds);
}

std::vector<Span> spans_of(const std::vector<Mode>& modes) {
  std::vector<Span> spans;
  for (std::size_t unit = 0; unit + 1 < modes.size(); ++unit) {
    if (spans.empty() || spans.back().mode != modes[unit]) spans.push_back({unit, unit, modes[unit]});
    spans.back().end = unit + 1;
  }
  spans.push_back({modes.size() - 1, modes.size(), modes.back()});
  return spans;
}

}  // namespace

std::string clipping_text(const Configuration& configuration, const Architecture& architecture,
                          const parallel::GridShape& grid, kernels::Backend backend) {
  Configuration planned = configuration;
  planned.privacy = clipping_settings(configuration, architecture, grid, backend);
  const privacy::Settings& settings = planned.privacy;
  const char* const why = configuration.privacy.mode != Mode::automatic ? ""
                          : configuration.device.memory > 0             ? " (the fastest by sizes within device.memory)"
                                                            : " (the fastest by sizes that at most doubles the memory)";
  const std::string modes_text = settings.mode_of.empty() ? privacy::to_text(settings.mode) : "by unit";
  std::string text = fmt::format("  clipping: {}{}\n", modes_text, why);
  if (settings.mode == Mode::two_pass) return text;
  const std::vector<std::string> names = unit_names(architecture);
  const std::vector<Mode> modes = privacy::unit_modes(settings, names);
  const Architecture part = largest_part(architecture, grid);
  const auto bytes = [&](const Configuration& given) { return device_bytes(given, architecture, grid, backend); };
  const std::int64_t total = bytes(planned);
  Configuration other = planned;
  const double micro_batches =
      number((configuration.rank_tokens() + configuration.micro_tokens() - 1) / configuration.micro_tokens());
  double sum = 0;
  for (const Span& span : spans_of(modes)) {
    const double seconds = micro_batches * number(static_cast<std::int64_t>(span.end - span.first)) *
                           unit_seconds(planned, part, span.first, span.mode, backend);
    sum += seconds;
    std::vector<Mode> without = modes;
    std::fill(without.begin() + static_cast<std::ptrdiff_t>(span.first),
              without.begin() + static_cast<std::ptrdiff_t>(span.end), Mode::recompute);
    express(without, names, other.privacy);
    const bool compares = span.mode != Mode::recompute && settings.release == privacy::Release::eager &&
                          (span.end == names.size() || !transformer_settings(planned, part).swaps());
    text += fmt::format("    {:<14}{:<13}about {} per step{}\n", span.end == names.size() ? "head" : span.name(),
                        privacy::name_of(span.mode), time_text(seconds),
                        !compares
                            ? ""
                            : fmt::format(", {} beside recompute",
                                          report::binary_bytes_text(std::max<std::int64_t>(0, total - bytes(other)))));
  }
  other.privacy.enabled = false;
  return text + fmt::format("    together about {} per step of {}, {} beside a step without privacy\n", time_text(sum),
                            backend == kernels::Backend::portable ? "one core" : "one H200",
                            report::binary_bytes_text(total - bytes(other)));
}

}  // namespace weft::language_model
