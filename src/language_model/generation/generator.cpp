// SPDX-License-Identifier: Apache-2.0
#include "language_model/generation/generator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.hpp"
#include "base/progress.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "language_model/blocks/attention_sublayer.hpp"

namespace weft::language_model {
namespace {

using kernels::AnyMatrix;

/// Bits of a sample's key below the number of its prompt, and of a position below that.
constexpr int kPromptShift = 44, kSampleShift = 24;

/// Rows of a prefix with padding: a power of two, and from 256 on a multiple of a quarter of the one below. Products
/// then have few shapes.
std::int64_t padded_length(std::int64_t prefix) {
  const auto length = static_cast<std::uint64_t>(prefix);
  if (length <= 256) return static_cast<std::int64_t>(std::bit_ceil(length));
  const std::uint64_t quarter = std::bit_floor(length) / 4;
  return static_cast<std::int64_t>((length + quarter - 1) / quarter * quarter);
}

/// Number of tokens with which a text continues after it has reached the context.
std::int64_t carried(const GenerationSettings& settings) { return std::max<std::int64_t>(1, settings.context() / 2); }
bool continues(const GenerationSettings& settings) {
  return settings.longest_prompt - 1 + settings.new_tokens > settings.context();
}
std::int64_t longest_prefix(const GenerationSettings& settings) {
  return std::max(settings.longest_prompt, continues(settings) ? carried(settings) : 1) - 1;
}
std::int64_t n_regions(const GenerationSettings& settings) {
  if (longest_prefix(settings) == 0) return 0;
  return continues(settings) ? settings.rows : std::min(settings.rows, settings.prompts);
}
/// Positions of a sequence after its prefix.
std::int64_t own_positions(const GenerationSettings& settings) {
  return std::min(settings.new_tokens, settings.context());
}
/// Sequences of a forward pass over prefixes of `length` rows: at most one per row of a step, and so many that passes
/// over one prefix per row are of one size.
std::int64_t prefill_sequences(const GenerationSettings& settings, std::int64_t length) {
  const std::int64_t most = std::clamp<std::int64_t>(settings.prefill_rows / length, 1, settings.rows),
                     passes = (settings.rows + most - 1) / most;
  return (settings.rows + passes - 1) / passes;
}
std::int64_t most_prefill_rows(const GenerationSettings& settings) {
  const std::int64_t prefix = longest_prefix(settings), length = prefix == 0 ? 0 : padded_length(prefix);
  return std::max(length, std::min(settings.prefill_rows, settings.rows * length));
}

kernels::CachedAttention cached_attention_shape(const GenerationSettings& settings) {
  const kernels::Attention attention =
      attention_shape(settings.architecture.model, settings.rows, 1, kernels::AttentionImplementation::own);
  return {.heads = attention.heads,
          .kv_heads = attention.kv_heads,
          .head_size = attention.head_size,
          .scale = attention.scale,
          .softcap = attention.softcap,
          .window = attention.window,
          .longest = std::min(settings.context(), longest_prefix(settings) + own_positions(settings)),
          .sequences = {nullptr, settings.rows},
          .positions = {nullptr, settings.rows}};
}

}  // namespace

std::int64_t GenerationSettings::most_rows() const { return std::max(rows, most_prefill_rows(*this)); }

GenerationSettings sample_settings(const Configuration& configuration, const Architecture& architecture,
                                   const parallel::GridShape& grid, std::int64_t rank) {
  return {.architecture = part_of(architecture, grid, rank),
          .type = activation_type(configuration),
          .new_tokens = configuration.sample.tokens,
          .temperature = configuration.sample.temperature,
          .graphs = configuration.device.graphs};
}

std::string generation_obstacle(const ModelSettings& model, std::int64_t positions) {
  if (model.rope_scaling.depends_on_length() && positions > model.rope_scaling.length)
    return fmt::format(
        "the wavelengths of language_model.rope_method follow the length of the text, which grows beyond rope_length = "
        "{}; take data.sequence = {} or less",
        model.rope_scaling.length, model.rope_scaling.length);
  return model.sparse_blocks == 0 ? ""
                                  : "language_model.sparse_blocks chooses keys for blocks of queries, which do not "
                                    "exist yet while a text is written";
}

Generator::Buffers::Buffers(const GenerationSettings& settings, model::StepArena& arena) {
  const std::int64_t columns = settings.architecture.key_width(), own = own_positions(settings),
                     cached = n_regions(settings) * longest_prefix(settings) + settings.rows * own;
  arena.purpose("cache of keys and values");
  const auto take = [&] { return arena.take_matrix(settings.type, cached, columns); };
  for (std::int64_t layer = 0; layer < settings.architecture.model.layers; ++layer) {
    keys.push_back(take());
    values.push_back(take());
  }
  arena.purpose("generation");
  device = {arena.take<kernels::CachedSequence>(settings.rows), arena.take<kernels::SampleStream>(settings.rows),
            arena.take<std::int32_t>(settings.rows), arena.take<std::uint32_t>(settings.rows)};
  host = {arena.take_host<kernels::CachedSequence>(settings.rows),
          arena.take_host<kernels::SampleStream>(settings.rows), arena.take_host<std::int32_t>(settings.rows),
          arena.take_host<std::uint32_t>(settings.rows)};
  drawn = {arena.take<kernels::Drawn>(settings.rows * own).data, settings.rows, own, own};
  for (kernels::Matrix<kernels::Drawn>& copy : host_drawn)
    copy = {arena.take_host<kernels::Drawn>(settings.rows * own).data, settings.rows, own, own};
  const std::int64_t vocabulary = settings.architecture.whole_vocabulary(), blocks = kernels::draw_blocks(vocabulary);
  if (settings.architecture.tensor_ranks > 1)
    logits = arena.take_matrix(settings.type, settings.rows, aligned_columns(vocabulary)).columns_from(0, vocabulary);
  sums = {arena.take<kernels::BlockSum>(settings.rows * blocks).data, settings.rows, blocks, blocks};
  drawn_positions = arena.take<std::int32_t>(settings.scores_draws() ? settings.rows : 0);
  losses = arena.take<float>(settings.scores_draws() ? settings.rows : 0);
  const std::int64_t rows = most_prefill_rows(settings);
  prefill = {arena.take<std::uint32_t>(rows), arena.take<std::int32_t>(rows), arena.take<std::int64_t>(rows)};
  host_prefill = {arena.take_host<std::uint32_t>(rows), arena.take_host<std::int32_t>(rows),
                  arena.take_host<std::int64_t>(rows)};
}

Generator::Generator(const GenerationSettings& settings, Transformer& transformer, const kernels::Execution& execution,
                     run::Timers& timers, model::StepArena& arena)
    : settings_(settings),
      transformer_(transformer),
      execution_(execution),
      timers_(timers),
      buffers_(settings, arena),
      attention_(cached_attention_shape(settings)),
      rows_(static_cast<std::size_t>(settings.rows)),
      regions_(static_cast<std::size_t>(n_regions(settings))),
      capturable_(settings.graphs && transformer.leaves_the_host_free() && device::Graph::possible(execution)),
      captures_(capturable_) {
  if (const std::string why = generation_obstacle(settings.architecture.model, settings.context()); !why.empty())
    throw collective_error(ExitCode::usage, "text of this model cannot be generated ({})", why);
  // Kernels may read columns beyond the vocabulary, which are never written.
  if (const AnyMatrix& all = buffers_.logits; all.data != nullptr)
    device::zero(execution, all.data, all.rows * all.stride * kernels::bytes_of(all.type));
  attention_.sequences = buffers_.device.sequences;
  attention_.positions = buffers_.device.positions;
  for (std::int64_t row = 0; row < settings.rows; ++row) {
    buffers_.host.sequences[row] = {};
    buffers_.host.streams[row] = {};
    buffers_.host.positions[row] = 0;
    buffers_.host.ids[row] = 0;
  }
}

void Generator::run(std::span<const GenerationRequest> requests, std::uint64_t seed, std::uint64_t step,
                    const Receive& receive) {
  struct HookEnd {
    Transformer& transformer;
    ~HookEnd() { transformer.hook_attention({}); }
  } const hook_end{transformer_};
  requests_ = requests;
  seed_ = seed;
  step_ = step;
  rows_.assign(rows_.size(), {});
  regions_.assign(regions_.size(), {});  // the parameters may have changed
  continued_.clear();
  next_ = 0;
  changed_ = true;
  enqueued_ = received_ = 0;
  transformer_.complete_weights();
  try {
    // While the host looks at the tokens of some steps, the GPU computes the next ones.
    for (std::int64_t pending = 0;;) {
      note_progress();
      if (pending == 0) assign();
      const std::int64_t steps = next_steps(pending);
      if (steps > 0) enqueue(steps);
      if (pending > 0) this->receive(pending, receive);
      if (pending == 0 && steps == 0) break;
      pending = steps;
    }
  } catch (...) {
    kernels::fence(execution_);
    throw;
  }
  timers_.stop();
}

/// Number of steps that may follow `pending` ones whose tokens the host has not seen. 0: none are left, or a row ends
/// before them and makes place for another.
std::int64_t Generator::next_steps(std::int64_t pending) const {
  const bool ahead = pending > 0, asynchronous = device::is_asynchronous(execution_);
  if (ahead && (changed_ || !asynchronous)) return 0;
  std::int64_t steps = 0, before_context = settings_.context();
  for (const Row& row : rows_) {
    if (!row.running) continue;
    const std::int64_t room = settings_.context() - row.position() - pending, wanted = left(row) - pending;
    if (ahead && std::min(room, wanted) <= 0) return 0;
    steps = std::max(steps, std::min(wanted, room));
    before_context = std::min(before_context, room);
  }
  // A row that reaches the context stays at that position while others go on: tables of positions do not have it.
  return std::min({steps, before_context, asynchronous ? kStepsBetweenChecks : 1});
}

void Generator::enqueue(std::int64_t steps) {
  if (changed_) send();
  for (std::int64_t i = 0; i < steps; ++i) replay(step_work_, [this] { compute(); });
  const kernels::Matrix<kernels::Drawn>& to = buffers_.host_drawn[enqueued_ % 2];
  device::copy(execution_, to.data, buffers_.drawn.data,
               to.rows * to.columns * static_cast<std::int64_t>(sizeof(kernels::Drawn)), device::Direction::to_host);
  copied_[enqueued_ % 2].record(execution_);
  ++enqueued_;
}

std::int64_t Generator::left(const Row& row) const {
  return settings_.new_tokens - (std::ssize(row.text) - std::ssize(requests_[row.request].prompt));
}

/// Gives rows without a text the next ones, and computes the prefixes that are not in the cache.
void Generator::assign() {
  std::vector<std::size_t> to_compute;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    if (row.running) continue;
    if (!continued_.empty()) {
      row.request = continued_.front().request;
      row.text = std::move(continued_.front().text);
      row.origin = std::ssize(row.text) - carried(settings_);
      continued_.pop_front();
    } else if (next_ < requests_.size()) {
      row.request = next_++;
      row.text.assign(requests_[row.request].prompt.begin(), requests_[row.request].prompt.end());
      row.origin = 0;
    } else {
      continue;
    }
    row.running = true;
    changed_ = true;
    row.prefix = row.position();
    if (row.prefix > 0 && !find_region(row)) to_compute.push_back(i);
  }
  prefill(std::move(to_compute));
}

