// SPDX-License-Identifier: Apache-2.0
#include "polychromic/reward.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.hpp"
#include "base/text.hpp"
#include "language_model/tokenizer/lines.hpp"

namespace weft::polychromic {

using namespace language_model;
namespace {

using Scores = std::vector<std::vector<double>>;

/// score(prompt, number of the answer), which is called in order.
template <class Score>
Scores each_answer(std::span<const AnsweredPrompt> prompts, const Score& score) {
  Scores scores;
  for (const AnsweredPrompt& prompt : prompts) {
    scores.emplace_back();
    for (std::size_t i = 0; i < prompt.answers.size(); ++i) scores.back().push_back(score(prompt, i));
  }
  return scores;
}

class ConstantReward final : public Reward {
 public:
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    return each_answer(prompts, [](const AnsweredPrompt&, std::size_t) { return 1.0; });
  }
};

class LikelihoodReward final : public Reward {
 public:
  explicit LikelihoodReward(const std::vector<double>* log_probabilities) : log_probabilities_(log_probabilities) {}
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    std::size_t next = 0;
    return each_answer(prompts, [&](const AnsweredPrompt& prompt, std::size_t i) {
      return prompt.answer_ids.at(i).empty() ? (++next, 0.0) : std::exp(log_probabilities_->at(next++));
    });
  }

 private:
  const std::vector<double>* const log_probabilities_;
};

std::string_view trimmed(std::string_view text) {
  constexpr const char* kWhite = " \t\n\v\f\r";
  const std::size_t begin = text.find_first_not_of(kWhite);
  return begin == text.npos ? std::string_view() : text.substr(begin, text.find_last_not_of(kWhite) - begin + 1);
}

class ExactMatchReward final : public Reward {
 public:
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    return each_answer(prompts, [](const AnsweredPrompt& prompt, std::size_t i) {
      const std::string_view reference = trimmed(prompt.reference);
      if (reference.empty())
        throw error(ExitCode::data,
                    "prompt \"{}\" has no reference answer (exact match compares with it); add one, or use another "
                    "reward",
                    printable(prompt.id));
      return trimmed(prompt.answers[i]) == reference ? 1.0 : 0.0;
    });
  }
};

class RegexReward final : public Reward {
 public:
  explicit RegexReward(std::string_view pattern) : pattern_(pattern) {
    if (pattern.size() > kLongestPattern)
      throw error(ExitCode::usage, "the regular expression of the reward has {} bytes (at most {} are accepted)",
                  pattern.size(), kLongestPattern);
    int problem = 0;
    PCRE2_SIZE at = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C, &problem, &at,
                              nullptr));
    if (code_ == nullptr)
      throw error(ExitCode::usage,
                  "the regular expression \"{}\" of the reward cannot be compiled ({} at byte {}); correct it",
                  printable(pattern), message_of(problem), at);
    match_.reset(pcre2_match_data_create(1, nullptr));
    context_.reset(pcre2_match_context_create(nullptr));
    if (match_ == nullptr || context_ == nullptr) throw std::bad_alloc();
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), kHeapLimit);
  }

  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    return each_answer(prompts, [&](const AnsweredPrompt& prompt, std::size_t i) {
      const std::string& answer = prompt.answers[i];
      const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(answer.data()), answer.size(), 0, 0,
                                     match_.get(), context_.get());
      if (result < 0 && result != PCRE2_ERROR_NOMATCH)
        throw error(ExitCode::data,
                    "the regular expression \"{}\" of the reward fails on answer {} to prompt \"{}\" ({}); use a "
                    "pattern that backtracks less",
                    printable(pattern_), i + 1, printable(prompt.id), message_of(result));
      return result >= 0 ? 1.0 : 0.0;
    });
  }

 private:
  // Bounds of one match: backtracking steps, and memory in KiB.
  static constexpr std::uint32_t kMatchLimit = 1'000'000, kHeapLimit = 64 * 1024;
  static constexpr std::size_t kLongestPattern = 4096;

  static std::string message_of(int code) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }
  template <auto release>
  struct Release {
    template <class T>
    void operator()(T* object) const {
      release(object);
    }
  };

  const std::string pattern_;
  std::unique_ptr<pcre2_code, Release<pcre2_code_free>> code_;
  std::unique_ptr<pcre2_match_data, Release<pcre2_match_data_free>> match_;
  std::unique_ptr<pcre2_match_context, Release<pcre2_match_context_free>> context_;
};

