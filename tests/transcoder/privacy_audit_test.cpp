// SPDX-License-Identifier: Apache-2.0
//
// An audit of the guarantee: sampling, clipping, noise and accountant together. An adversary knows everything but
// whether one record, a canary, is in the data, and sees the noisy gradients of all steps. From how often its best
// guess (the likelihood ratio) is right follows a lower bound of epsilon, which must not exceed what the accountant
// says (Jagielski et al. 2020, arXiv 2006.07709). With too little noise the same audit must exceed it: it can fail.
//
// Every record of a run is the canary of a game of its own, against an adversary who knows the others (as in Steinke et
// al. 2023, arXiv 2305.08846).
#include <algorithm>
#include <functional>

#include "privacy/accountant/accountant.hpp"
#include "privacy/sampling.hpp"
#include "tests/transcoder/private_steps.hpp"

namespace weft::transcoder {
namespace {

using testing::PrivateSteps;

constexpr double kAuditRate = 0.5, kAuditNoise = 1.2, kAuditDelta = 0.01, kAuditClip = 0.05;
constexpr std::int64_t kCanaries = 16, kAuditSteps = 3, kRuns = 400;

/// Bound of a probability that was met `hits` times in n games: with confidence 1 - 1e-3 it is not beyond (Hoeffding).
double beyond(std::int64_t hits, std::int64_t n, int side) {
  const double width = std::sqrt(std::log(1e3) / (2 * static_cast<double>(n)));
  return std::clamp(static_cast<double>(hits) / static_cast<double>(n) + side * width, 0.0, 1.0);
}

struct Audit {
  Audit() : run(still(), testing::world().all()) {
    for (std::int64_t record = 0; record < kCanaries; ++record) {
      run.step({record});
      alone.push_back(run.gradients());
    }
    for (const auto& a : alone)
      for (const auto& b : alone) products.push_back(dot(a, b));
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

  double product(std::int64_t a, std::int64_t b) const { return products[static_cast<std::size_t>(a * kCanaries + b)]; }

  /// A run on the records that a coin puts into the data. ratio[record]: log likelihood ratio of "it is in the data".
  void play(double noise, std::uint64_t game, std::vector<double>& in, std::vector<double>& out) {
    kernels::NoiseKey key{};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] = kernels::philox(77, kernels::Purpose::test, game, i).word[0];
    std::vector<std::int64_t> present;
    std::vector<double> ratio(kCanaries);
    for (std::int64_t record = 0; record < kCanaries; ++record)
      if (kernels::philox(78, kernels::Purpose::test, game, static_cast<std::uint64_t>(record)).word[0] % 2 == 0)
        present.push_back(record);
    run.trainer.set_noise({.key = key, .multiplier = noise, .expected = 1});
    for (std::int64_t s = 0; s < kAuditSteps; ++s) {
      std::vector<std::int64_t> drawn = privacy::poisson_sample(
          key, static_cast<std::uint64_t>(run.trainer.steps_done() + 1), std::ssize(present), kAuditRate);
      for (std::int64_t& record : drawn) record = present[static_cast<std::size_t>(record)];
      run.step(drawn);
      const std::vector<double> seen = run.gradients();
      for (std::int64_t canary = 0; canary < kCanaries; ++canary) {
        double x = dot(seen, alone[static_cast<std::size_t>(canary)]);
        for (const std::int64_t other : drawn)
          if (other != canary) x -= product(other, canary);    // known to the adversary
        x /= kAuditClip * std::sqrt(product(canary, canary));  // 1 with the canary, 0 without, and the noise
        ratio[static_cast<std::size_t>(canary)] +=
            std::log(1 - kAuditRate + kAuditRate * std::exp((x - 0.5) / (kAuditNoise * kAuditNoise)));
      }
    }
    for (std::int64_t record = 0; record < kCanaries; ++record) {
      const bool is_in = std::find(present.begin(), present.end(), record) != present.end();
      (is_in ? in : out).push_back(ratio[static_cast<std::size_t>(record)]);
    }
  }

  /// Lower bound of epsilon from runs with this noise: the best threshold, found on one half of the games.
  double lower_bound(double noise) {
    std::vector<double> in, out;
    for (std::uint64_t game = 0; game < kRuns; ++game) play(noise, game, in, out);
    const auto bound = [&](double threshold, bool second) {
      const auto fraction = [&](const std::vector<double>& ratios, int towards) {
        const auto half = std::ssize(ratios) / 2;
        const auto begin = ratios.begin() + (second ? half : 0);
        return beyond(std::count_if(begin, begin + half, [&](double ratio) { return ratio > threshold; }), half,
                      towards);
      };
      const double found = fraction(in, -1) - kAuditDelta, wrong = fraction(out, 1);
      return found > 0 && wrong > 0 ? std::log(found / wrong) : -1e9;
    };
    double best = 0, most = -1e9;
    for (double threshold = -3; threshold < 6; threshold += 0.05)
      if (const double guess = bound(threshold, false); guess > most) {
        most = guess;
        best = threshold;
      }
    return bound(best, true);
  }

  PrivateSteps run;
  std::vector<std::vector<double>> alone;  // clipped gradients of the records
  std::vector<double> products;            // of each two of them
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
  CHECK(found > 0.15 * epsilon);  // the audit is not blind
  const double broken = audit.lower_bound(kAuditNoise / 6);
  MESSAGE("with a sixth of the noise at least ", broken);
  CHECK(broken > epsilon);
}

}  // namespace weft::transcoder