/// Finds the region of the row's prefix. True if the prefix is in the cache.
bool Generator::find_region(Row& row) {
  const std::int64_t prompt = row.origin == 0 ? std::int64_t{requests_[row.request].number} : -1;
  auto found = regions_.end();
  if (prompt >= 0)
    found = std::find_if(regions_.begin(), regions_.end(), [&](const Region& one) { return one.prompt == prompt; });
  const bool present = found != regions_.end();
  if (!present)
    found = std::find_if(regions_.begin(), regions_.end(), [](const Region& one) { return one.users == 0; });
  found->prompt = prompt;
  ++found->users;
  row.region = found - regions_.begin();
  return present;
}

/// Computes the prefixes of these rows: those of similar length together, in forward passes of one shape per length.
void Generator::prefill(std::vector<std::size_t> rows) {
  const auto length = [&](std::size_t row) { return padded_length(rows_[row].prefix); };
  std::stable_sort(rows.begin(), rows.end(), [&](std::size_t a, std::size_t b) { return length(a) < length(b); });
  for (auto begin = rows.begin(); begin != rows.end();) {
    const std::int64_t common = length(*begin);
    auto end = begin;
    while (end != rows.end() && length(*end) == common && end - begin < prefill_sequences(settings_, common)) ++end;
    prefill_batch({begin, end}, common);
    begin = end;
  }
}

