// SPDX-License-Identifier: Apache-2.0
//
// Text that a language model writes, token by token, for a batch of prompts with several samples each.
//
// The keys and values of all rows that were computed are kept. A prompt is computed once, all its tokens but the last,
// by the forward pass of training; its samples read the same rows of the cache. Then each step computes one row per
// sequence, draws its next token and appends. Sequences that have ended make place for the next ones.
//
// A model may have more ids than its tokeniser has tokens: these are not drawn, and probabilities are those among the
// others.
//
// A text that reaches the context goes on with the last half of the context as its prompt.
//
// What a sample becomes does not depend on the other samples: its random numbers depend on (seed, step, prompt, sample,
// position), sums on the sequence, and the shapes of products are the same in every step and for prompts of similar
// length (up to the same power of two, or from 256 on quarter of one), since every step computes `rows` rows, used or
// not. With another number of rows products may round differently, but not in fp32 with as_trained.
//
// On a GPU the steps are one captured graph, and so are the prompts of a length; the host reads the tokens of
// kStepsBetweenChecks steps while the GPU computes the next ones. A sequence that ends on the host, at a text of
// --stop, is therefore computed for up to twice as many steps more.
//
// Where a model is divided over ranks, each rank has the cache of its heads. The ranks gather the logits of a step, and
// each draws the same tokens from the same bits: what follows is decided alike, without a message.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/stream.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/sample/sample.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::language_model {

/// Rows of a forward pass over several prompts on a GPU: more rows are not faster (GPT-2 124M on one H200,
/// docs/experiments_log.md).
constexpr std::int64_t kDevicePrefillRows = 12288;

struct GenerationSettings {
  Architecture architecture;                     ///< of the part of this rank (part_of)
  kernels::Scalar type = kernels::Scalar::fp32;  ///< of the activations
  std::int64_t rows = 1;                         ///< sequences that are computed together
  std::int64_t prompts = 1;                      ///< different prompts
  std::int64_t vocabulary = 0;                   ///< ids that may be drawn, those below it; 0: all of the model
  std::int64_t longest_prompt = 1;               ///< in tokens, at most context()
  std::int64_t new_tokens = 1;                   ///< of each sample, at most
  std::int64_t prefill_rows = 0;                 ///< most of a forward pass over several prompts; 0: one prompt each
  double temperature = 1;                        ///< 0: always the most probable token
  std::int64_t top_k = 0;                        ///< 0: all
  double top_p = 1;
  /// In fp32 Drawn::log_drawn has the bits of the loss of the token in a forward pass with Tokens::by_row, on one rank
  /// of a model. Without top_k.
  bool as_trained = false;
  bool graphs = true;

  bool scores_draws() const { return as_trained && type == kernels::Scalar::fp32; }

  std::int64_t drawable() const { return vocabulary == 0 ? architecture.whole_vocabulary() : vocabulary; }
  /// Length of the longest sequence of the model.
  std::int64_t context() const { return architecture.positions; }
  /// Bytes of the logits of a step that a rank of a divided model gives to the others.
  std::int64_t gathered_bytes() const {
    return rows * aligned_columns(architecture.largest_vocabulary()) * kernels::bytes_of(type);
  }
  /// Rows of the largest forward pass; the Transformer must take at least as many.
  std::int64_t most_rows() const;
};

/// Settings of the samples that a run prints (log.sample_tokens), on a rank of a grid.
GenerationSettings sample_settings(const Configuration&, const Architecture&, const parallel::GridShape&,
                                   std::int64_t rank);

/// Why text of this model cannot be generated, in contexts of `positions` tokens; "": it can.
std::string generation_obstacle(const ModelSettings&, std::int64_t positions);

struct GenerationRequest {
  std::span<const std::uint32_t> prompt;  ///< at least one token, at most longest_prompt
  std::uint32_t number = 0;               ///< of the prompt: equal numbers mean equal prompts; below 2^20
  std::uint32_t sample = 0;               ///< below 2^20
};

class Generator {
 public:
  static constexpr std::int64_t kStepsBetweenChecks = 8;

