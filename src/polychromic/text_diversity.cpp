// SPDX-License-Identifier: Apache-2.0
#include "polychromic/text_diversity.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "base/error.hpp"
#include "base/progress.hpp"

namespace weft::polychromic {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr int kLongestGram = 3;

/// An n-gram; of fewer than three tokens the rest is 0.
using Gram = std::array<std::uint32_t, kLongestGram>;

void append_grams(const AnswerIds& answer, int n, std::vector<Gram>& grams) {
  if (n < 1 || n > kLongestGram) throw error(ExitCode::internal, "n-grams of {} tokens", n);
  const auto length = static_cast<std::size_t>(n);
  for (std::size_t begin = 0; begin + length <= answer.size(); ++begin) {
    Gram gram{};
    std::copy_n(answer.begin() + static_cast<std::ptrdiff_t>(begin), length, gram.begin());
    grams.push_back(gram);
  }
}

double share_of_different(std::vector<Gram> grams) {
  if (grams.empty()) return kNone;
  const auto total = static_cast<double>(grams.size());
  std::sort(grams.begin(), grams.end());
  return static_cast<double>(std::unique(grams.begin(), grams.end()) - grams.begin()) / total;
}

struct Count {
  Gram gram;
  std::int64_t count;
};

/// Different n-grams of an answer, ascending, with their numbers.
std::vector<Count> counted_grams(const AnswerIds& answer, int n) {
  std::vector<Gram> grams;
  append_grams(answer, n, grams);
  std::sort(grams.begin(), grams.end());
  std::vector<Count> counts;
  for (const Gram& gram : grams) {
    if (counts.empty() || counts.back().gram != gram) counts.push_back({gram, 0});
    ++counts.back().count;
  }
  return counts;
}

/// Largest count of an n-gram in one answer, the number of that answer, and the largest count in the others.
struct Most {
  std::int64_t most = 0, owner = -1, second = 0;
};

/// The answers that serve as each other's references.
class References {
 public:
  explicit References(std::span<const AnswerIds> answers) {
    for (std::size_t i = 0; i < answers.size(); ++i) add(answers[i], static_cast<std::int64_t>(i));
    std::sort(lengths_.begin(), lengths_.end());
  }

  /// BLEU-2 of an answer against all references but number `own`; own < 0: all. own >= 0: the answer is that reference.
  double bleu(const AnswerIds& answer, std::int64_t own) const {
    std::array<double, 2> precision{};
    for (int n = 1; n <= 2; ++n) {
      std::int64_t matches = 0;
      for (const Count& one : counted_grams(answer, n)) {
        const auto found = most_.at(static_cast<std::size_t>(n - 1)).find(one.gram);
        if (found == most_[static_cast<std::size_t>(n - 1)].end()) continue;
        const Most& most = found->second;
        matches += std::min(one.count, most.owner == own ? most.second : most.most);
      }
      const std::int64_t grams = std::max<std::int64_t>(0, std::ssize(answer) - n + 1), smoothing = n == 1 ? 0 : 1;
      precision[static_cast<std::size_t>(n - 1)] =
          static_cast<double>(matches + smoothing) / static_cast<double>(grams + smoothing);
    }
    const auto length = static_cast<double>(answer.size()),
               reference = static_cast<double>(closest_length(std::ssize(answer), own >= 0));
    const double brevity = length >= reference ? 1 : std::exp(1 - reference / length);
    return brevity * std::sqrt(precision[0] * precision[1]);
  }

 private:
  void add(const AnswerIds& answer, std::int64_t number) {
    lengths_.push_back(std::ssize(answer));
    for (int n = 1; n <= 2; ++n)
      for (const Count& one : counted_grams(answer, n)) {
        Most& most = most_.at(static_cast<std::size_t>(n - 1))[one.gram];
        if (one.count > most.most)
          most = {one.count, number, most.most};
        else
          most.second = std::max(most.second, one.count);
      }
  }

  /// Length of the references that is closest to `length`, the shorter of two; `without_one`: ignores one reference of
  /// this length.
  std::int64_t closest_length(std::int64_t length, bool without_one) const {
    auto begin = lengths_.begin(), end = lengths_.end();
    const auto [first, last] = std::equal_range(begin, end, length);
    if (last - first > (without_one ? 1 : 0)) return length;
    if (first == begin) return *last;
    if (last == end) return *(first - 1);
    return *last - length < length - *(first - 1) ? *last : *(first - 1);
  }