/// Computes at most prefill_sequences(length) prefixes, each padded to `length` rows: a row reads no rows after it.
void Generator::prefill_batch(std::span<const std::size_t> rows, std::int64_t length) {
  const std::int64_t sequences = prefill_sequences(settings_, length);
  const Buffers::Prefill &host = buffers_.host_prefill, &device = buffers_.prefill;
  for (std::int64_t i = 0; i < sequences * length; ++i) {
    const std::int64_t position = i % length;
    const Row* const row = i / length < std::ssize(rows) ? &rows_[rows[static_cast<std::size_t>(i / length)]] : nullptr;
    const bool used = row != nullptr && position < row->prefix;
    host.ids[i] = used ? row->text[static_cast<std::size_t>(row->origin + position)] : 0;
    host.positions[i] = static_cast<std::int32_t>(std::min(position, settings_.context() - 1));
    host.rows[i] = used ? row->region * longest_prefix(settings_) + position : -1;
  }
  const auto copy = [&]<class T>(kernels::Array<T> to, kernels::Array<T> from) {
    device::copy(execution_, to.data, from.data, sequences * length * static_cast<std::int64_t>(sizeof(T)),
                 device::Direction::to_device);
  };
  copy(device.ids, host.ids);
  copy(device.positions, host.positions);
  copy(device.rows, host.rows);
  replay(prefill_work_[length], [&] { compute_prefixes(sequences, length); });
  kernels::fence(execution_);  // host memory may be filled again
}

