// SPDX-License-Identifier: Apache-2.0
//
// Diversity of several answers to a prompt, measured on their token ids. Empty answers are excluded and counted.
//
//   distinct-n   different n-grams / n-grams, over all answers together (Li et al. 2016); also the mean over answers
//   BLEU-2       min(1, exp(1 - r / c)) sqrt(p_1 p_2)   (Papineni et al. 2002, weights 1/2 and 1/2)
//                p_n: share of the c - n + 1 n-grams of the answer that are in a reference, each at most as often as in
//                the reference that has it most often; bigrams with add-one smoothing, p_2 = (matches + 1) /
//                (bigrams + 1) (Lin & Och 2004), so that an answer without common bigrams is not 0 and one of a single
//                token is defined. c: tokens of the answer; r: of the reference whose length is closest, the shorter
//                of two
//   self-BLEU    mean over the answers of BLEU-2 against all others (Zhu et al. 2018); diversity is 1 - self-BLEU
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/json.hpp"

namespace weft::polychromic {

using AnswerIds = std::vector<std::uint32_t>;

/// distinct-n over all answers, n = 1, 2 or 3. NaN: no answer has n tokens.
double distinct(std::span<const AnswerIds> answers, int n);
/// Mean of distinct-n of each answer with at least n tokens.
double mean_distinct(std::span<const AnswerIds> answers, int n);
/// BLEU-2 of an answer with at least one token against at least one reference.
double bleu2(const AnswerIds& answer, std::span<const AnswerIds> references);
/// Self-BLEU of the answers; NaN with fewer than two answers with tokens.
double self_bleu(std::span<const AnswerIds> answers);

/// The metrics of one prompt.
struct TextDiversity {
  std::int64_t answers = 0;  ///< with the empty ones
  std::int64_t empty = 0;
  std::int64_t unique = 0;  ///< different answers that are not empty
  double mean_length = 0;   ///< tokens, of those that are not empty; NaN: none
  double distinct[3] = {};  ///< distinct-1, -2, -3 of the set
  double mean_distinct[3] = {};
  double self_bleu = 0;
};
TextDiversity text_diversity(std::span<const AnswerIds> answers);
/// Keys as the members; distinct_1 to distinct_3 and mean_distinct_1 to mean_distinct_3.
Json to_json(const TextDiversity&);

/// Distances of pairs on token ids: distinct-2 of the pair together, or 1 - the mean of both BLEU-2 of the pair.
enum class PairMetric { distinct, self_bleu };
/// Distances of pairs, [answers, answers], symmetric, diagonal 0. Rows of empty answers are 0 (for set_advantages they
/// are absent). A pair without bigrams has distance 0 if both are equal, else 1 (PairMetric::distinct).
std::vector<double> pair_distances(PairMetric, std::span<const AnswerIds> answers);

}  // namespace weft::polychromic
