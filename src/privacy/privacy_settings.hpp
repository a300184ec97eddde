// SPDX-License-Identifier: Apache-2.0
// Table [privacy], and the options that a private run excludes.
//
// A private step clips the gradient of every record, sums, and adds noise (DP-SGD, Abadi et al. 2016,
// arXiv:1607.00133). The guarantee holds for neighbouring data: two training texts of which one has one record more.
#pragma once

#include <cstdint>
#include <string>

#include "device/device_settings.hpp"
#include "kernels/privacy/clipped_sums.hpp"
#include "privacy/accountant/accountant.hpp"

namespace weft::input {
class Schema;
}
namespace weft::run {
struct RunSettings;
}
namespace weft::optimizer {
struct Settings;
}
namespace weft::dataset {
struct Settings;
struct TokenSettings;
}  // namespace weft::dataset

namespace weft::privacy {

using kernels::ClipFunction;

/// Method that forms the norm of a record's gradient: by the product over its rows (input_length), by the Gram matrices
/// of its rows (width), by the cheaper of both per layer (automatic), or from the whole gradient of each record
/// (naive).
enum class Algorithm { automatic, input_length, width, naive };
/// Source of the clipped sum: rows kept until the factors are known (book_keeping; Bu et al. 2022,
/// arXiv:2210.00038), a second backward pass (two_pass), or the gradient of each record (materialise).
enum class Mode { automatic, book_keeping, two_pass, materialise };
/// Units of clipping: the whole gradient to C, or K parts to C / sqrt(K) each, so that their norms together are at most
/// C: a part per parameter (per_layer) or per block (group).
enum class Scheme { flat, per_layer, group };
/// The bound C: privacy.clip in every step, or one that follows a quantile of the norms.
enum class BoundRule { fixed, adaptive };
/// A record: what the guarantee protects.
enum class Unit { sequence, token, document, example, owner };
/// Time at which rows that are no longer needed are freed: after each layer, or at the end of the backward pass.
enum class Release { eager, end };
/// Source of the key of noise and sampling: the operating system, or run.seed, for tests (not private).
enum class KeySource { system, test };

/// Table [privacy].
struct Settings {
  bool enabled = false;
  double epsilon = 0;           ///< target; 0: noise_multiplier is given
  double noise_multiplier = 0;  ///< standard deviation of the noise / clip; 0: epsilon is given
  double delta = 0;             ///< 0: not given
  double clip = 1;              ///< C, the largest norm of a record's contribution; adaptive: of the first step
  BoundRule clipping = BoundRule::fixed;
  double clip_quantile = 0.5;  ///< of adaptive clipping, and the two below: kernels::ClipAdaptation
  double clip_rate = 0.2;
  double count_noise = 0;  ///< 0: a twentieth of the expected records of a step
  bool adapts_clip() const { return enabled && clipping == BoundRule::adaptive; }
  std::string sampling = "poisson";
  std::int64_t most_records = 0;  ///< of a step, with truncated sampling; 0: not given
  bool truncates() const { return sampling == "truncated_poisson"; }
  Algorithm algorithm = Algorithm::automatic;
  Mode mode = Mode::automatic;
  std::int64_t tile = 0;  ///< positions per tile of the norm kernels; 0: automatic
  Scheme scheme = Scheme::flat;
  ClipFunction clip_function = ClipFunction::abadi;
  AccountantKind accountant = AccountantKind::prv;
  Unit unit = Unit::sequence;
  std::string owner_field;         ///< Unit::owner: key of JSON Lines whose value says whom a line belongs to
  std::int64_t max_per_owner = 0;  ///< sequences of a record that are used, if it may have several; 0: not given
  /// Implementation that forms norms and clipped sums of products.
  kernels::ProductImplementation products = kernels::ProductImplementation::fused;
  bool overlap = true;  ///< no key; between ranks: clipped sums are exchanged while others are formed
  Release release = Release::eager;
  KeySource noise_key = KeySource::system;
  /// True if a record may have several sequences: a document, an example of JSON Lines, or all that an owner has.
  bool joins_sequences() const { return unit != Unit::sequence && unit != Unit::token; }
  /// The factors of a part are known when the backward pass leaves it: its rows need not be kept until the end.
  bool sums_by_part() const {
    return scheme != Scheme::flat && mode == Mode::book_keeping && release == Release::eager;
  }
  std::int64_t record_rows = 0;  ///< of a transcoder with Unit::sequence: rows of a record; 0: not given
};

/// Keys of the table and the conditions between them, bound to the settings, which must outlive the schema.
void add_keys(input::Schema&, Settings&);

/// Adds the rules by which a private run excludes options of tables that all model families have: those that couple
/// records or whose choices depend on training data without noise. After the keys of these tables; the arguments must
/// outlive the schema.
void add_rules(input::Schema&, const Settings&, const device::Precision&);
/// Adds the rules for models of token sequences.
void add_sequence_rules(input::Schema&, const Settings&);

}  // namespace weft::privacy