class LengthReward final : public Reward {
 public:
  explicit LengthReward(std::int64_t wanted) : wanted_(static_cast<double>(wanted)) {}
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    return each_answer(prompts, [&](const AnsweredPrompt& prompt, std::size_t i) {
      return std::max(0.0, 1 - std::abs(static_cast<double>(prompt.answer_ids.at(i).size()) - wanted_) / wanted_);
    });
  }

 private:
  const double wanted_;
};

class SumReward final : public Reward {
 public:
  explicit SumReward(std::vector<WeightedReward> terms) : terms_(std::move(terms)) {}
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    Scores sums;
    for (const AnsweredPrompt& prompt : prompts) sums.emplace_back(prompt.answers.size());
    for (const WeightedReward& term : terms_) {
      const Scores scores = term.reward->scores(prompts);
      for (std::size_t p = 0; p < prompts.size(); ++p)
        for (std::size_t i = 0; i < sums[p].size(); ++i) sums[p][i] += term.weight * scores[p][i];
    }
    for (std::size_t p = 0; p < prompts.size(); ++p)
      for (const double sum : sums[p])
        if (!std::isfinite(sum))
          throw error(ExitCode::data,
                      "the rewards of answers to prompt \"{}\" have a sum that is not finite; take smaller weights",
                      printable(prompts[p].id));
    return sums;
  }

 private:
  const std::vector<WeightedReward> terms_;
};

class FileReward final : public Reward {
 public:
  explicit FileReward(const std::string& path) : path_(path) {
    each_line(
        text_of_file(path, "polychromic.reward_file"), path, [&](std::string_view line, const std::string& source) {
          const SortedJson object = object_of(line, source);
          const auto score = object.find("score");
          if (!object.contains("prompt") || score == object.end() || !score->is_number() ||
              !std::isfinite(score->get<double>()))
            throw error(
                ExitCode::data,
                "{}: needs a string \"prompt\" and a finite number \"score\" (and a string \"answer\"); correct the "
                "line",
                source);
          const std::string prompt = string_of(object, "prompt", source), answer = string_of(object, "answer", source);
          const bool added = object.contains("answer")
                                 ? scores_.try_emplace({prompt, answer}, score->get<double>()).second
                                 : others_.try_emplace(prompt, score->get<double>()).second;
          if (!added)
            throw error(ExitCode::data, "{}: a second score for the same prompt and answer; remove one", source);
        });
  }
  Scores scores(std::span<const AnsweredPrompt> prompts) override {
    return each_answer(prompts, [&](const AnsweredPrompt& prompt, std::size_t i) {
      for (const std::string* const name : {&prompt.id, &prompt.prompt})
        if (const auto found = scores_.find({*name, prompt.answers[i]}); found != scores_.end()) return found->second;
      for (const std::string* const name : {&prompt.id, &prompt.prompt})
        if (const auto found = others_.find(*name); found != others_.end()) return found->second;
      throw error(ExitCode::data,
                  "{}: has no score for the answer \"{}\" to prompt \"{}\"; add one, or a line without \"answer\" for "
                  "all other answers",
                  path_, printable(prompt.answers[i], 60), printable(prompt.id, 60));
    });
  }

 private:
  const std::string path_;
  std::map<std::pair<std::string, std::string>, double> scores_;
  std::map<std::string, double> others_;  // of answers without a line of their own
};

}  // namespace

std::unique_ptr<Reward> constant_reward() { return std::make_unique<ConstantReward>(); }
std::unique_ptr<Reward> likelihood_reward(const std::vector<double>* log_probabilities) {
  return std::make_unique<LikelihoodReward>(log_probabilities);
}
std::unique_ptr<Reward> exact_match_reward() { return std::make_unique<ExactMatchReward>(); }
std::unique_ptr<Reward> regex_reward(std::string_view pattern) { return std::make_unique<RegexReward>(pattern); }
std::unique_ptr<Reward> length_reward(std::int64_t wanted) { return std::make_unique<LengthReward>(wanted); }
std::unique_ptr<Reward> sum_reward(std::vector<WeightedReward> terms) {
  return std::make_unique<SumReward>(std::move(terms));
}
std::unique_ptr<Reward> file_reward(const std::string& path) { return std::make_unique<FileReward>(path); }

}  // namespace weft::polychromic