void Generator::compute_prefixes(std::int64_t sequences, std::int64_t length) {
  const Buffers::Prefill& device = buffers_.prefill;
  const std::int64_t queries = settings_.architecture.query_width(), keys = settings_.architecture.key_width();
  transformer_.hook_attention([&](std::int64_t layer, const AnyMatrix& packed, const AnyMatrix&) {
    const auto at = static_cast<std::size_t>(layer);
    const kernels::Array<const std::int64_t> to{device.rows.data, packed.rows};
    kernels::store_rows(execution_, packed.columns_from(queries, keys), to, buffers_.keys[at]);
    kernels::store_rows(execution_, packed.columns_from(queries + keys, keys), to, buffers_.values[at]);
    return at + 1 == buffers_.keys.size();  // no output is needed of the last layer
  });
  const Tokens tokens{.sequences = sequences,
                      .length = length,
                      .ids = {device.ids.data, sequences * length},
                      .targets = {},
                      .positions = {device.positions.data, sequences * length},
                      .first_key = {},
                      .by_row = settings_.as_trained};
  transformer_.forward(tokens, nullptr, Transformer::Until::last_keys);
}

/// Computes one step: the model on the last token of each sequence, and the draw of the next one.
void Generator::compute() {
  const std::int64_t queries = settings_.architecture.query_width(), keys = settings_.architecture.key_width();
  const auto attention = [&](std::int64_t layer) {
    kernels::CachedAttention shape = attention_;
    shape.window = settings_.architecture.model.window_of(layer);
    return shape;
  };
  transformer_.hook_attention([&](std::int64_t layer, const AnyMatrix& packed, const AnyMatrix& mixed) {
    const auto at = static_cast<std::size_t>(layer);
    kernels::cached_attention(execution_, attention(layer), packed.columns_from(0, queries),
                              packed.columns_from(queries, keys), packed.columns_from(queries + keys, keys),
                              buffers_.keys[at], buffers_.values[at], mixed);
    return true;
  });
  const Buffers::State& state = buffers_.device;
  const Tokens tokens{.sequences = settings_.rows,
                      .length = 1,
                      .ids = state.ids,
                      .targets = {},
                      .positions = state.positions,
                      .first_key = {},
                      .by_row = settings_.as_trained};
  transformer_.forward(tokens, nullptr);
  const AnyMatrix logits = transformer_.all_logits(tokens, buffers_.logits);
  timers_.phase("sampling");
  const std::int64_t blocks = kernels::draw_blocks(settings_.drawable());
  const kernels::SampleRule rule{.vocabulary = settings_.drawable(),
                                 .softcap = static_cast<float>(settings_.architecture.model.logit_softcap),
                                 .temperature = static_cast<float>(settings_.temperature),
                                 .top_k = settings_.top_k,
                                 .top_p = settings_.top_p};
  const kernels::GrowingSequences sequences{state.sequences, state.streams, state.positions, state.ids, buffers_.drawn};
  if (settings_.scores_draws())
    device::copy(execution_, buffers_.drawn_positions.data, state.positions.data,
                 settings_.rows * std::int64_t{sizeof(std::int32_t)}, device::Direction::on_device);
  kernels::sample(execution_, rule, logits, {buffers_.sums.data, settings_.rows, blocks, blocks}, sequences);
  if (settings_.scores_draws()) score(rule, logits, sequences);
}