  struct Buffers {
    Buffers(const GenerationSettings&, model::StepArena&);
    std::vector<kernels::AnyMatrix> keys, values;  ///< by layer: [cache rows, H_kv d], prefixes first
    /// State of the sequences, where the kernels run and on the host.
    struct State {
      kernels::Array<kernels::CachedSequence> sequences;
      kernels::Array<kernels::SampleStream> streams;
      kernels::Array<std::int32_t> positions;
      kernels::Array<std::uint32_t> ids;
    };
    State device, host;
    kernels::Matrix<kernels::Drawn> drawn;                      ///< [rows, most new positions]
    std::array<kernels::Matrix<kernels::Drawn>, 2> host_drawn;  ///< one is read while the other is written
    kernels::Matrix<kernels::BlockSum> sums;                    ///< [rows, draw_blocks(vocabulary)]
    kernels::Array<std::int32_t> drawn_positions;               ///< of scores_draws(): where tokens were drawn
    kernels::Array<float> losses;                               ///< of scores_draws()
    kernels::AnyMatrix logits;                                  ///< [rows, whole vocabulary], of a divided model
    /// A forward pass over prompts.
    struct Prefill {
      kernels::Array<std::uint32_t> ids;
      kernels::Array<std::int32_t> positions;
      kernels::Array<std::int64_t> rows;  ///< of the cache; -1: none
    };
    Prefill prefill, host_prefill;
  };

  /// The Transformer takes most_rows() rows, and `rows` rows of logits at a time. It is used during `run` only. All
  /// references must outlive the object.
  Generator(const GenerationSettings&, Transformer&, const kernels::Execution&, run::Timers&, model::StepArena&);

  /// Function that is called for each token of a request, in order; returns false to end the request.
  using Receive = std::function<bool(std::size_t request, const kernels::Drawn&)>;

  /// Writes at most new_tokens tokens for each request. seed, step: key of the random numbers. Throws Error(numeric) if
  /// logits are not finite.
  void run(std::span<const GenerationRequest>, std::uint64_t seed, std::uint64_t step, const Receive&);

  /// Sets whether steps are captured in graphs. false: later steps run eagerly, so that their phases can be timed.
  void capture(bool capture) { captures_ = capture && capturable_; }

 private:
  struct Row {
    bool running = false;
    std::size_t request = 0;
    std::vector<std::uint32_t> text;  // the prompt, and what was written
    std::int64_t origin = 0;          // index in `text` of the sequence's position 0
    std::int64_t prefix = 0;          // positions that were computed together
    std::int64_t region = -1;         // of the prefix; -1: no prefix
    /// Position of the last token of `text`, which the next step computes.
    std::int64_t position() const { return std::ssize(text) - origin - 1; }
  };
  /// Place of a prefix in the cache.
  struct Region {
    std::int64_t prompt = -1;  // number of the prompt; -1: none
    std::int64_t users = 0;
  };
  /// Work that is submitted many times, as a captured graph.
  struct Recorded {
    bool prepared = false;  // has run
    std::optional<device::Graph> graph;
  };
  struct Continued {
    std::size_t request;
    std::vector<std::uint32_t> text;
  };

  std::int64_t left(const Row&) const;  // tokens still to be written
  void assign();
  bool find_region(Row&);
  void prefill(std::vector<std::size_t> rows);
  void prefill_batch(std::span<const std::size_t> rows, std::int64_t length);
  std::int64_t next_steps(std::int64_t pending) const;
  void enqueue(std::int64_t steps);
  void compute_prefixes(std::int64_t sequences, std::int64_t length);
  void compute();
  void score(const kernels::SampleRule&, const kernels::AnyMatrix& logits, const kernels::GrowingSequences&);
  void replay(Recorded&, const std::function<void()>& work);
  void send();
  void receive(std::int64_t steps, const Receive&);

  const GenerationSettings settings_;
  Transformer& transformer_;
  const kernels::Execution execution_;
  run::Timers& timers_;
  const Buffers buffers_;
  kernels::CachedAttention attention_;
  std::span<const GenerationRequest> requests_;  // of `run`, with what follows
  std::uint64_t seed_ = 0, step_ = 0;
  std::vector<Row> rows_;
  std::vector<Region> regions_;
  std::deque<Continued> continued_;
  std::size_t next_ = 0;
  std::size_t enqueued_ = 0, received_ = 0;  // groups of steps
  std::array<device::Event, 2> copied_;      // of Buffers::host_drawn
  bool changed_ = true;                      // the state on the host, since it was sent
  const bool capturable_;
  bool captures_;
  Recorded step_work_;
  std::map<std::int64_t, Recorded> prefill_work_;  // by length
};

}  // namespace weft::language_model