  std::array<std::map<Gram, Most>, 2> most_;  // of 1-grams and 2-grams
  std::vector<std::int64_t> lengths_;         // ascending
};

std::vector<AnswerIds> without_empty(std::span<const AnswerIds> answers) {
  std::vector<AnswerIds> kept;
  std::copy_if(answers.begin(), answers.end(), std::back_inserter(kept),
               [](const AnswerIds& answer) { return !answer.empty(); });
  return kept;
}

double pair_distance(PairMetric metric, const AnswerIds& a, const AnswerIds& b) {
  if (metric == PairMetric::self_bleu) return 1 - (bleu2(a, {&b, 1}) + bleu2(b, {&a, 1})) / 2;
  const AnswerIds both[] = {a, b};
  const double value = distinct(both, 2);
  return std::isnan(value) ? (a == b ? 0 : 1) : value;
}

}  // namespace

double distinct(std::span<const AnswerIds> answers, int n) {
  std::vector<Gram> grams;
  for (const AnswerIds& answer : answers) append_grams(answer, n, grams);
  return share_of_different(std::move(grams));
}

double mean_distinct(std::span<const AnswerIds> answers, int n) {
  double sum = 0;
  std::int64_t counted = 0;
  for (const AnswerIds& answer : answers) {
    if (std::ssize(answer) < n) continue;
    sum += distinct({&answer, 1}, n);
    ++counted;
  }
  return counted == 0 ? kNone : sum / static_cast<double>(counted);
}

double bleu2(const AnswerIds& answer, std::span<const AnswerIds> references) {
  if (answer.empty() || references.empty()) throw error(ExitCode::internal, "BLEU of no tokens, or without references");
  return References(references).bleu(answer, -1);
}

double self_bleu(std::span<const AnswerIds> answers) {
  const std::vector<AnswerIds> kept = without_empty(answers);
  if (kept.size() < 2) return kNone;
  const References references(kept);
  double sum = 0;
  for (std::size_t i = 0; i < kept.size(); ++i) sum += references.bleu(kept[i], static_cast<std::int64_t>(i));
  return sum / static_cast<double>(kept.size());
}

TextDiversity text_diversity(std::span<const AnswerIds> answers) {
  std::vector<AnswerIds> kept = without_empty(answers);
  TextDiversity out{.answers = std::ssize(answers), .empty = std::ssize(answers) - std::ssize(kept)};
  for (int n = 1; n <= kLongestGram; ++n) {
    out.distinct[n - 1] = distinct(kept, n);
    out.mean_distinct[n - 1] = mean_distinct(kept, n);
  }
  out.self_bleu = self_bleu(kept);
  double tokens = 0;
  for (const AnswerIds& answer : kept) tokens += static_cast<double>(answer.size());
  out.mean_length = kept.empty() ? kNone : tokens / static_cast<double>(kept.size());
  std::sort(kept.begin(), kept.end());
  out.unique = std::unique(kept.begin(), kept.end()) - kept.begin();
  return out;
}

Json to_json(const TextDiversity& diversity) {
  Json json = {{"answers", diversity.answers},
               {"empty", diversity.empty},
               {"unique", diversity.unique},
               {"mean_length", diversity.mean_length}};
  for (int n = 1; n <= kLongestGram; ++n) json["distinct_" + std::to_string(n)] = diversity.distinct[n - 1];
  for (int n = 1; n <= kLongestGram; ++n) json["mean_distinct_" + std::to_string(n)] = diversity.mean_distinct[n - 1];
  json["self_bleu"] = diversity.self_bleu;
  return json;
}

std::vector<double> pair_distances(PairMetric metric, std::span<const AnswerIds> answers) {
  const std::size_t count = answers.size();
  std::vector<double> distances(count * count);
  for (std::size_t i = 0; i < count; ++i) {
    note_progress();
    for (std::size_t j = 0; j < i; ++j)
      if (!answers[i].empty() && !answers[j].empty())
        distances[i * count + j] = distances[j * count + i] = pair_distance(metric, answers[i], answers[j]);
  }
  return distances;
}

}  // namespace weft::polychromic