/// Forms log_drawn of the tokens of a step as the loss of training does: by its kernels, from the same logits.
void Generator::score(const kernels::SampleRule& rule, const AnyMatrix& logits,
                      const kernels::GrowingSequences& sequences) {
  const kernels::Array<const std::int32_t> drawn{reinterpret_cast<const std::int32_t*>(sequences.ids.data),
                                                 settings_.rows};
  kernels::keep_probable(execution_, rule, logits, drawn);
  kernels::cross_entropy(execution_,
                         {.vocabulary = rule.vocabulary, .softcap = rule.softcap, .temperature = rule.temperature},
                         logits, drawn, buffers_.losses, false);
  kernels::note_losses(execution_, sequences, buffers_.drawn_positions, buffers_.losses);
}

/// Submits work. The first time it runs eagerly, since libraries may allocate; the second time it is captured in a
/// graph.
void Generator::replay(Recorded& recorded, const std::function<void()>& work) {
  if (!recorded.prepared || !captures_) {
    recorded.prepared = true;
    return work();
  }
  if (!recorded.graph) recorded.graph.emplace().capture(execution_, work);
  recorded.graph->replay(execution_);
}

/// Sends the present state of all sequences to the device.
void Generator::send() {
  changed_ = false;
  const Buffers::State &host = buffers_.host, &device = buffers_.device;
  const std::int64_t prefix = longest_prefix(settings_), own = own_positions(settings_);
  for (std::int64_t i = 0; i < settings_.rows; ++i) {
    const Row& row = rows_[static_cast<std::size_t>(i)];
    host.sequences[i] = {};
    host.positions[i] = 0;
    if (!row.running) continue;
    const GenerationRequest& request = requests_[row.request];
    host.sequences[i] = {.prefix_begin = row.region * prefix,
                         .own_begin = std::ssize(regions_) * prefix + i * own,
                         .prefix = static_cast<std::int32_t>(row.prefix),
                         .end = static_cast<std::int32_t>(std::min(settings_.context(), row.position() + left(row)))};
    host.streams[i] = {.seed = seed_,
                       .step = step_,
                       .index = (std::uint64_t{request.number} << kPromptShift) +
                                (std::uint64_t{request.sample} << kSampleShift) +
                                static_cast<std::uint64_t>(row.origin)};
    host.positions[i] = static_cast<std::int32_t>(row.position());
    host.ids[i] = row.text.back();
  }
  const auto copy = [&]<class T>(kernels::Array<T> to, kernels::Array<T> from) {
    device::copy(execution_, to.data, from.data, from.size * static_cast<std::int64_t>(sizeof(T)),
                 device::Direction::to_device);
  };
  copy(device.sequences, host.sequences);
  copy(device.streams, host.streams);
  copy(device.positions, host.positions);
  copy(device.ids, host.ids);
}

/// Receives the tokens of the first `steps` enqueued steps that have not been received.
void Generator::receive(std::int64_t steps, const Receive& receive) {
  const kernels::Matrix<kernels::Drawn>& drawn = buffers_.host_drawn[received_ % 2];
  copied_[received_ % 2].wait();
  ++received_;
  for (std::int64_t i = 0; i < settings_.rows; ++i) {
    Row& row = rows_[static_cast<std::size_t>(i)];
    if (!row.running) continue;
    const std::int64_t first = row.position(), end = std::min({first + steps, first + left(row), settings_.context()});
    bool wanted = true;
    for (std::int64_t position = first; position < end && wanted; ++position) {
      const kernels::Drawn& one = drawn(i, position - row.prefix);
      if (!std::isfinite(one.log_probability))
        throw error(ExitCode::numeric,
                    "the logits of prompt {}, sample {} are not finite (the model has parameters that are not, or too "
                    "large)",
                    requests_[row.request].number + 1, requests_[row.request].sample + 1);
      row.text.push_back(one.token);
      wanted = receive(row.request, one);
    }
    const bool over = !wanted || left(row) == 0;
    if (!over && row.position() < settings_.context()) continue;
    if (row.region >= 0) --regions_[static_cast<std::size_t>(row.region)].users;
    if (!over) continued_.push_back({row.request, std::move(row.text)});
    row = {};
    changed_ = true;
  }
}

}  // namespace weft::language_model
