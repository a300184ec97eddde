// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {
namespace {

struct Scratch {
  double centre[kChunkColumns], weighted[kChunkColumns];
  float values[kChunkColumns];
};

}  // namespace

void set_advantages(const Execution& execution, const SetRule& rule, const AnswerSets& sets, Array<double> workspace,
                    const SetAdvantages& out) {
  const SetRule r = rule;
  const AnswerSets a = sets;
  const SetAdvantages o = out;
  double* const memory = workspace.data;
  for_teams(
      execution, "set advantages", sets.prompts, sizeof(Scratch), KOKKOS_LAMBDA(const Team& team) {
        Scratch& buffer = scratch<Scratch>(team);
        const std::int64_t prompt = team.league_rank(), samples = a.samples, first = prompt * samples;
        const int n = static_cast<int>(samples);
        // By answer: 1 / |e|, or 0 of an empty one; |y|^2; y . W.
        double* const inverse = memory + 3 * first;
        double* const square = inverse + samples;
        double* const product = square + samples;
        const auto each_chunk = [&](auto&& body) { for_chunks(a.embeddings.columns, a.embeddings.columns, body); };
        const auto chunk = [&](std::int64_t i, std::int64_t column, int count) {
          return row_chunk(team, a.embeddings, first + i, column, count, buffer.values);
        };

        for (std::int64_t i = 0; i < samples; ++i) {
          double sum = 0;
          each_chunk([&](std::int64_t column, int count) {
            const float* const e = chunk(i, column, count);
            sum += sum_columns<double>(team, count, [&](int c) { return double{e[c]} * double{e[c]}; });
            team.team_barrier();
          });
          once(team, [&] {
            inverse[i] = sum == 0 ? 0.0 : 1 / Kokkos::sqrt(sum) + (sum - sum);  // of infinity: NaN, not 0
            square[i] = product[i] = 0;
          });
        }
        team.team_barrier();
        const auto present = [&](std::int64_t i) { return inverse[i] != 0; };
        const auto sum_answers = [&](auto&& term) {
          return sum_columns<double>(team, n, [&](int i) { return present(i) ? term(i) : 0.0; });
        };
        SetSums sums;
        sums.count = static_cast<std::int64_t>(sum_answers([](int) { return 1.0; }));
        const double m = static_cast<double>(sums.count);

        each_chunk([&](std::int64_t column, int count) {
          for_columns(team, count, [&](int c) { buffer.centre[c] = buffer.weighted[c] = 0; });
          for (std::int64_t i = 0; i < samples; ++i) {
            if (!present(i)) continue;
            const double scale = inverse[i];
            const float* const e = chunk(i, column, count);
            for_columns(team, count, [&](int c) { buffer.centre[c] += scale * double{e[c]}; });
          }
          for_columns(team, count, [&](int c) { buffer.centre[c] /= m; });
          for (std::int64_t i = 0; i < samples; ++i) {
            if (!present(i)) continue;
            const double scale = inverse[i], reward = a.rewards[first + i];
            const float* const e = chunk(i, column, count);
            for_columns(team, count,
                        [&](int c) { buffer.weighted[c] += reward * (scale * double{e[c]} - buffer.centre[c]); });
          }
          for (std::int64_t i = 0; i < samples; ++i) {
            if (!present(i)) continue;
            const double scale = inverse[i];
            const float* const e = chunk(i, column, count);
            const auto y = [&](int c) { return scale * double{e[c]} - buffer.centre[c]; };
            const double own = sum_columns<double>(team, count, [&](int c) { return y(c) * y(c); });
            const double with = sum_columns<double>(team, count, [&](int c) { return y(c) * buffer.weighted[c]; });
            once(team, [&] {
              square[i] += own;
              product[i] += with;
            });
          }
          team.team_barrier();
        });

        const double spread = sum_answers([&](int i) { return square[i]; });
        const double weighted_spread = sum_answers([&](int i) { return a.rewards[first + i] * square[i]; });
        sums.rewards = sum_answers([&](int i) { return a.rewards[first + i]; });
        sums.pairs = m * spread / 2;
        sums.reward_pairs = (m * weighted_spread + sums.rewards * spread) / 2;
        const SetFactors factors = set_factors(r, sums.count);
        once(team, [&] {
          o.counts[prompt] = sums.count;
          o.diversity[prompt] = mean_distance(factors, sums);
          o.objective[prompt] = expected_objective(r, factors, sums);
        });
        for_columns(team, n, [&](int i) {
          const double s = (m * square[i] + spread) / 2,
                       q = (sums.rewards * square[i] + weighted_spread) / 2 - product[i];
          o.distances[first + i] = present(i) ? s : 0.0;
          o.advantages[first + i] = present(i) ? set_advantage(r, factors, sums, a.rewards[first + i], s, q) : 0.0;
        });
      });
}

}  // namespace weft::kernels::portable
