// SPDX-License-Identifier: Apache-2.0
//
// The account of a private run: its key, its noise multiplier, the steps so far and the guarantee that they give. Its
// state is part of the checkpoint, so that a resumed run continues the accounting and never repeats or skips a number
// of the noise.
//
// clang-format off
//   privacy::Account account(settings, rate, record);       rate: probability with which a record joins a step
//   account.register_in(registry, world.is_root());
//   account.begin(seed, steps, ranks);                       a new run; or, after the registry has been loaded:
//   account.resume(seed, step, steps, changed, ranks);
//   … account.count_step(); …                                after each update, also of an empty batch
//   result["privacy"] = to_json(account.guarantee(ranks));
// clang-format on
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "checkpoint/registry.hpp"
#include "parallel/communicator.hpp"
#include "privacy/accountant/accountant.hpp"
#include "privacy/noise_key.hpp"
#include "privacy/sampling.hpp"

namespace weft::privacy {

/// Definition of a record. The last ones, as many as settings.canaries, are canaries: those whose coin says no are
/// drawn and left out.
struct Record {
  Unit unit = Unit::sequence;
  std::int64_t tokens = 0;  ///< of a sequence, at most
  std::int64_t count = 0;   ///< in the training data; public
};

/// Name of a unit: "document".
const char* name_of(Unit);
/// Text of a record: "sequence of at most 129 tokens".
std::string to_text(const Record&);

/// Guarantee of a run after its steps so far.
struct Guarantee {
  double epsilon = 0;
  double delta = 0;
  AccountantKind accountant = AccountantKind::prv;
  double clip = 0;
  bool adaptive = false;          ///< clip is the bound of the first step
  std::int64_t most_records = 0;  ///< of a step; 0: not truncated
  std::int64_t bands = 1;         ///< of the noise
  KeySource key = KeySource::system;
  Record record;
  std::string initial;         ///< weights of another training that the run began with; "" = none
  std::vector<Phase> history;  ///< at least one phase; its last one has the current rate and noise
};

/// JSON of result.privacy in run.json.
Json to_json(const Guarantee&);
/// Text for the log: the guarantee, and what it protects.
std::string to_text(const Guarantee&);

/// Throws a collective Error(usage) if a record would be drawn with a probability above 1: privacy.bands * sample_rate.
void require_parts(const Settings&, double sample_rate);
/// Throws a collective Error(usage) if the noise on the count of adaptive clipping, of steps of `expected` records, is
/// too little for `multiplier`, the noise multiplier; 0: not known yet.
void require_count_noise(const Settings&, double multiplier, double expected);

class Account {
 public:
  /// `settings.enabled`; `sample_rate` in (0, 1]. `initial`: see Guarantee. Throws as require_parts.
  Account(const Settings& settings, double sample_rate, const Record& record, std::string initial = {});
  Account(const Account&) = delete;  // the registry refers to its members

  /// Adds the state: privacy/history and, in a shard that its owner alone can read, the key. `writes`: on one rank.
  void register_in(checkpoint::Registry&, bool writes);

  /// Begins a new run of `steps` steps: draws the key and computes the noise multiplier from the target. Logs the plan.
  /// Throws a collective Error(usage) if the target cannot be reached, or the accountant has no result. Collective.
  void begin(std::uint64_t seed, std::int64_t steps, const parallel::Communicator& ranks);
  /// Continues a run that has been loaded at step `done` of `steps`. The noise multiplier stays, unless the input has
  /// another one, or the target would be exceeded: then the remaining steps get more noise. The same noise must never
  /// cover two different gradients, whose difference it would reveal: if the following steps are not those that an
  /// interrupted run may have made already (`changed`: by the input; or by noise or sample rate), they get a new key,
  /// and so they do after a checkpoint without one of this generator. Throws collective errors: Error(usage) if no
  /// noise suffices, Error(io) if the state does not fit the step. Collective.
  void resume(std::uint64_t seed, std::int64_t done, std::int64_t steps, bool changed,
              const parallel::Communicator& ranks);

  /// Records of step `step`, drawn among those of the training data, ascending: the same on all ranks.
  std::vector<std::int64_t> draw(std::int64_t step) const;
  /// Those of them of this rank of the data axis.
  std::vector<std::int64_t> draw(std::int64_t step, const parallel::Communicator& data_ranks) const;
  /// The noise of a step of `expected` records.
  Noise noise(double expected) const;
  const kernels::NoiseKey& key() const { return key_; }
  /// Says of each canary whether it is among the records. The same in the whole run.
  std::vector<bool> canaries() const { return canary_coins(first_key_, settings_.canaries); }
  double noise_multiplier() const { return noise_multiplier_; }
  double sample_rate() const { return sample_rate_; }

  void count_step();
  std::vector<Phase> history() const;
  /// Guarantee after the steps so far and `more`: of a run that ended early, whose number of steps follows from what it
  /// released, all that were planned. May take seconds on rank 0. Collective.
  Guarantee guarantee(const parallel::Communicator& ranks, std::int64_t more = 0) const;

 private:
  static constexpr std::size_t kMostPhases = 64;
  struct StoredPhase {
    double sample_rate, noise_multiplier, steps;
  };
  std::vector<Phase> planned(std::int64_t more) const;
  Truncation truncation() const { return {record_.count, settings_.truncates() ? settings_.most_records : 0}; }
  double epsilon_of(History history) const {
    return epsilon(settings_.accountant, as_independent(history, settings_.bands), settings_.delta, truncation());
  }
  /// The noise multiplier of `more` steps after those so far, for the target.
  double noise_for_target(std::int64_t more) const;
  void make_key(std::uint64_t seed, std::int64_t done, const parallel::Communicator& ranks);
  void plan(std::int64_t done, std::int64_t steps, const parallel::Communicator& ranks);

  const Settings settings_;
  const double sample_rate_;
  const Record record_;
  const std::string initial_;
  double noise_multiplier_ = 0;
  kernels::NoiseKey key_ = {};
  kernels::NoiseKey first_key_ = {};  // chooses canaries, and the part of the data of a record (privacy.bands)
  std::array<StoredPhase, kMostPhases> phases_ = {};  // used ones first: their noise multiplier is not 0
};

}  // namespace weft::privacy
