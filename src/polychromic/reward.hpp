// SPDX-License-Identifier: Apache-2.0
//
// Scores of answers:
//
//   constant      1
//   likelihood    exp(mean over the tokens of the answer of log p(token | prompt, tokens before)) under a frozen model:
//                 the geometric mean of the probabilities, in (0, 1]; an empty answer has 0
//   reference_likelihood
//                 the same mean over the tokens of the reference, given prompt and answer
//   exact         1 if the answer is the reference answer, without white space at both ends; else 0
//   regex         1 if a regular expression (PCRE2, UTF-8) matches anywhere in the answer, else 0
//   length        1 - |tokens - wanted| / wanted, at least 0
//   file          from JSON lines {"prompt": ID or TEXT, "answer": TEXT, "score": NUMBER}; without "answer": of answers
//                 that have no line of their own
//   command       of a program that reads JSON lines and writes one per line
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace weft::polychromic {

/// A prompt with its answers.
struct AnsweredPrompt {
  std::string id;  ///< unique
  std::string prompt;
  std::string reference;  ///< answer that is right; "": none is known
  std::vector<std::string> answers;
  std::vector<std::vector<std::uint32_t>> answer_ids;  ///< [answers]
};

class Reward {
 public:
  virtual ~Reward() = default;
  /// Scores, finite: [prompts][answers]. Throws Error(data), Error(io) or Error(numeric) with prompt and answer.
  virtual std::vector<std::vector<double>> scores(std::span<const AnsweredPrompt>) = 0;
};

std::unique_ptr<Reward> constant_reward();

/// log_probabilities: of each answer that is scored, prompts one after the other, the mean in nats per token
/// (Embedder). Read in `scores`; must outlive the object.
std::unique_ptr<Reward> likelihood_reward(const std::vector<double>* log_probabilities);

/// Throws Error(data) for a prompt without a reference answer.
std::unique_ptr<Reward> exact_match_reward();

/// Throws Error(usage) for a pattern that cannot be compiled.
std::unique_ptr<Reward> regex_reward(std::string_view pattern);

/// wanted: tokens of an answer, more than 0.
std::unique_ptr<Reward> length_reward(std::int64_t wanted);

struct WeightedReward {
  std::unique_ptr<Reward> reward;
  double weight = 1;
};
/// The sum of several rewards, each times its weight. Throws Error(data) if a sum is not finite.
std::unique_ptr<Reward> sum_reward(std::vector<WeightedReward>);

/// Reads the file. Throws Error(usage) if it does not exist, Error(data) with file and line.
std::unique_ptr<Reward> file_reward(const std::string& path);

/// `command` is started by /bin/sh at the first batch, in a process group of its own, and ended with this object. It
/// receives {"id", "prompt", "reference", "answers": [TEXT]} per line and prompt, and writes {"scores": [NUMBER]} per
/// line in this order, optionally with the "id", which is then compared. It may buffer a batch, since the next is
/// written after all scores were read; it must flush. time_limit: seconds for a batch.
std::unique_ptr<Reward> command_reward(std::string command, double time_limit);

}  // namespace weft::polychromic
