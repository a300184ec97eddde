// SPDX-License-Identifier: Apache-2.0
//
// An audit of the guarantee: sampling, clipping, noise and accountant together. An adversary knows everything but
// whether one record, a canary, is in the data, and sees the noisy gradients of all steps. From how often its best
// guess (the likelihood ratio) is right follows a lower bound of epsilon, which must not exceed what the accountant
// says (Jagielski et al. 2020, arXiv 2006.07709). With too little noise the same audit must exceed it: it can fail.
#include <algorithm>
#include <functional>

#include "privacy/accountant/accountant.hpp"
#include "privacy/sampling.hpp"
#include "tests/transcoder/private_steps.hpp"

namespace weft::transcoder {
namespace {

using testing::PrivateSteps;

constexpr double kAuditRate = 0.5, kAuditNoise = 0.9, kAuditDelta = 0.01, kAuditClip = 0.05;
constexpr std::int64_t kOthers = 4, kAuditSteps = 3, kGames = 1200;

/// Bound of a probability that was met `hits` times in n games: with confidence 1 - 1e-3 it is not beyond (Hoeffding).
double beyond(std::int64_t hits, std::int64_t n, int side) {
  const double width = std::sqrt(std::log(1e3) / (2 * static_cast<double>(n)));
  return std::clamp(static_cast<double>(hits) / static_cast<double>(n) + side * width, 0.0, 1.0);
}

struct Audit {
  Audit()
      : run(still(), testing::world().all()) {
    // Clipped gradients of the records alone.
    for (std::int64_t record = 0; record <= kOthers; ++record) {
      run.step({record});
      alone.push_back(run.gradients());
    }
  }
  /// The learning rate is too small to change a weight.
  static Configuration still() {
    Configuration settings =
        testing::private_configuration("activation = \"topk\"\nk = 3\n", "unit = \"token\"\nclip = 0.05\n");
    settings.optimizer.learning_rate = 1.2e-38;
    return settings;
  }
  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  }

  /// Log likelihood ratio of "the canary is in the data" after all steps of a game.
  double play(bool with_canary, double noise, std::uint64_t game) {
    kernels::NoiseKey key{};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] = kernels::philox(77, kernels::Purpose::test, game, i).word[0];
    run.trainer.set_noise({.key = key, .multiplier = noise, .expected = 1});
    double ratio = 0;
    for (std::int64_t s = 0; s < kAuditSteps; ++s) {
      const std::vector<std::int64_t> drawn =
          privacy::poisson_sample(key, static_cast<std::uint64_t>(run.trainer.steps_done() + 1),
                                  kOthers + (with_canary ? 1 : 0), kAuditRate);
      run.step(drawn);
      // What the others contribute is known to the adversary.
      const std::vector<double>& canary = alone[kOthers];
      double x = dot(run.gradients(), canary);
      for (const std::int64_t record : drawn)
        if (record < kOthers) x -= dot(alone[static_cast<std::size_t>(record)], canary);
      x /= kAuditClip * std::sqrt(dot(canary, canary));  // 1 with the canary, 0 without, and the noise
      ratio += std::log(1 - kAuditRate + kAuditRate * std::exp((x - 0.5) / (kAuditNoise * kAuditNoise)));
    }
    return ratio;
  }

  /// Lower bound of epsilon from games with this noise: the best threshold, found on one half of the games.
  double lower_bound(double noise) {
    std::vector<double> in, out;
    for (std::uint64_t game = 0; game < kGames; ++game) {
      in.push_back(play(true, noise, 2 * game));
      out.push_back(play(false, noise, 2 * game + 1));
    }
    const auto half = static_cast<std::ptrdiff_t>(kGames / 2);
    const auto bound = [&](double threshold, std::ptrdiff_t begin, int side) {
      const auto above = [&](const std::vector<double>& ratios) {
        return std::count_if(ratios.begin() + begin, ratios.begin() + begin + half,
                             [&](double ratio) { return ratio > threshold; });
      };
      const double found = beyond(above(in), half, -side) - kAuditDelta, wrong = beyond(above(out), half, side);
      return found > 0 && wrong > 0 ? std::log(found / wrong) : -1e9;
    };
    double best = 0, most = -1e9;
    for (double threshold = -3; threshold < 6; threshold += 0.05)
      if (const double guess = bound(threshold, 0, 1); guess > most) {
        most = guess;
        best = threshold;
      }
    return bound(best, half, 1);
  }

  PrivateSteps run;
  std::vector<std::vector<double>> alone;
};

}  // namespace

TEST_CASE("what an adversary learns about a canary is within the guarantee, and beyond it with too little noise") {
  const privacy::Phase phase{kAuditRate, kAuditNoise, kAuditSteps};
  const double epsilon = privacy::epsilon(privacy::AccountantKind::prv, {&phase, 1}, kAuditDelta);
  Audit audit;
  for (const auto& gradient : audit.alone)
    REQUIRE(testing::norm_of(gradient) == doctest::Approx(kAuditClip).epsilon(1e-3));
  const double found = audit.lower_bound(kAuditNoise);
  MESSAGE("epsilon ", epsilon, ", at least ", found, " by the audit");
  CHECK(found <= epsilon);
  CHECK(found > 0.25 * epsilon);  // the audit is not blind
  const double broken = audit.lower_bound(kAuditNoise / 6);
  MESSAGE("with a sixth of the noise at least ", broken);
  CHECK(broken > epsilon);
}

}  // namespace weft::transcoder
