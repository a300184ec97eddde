// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/attribution.hpp"

#include <array>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "kernels/convert/affine.hpp"
#include "language_model/attribution/graph_files.hpp"
#include "language_model/intervention/intervention.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/language_model/variants.hpp"

using namespace weft;
using namespace weft::testing;

namespace {

using kernels::AnyMatrix;
using kernels::Scalar;

std::vector<float> values_of(const AnyMatrix& matrix) {
  std::vector<float> values;
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    const std::vector<float> of_row = to_host(matrix.rows_from(row, 1).data, matrix.columns);
    values.insert(values.end(), of_row.begin(), of_row.end());
  }
  return values;
}

/// Random numbers where the kernels run, and on the host.
struct Values {
  Values(std::int64_t rows, std::int64_t columns, std::uint64_t stream, double scale = 1)
      : host(static_cast<std::size_t>(rows * columns)), memory(rows * columns), rows(rows), columns(columns) {
    for (std::size_t i = 0; i < host.size(); ++i)
      host[i] = static_cast<float>(scale * random_normal(stream, static_cast<std::int64_t>(i)));
    upload();
  }
  void upload() {
    device::copy(execution(), memory.data(), host.data(), memory.bytes(), device::Direction::to_device);
    kernels::fence(execution());
  }
  AnyMatrix matrix() const { return {memory.data(), Scalar::fp32, rows, columns, columns}; }
  const float* row(std::int64_t i) const { return host.data() + i * columns; }

  std::vector<float> host;
  device::Buffer<float> memory;
  std::int64_t rows, columns;
};

struct Sum {
  double value = 0, magnitude = 0;
  void add(const float* a, const float* b, std::int64_t n, double factor = 1) {
    for (std::int64_t i = 0; i < n; ++i) {
      value += factor * static_cast<double>(a[i]) * static_cast<double>(b[i]);
      magnitude += std::abs(factor * static_cast<double>(a[i]) * static_cast<double>(b[i]));
    }
  }
};

/// A model without constants: its residual stream is linear in embeddings and outputs of MLPs.
struct Frozen {
  explicit Frozen(const Architecture& architecture)
      : settings(freezing_settings(Configuration{}, architecture, kLength)),
        model(settings, 1, kLength),
        grid(world(), single_process()),
        arena(execution(), grid),
        text(architecture.model, kLength, model.transformer(), execution(), arena) {
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
      const std::string& name = model.parameters().specs()[i].name;
      if (name.ends_with("/bias") || name == "embedding/positions")
        model.set(i, std::vector<float>(model.get(i).size(), 0.0f));
    }
    model.transformer().prepare_weights();
    text.freeze(model.tokens());
    inputs = values_of(text.mlp_inputs());
    outputs = values_of(text.mlp_outputs());
    hidden = values_of(model.transformer().hidden_states(model.tokens()));
    ids.resize(kLength);
    device::copy(execution(), ids.data(), model.tokens().ids.data, 4 * kLength, device::Direction::to_host);
    kernels::fence(execution());
    const std::vector<float> table = model.get(model.model().layers().token_table());
    for (const std::uint32_t id : ids)
      for (std::int64_t i = 0; i < width(); ++i)
        embeddings.push_back(static_cast<float>(architecture.model.embedding_scale) *
                             table[static_cast<std::size_t>(id * width() + i)]);
  }
  std::int64_t width() const { return text.model().d_model; }
  std::int64_t layers() const { return text.model().layers; }
  const float* input(std::int64_t token, std::int64_t block) const {
    return block == layers() ? hidden.data() + token * width() : inputs.data() + (token * layers() + block) * width();
  }
  const float* output(std::int64_t token, std::int64_t block) const {
    return outputs.data() + (token * layers() + block) * width();
  }

  const TransformerSettings settings;
  SmallModel model;
  parallel::Grid grid;
  model::StepArena arena;
  FrozenText text;
  std::vector<float> inputs, outputs, hidden, embeddings;
  std::vector<std::uint32_t> ids;
};

}  // namespace

TEST_CASE("what a target reads is the sum of gradients times MLP outputs and embeddings, in every model") {
  // With dx a target's gradient: dx . x = sum of G . y + sum of E . e, as x is linear in y and e.
  for (const auto& [name, variant] : variants()) {
    INFO(name);
    const Frozen frozen(variant.architecture);
    const std::int64_t width = frozen.width(), layers = frozen.layers();
    const Values skip(layers * width, width, 3, 0.2);
    std::vector<AnyMatrix> matrices;
    for (std::int64_t block = 0; block < layers; ++block)
      matrices.push_back(skip.matrix().rows_from(block * width, width));
    for (const bool skips : {false, true}) {
      model::StepArena arena(execution(), frozen.grid);
      FrozenBackward backward(frozen.text, frozen.model.model().layers(), kLength, 4,
                              skips ? matrices : std::vector<AnyMatrix>{}, execution(), arena);
      // With a skip connection the constant part of y is that which the skip connection does not form.
      std::vector<float> rest = frozen.outputs;
      for (std::int64_t row = 0; skips && row < kLength * layers; ++row)
        for (std::int64_t i = 0; i < width; ++i) {
          Sum sum;
          sum.add(skip.row(row % layers * width + i), frozen.input(row / layers, row % layers), width);
          rest[static_cast<std::size_t>(row * width + i)] -= static_cast<float>(sum.value);
        }
      for (std::int64_t block = 0; block <= layers; ++block)
        for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{3, kLength - 1, 0, 3}, {2, 1}}) {
          const Values gradients(std::ssize(tokens), width, static_cast<std::uint64_t>(block + 10));
          backward.run({block, tokens, gradients.matrix()});
          std::vector<Sum> sums(tokens.size());
          const std::int64_t end = 1 + *std::max_element(tokens.begin(), tokens.end());
          for (std::int64_t token = 0; token < end; ++token) {
            const std::vector<float> of_outputs = values_of(backward.output_gradients(token)),
                                     of_embedding = values_of(backward.embedding_gradients(token));
            for (std::size_t i = 0; i < tokens.size(); ++i) {
              const auto row = static_cast<std::int64_t>(i);
              sums[i].add(of_outputs.data() + row * block * width, rest.data() + token * layers * width, block * width);
              sums[i].add(of_embedding.data() + row * width, frozen.embeddings.data() + token * width, width);
            }
          }
          for (std::size_t i = 0; i < tokens.size(); ++i) {
            Sum expected;
            expected.add(gradients.row(static_cast<std::int64_t>(i)), frozen.input(tokens[i], block), width);
            CHECK(std::abs(sums[i].value - expected.value) < 1e-5 * (sums[i].magnitude + expected.magnitude));
          }
        }
    }
  }
}

TEST_CASE("a frozen pass with another MLP output changes hidden states as gradients say, in every model") {
  for (const auto& [name, variant] : variants()) {
    INFO(name);
    Frozen frozen(variant.architecture);
    Transformer& transformer = frozen.model.transformer();
    const Tokens tokens = frozen.model.tokens();
    const std::int64_t width = frozen.width(), layers = frozen.layers();
    const Values change(1, width, 50, 3), gradient(1, width, 51);
    const AnyMatrix outputs = frozen.text.mlp_outputs();
    const auto hidden = [&](bool changes) {
      transformer.tap([&, changes](std::int64_t block, const AnyMatrix&, const AnyMatrix& output) {
        kernels::affine_rows(execution(), outputs.columns_from(block * width, width), {}, {}, {}, output);
        const AnyMatrix row = output.rows_from(1, 1);
        if (changes && block == 0) kernels::affine_rows(execution(), row, {}, {}, change.matrix(), row);
      });
      transformer.forward(tokens, nullptr);
      transformer.tap({});
      return values_of(transformer.hidden_states(tokens));
    };
    FrozenPass pass(frozen.settings, tokens.rows(), transformer, execution());
    pass.record();
    CHECK(hidden(false) == frozen.hidden);
    pass.apply();
    const std::vector<float> before = hidden(false);
    pass.apply();
    const std::vector<float> after = hidden(true);
    pass.release();
    CHECK(hidden(true) != after);

    for (std::size_t i = 0; i < before.size(); ++i)
      CHECK(std::abs(static_cast<double>(before[i]) - static_cast<double>(frozen.hidden[i])) < 1e-4);
    frozen.text.freeze(tokens);
    model::StepArena arena(execution(), frozen.grid);
    FrozenBackward backward(frozen.text, frozen.model.model().layers(), kLength, 1, {}, execution(), arena);
    for (const std::int64_t token : {std::int64_t{1}, std::int64_t{kLength - 1}}) {
      const std::vector<std::int64_t> places{token};
      backward.run({layers, places, gradient.matrix()});
      Sum predicted, measured;
      predicted.add(values_of(backward.output_gradients(1)).data(), change.row(0), width);
      measured.add(gradient.row(0), after.data() + token * width, width);
      measured.add(gradient.row(0), before.data() + token * width, width, -1);
      CHECK(std::abs(predicted.value - measured.value) < 1e-5 * (predicted.magnitude + measured.magnitude));
    }
  }
}

TEST_CASE("interventions: what may be given, and what they change") {
  const std::vector<std::string> set{"1:7=0.5@2-3"}, scale{"0:3=-2", "1:7=0@4"};
  const std::vector<Intervention> list = interventions(set, scale);
  REQUIRE(list.size() == 3);
  CHECK((list[0].layer == 0 && list[0].feature == 3 && list[0].scales && !list[0].positions));
  CHECK(
      (list[1].value == 0.5f && !list[1].scales && *list[1].positions == std::pair<std::int64_t, std::int64_t>(2, 3)));
  CHECK(*list[2].positions == std::pair<std::int64_t, std::int64_t>(4, 4));
  CHECK_NOTHROW(require_fit(list, 2, 8, 5));
  for (const auto& [layers, features, positions] : {std::array{1, 8, 5}, std::array{2, 7, 5}, std::array{2, 8, 4}})
    CHECK_THROWS_AS(require_fit(list, layers, features, positions), Error);
  for (const char* wrong : {"", "1:7", "1:7=", "1=7", "x:7=0", "1:7=nan", "1:7=0@", "1:7=0@5-", "1:7=0@5-4", "1:7=0@-2",
                            "1:7=0 ", "1:7=1e99", "1:99999999999999999999=0"})
    CHECK_THROWS_AS(interventions(std::vector<std::string>{wrong}, {}), Error);
  CHECK_THROWS_AS(interventions(set, std::vector<std::string>{"1:7=0"}), Error);
  CHECK_THROWS_AS(interventions(set, std::vector<std::string>{"1:7=0@3-9"}), Error);

  // Two rows of two layers with 8 features; feature 3 of layer 0 and feature 7 of layer 1 are active in the first.
  std::vector<std::int64_t> offsets{0, 3, 4};
  std::vector<std::uint32_t> keys{3, 12, 15, 1};
  std::vector<float> activations{2, 5, 3, 1};
  const std::vector<kernels::FeatureChange> changes{{3, -2, 0, 9, true}, {15, 0.5f, 2, 4, false}, {15, 0, 4, 5, true}};
  std::vector<std::int32_t> positions{2, 3};
  const auto upload = [&](const auto& values) {
    device::Buffer<std::remove_cvref_t<decltype(values[0])>> buffer(std::ssize(values));
    device::copy(execution(), buffer.data(), values.data(), buffer.bytes(), device::Direction::to_device);
    kernels::fence(execution());
    return buffer;
  };
  const auto of_offsets = upload(offsets);
  const auto of_keys = upload(keys);
  const auto of_activations = upload(activations);
  const auto of_changes = upload(changes);
  const auto of_positions = upload(positions);
  const device::Buffer<float> out(6);
  kernels::feature_changes(execution(), {2, 2, 8, of_offsets.array(), of_keys.array(), of_activations.array()},
                           {of_changes.data(), 3}, {of_positions.data(), 2}, out.matrix(2, 3));
  CHECK(to_host(out.data(), 6) == std::vector<float>{-6, -2.5f, 0, 0, 0.5f, 0});
}

namespace {

/// Random features of a text: two per layer and token but the first.
ActiveFeatures random_features(const Frozen& frozen, bool per_layer) {
  const std::int64_t width = frozen.width(), layers = frozen.layers(), count = 2 * (kLength - 1);
  ActiveFeatures features{.list = {}, .per_layer = per_layer, .encoders = {}, .decoders = {}};
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    for (std::int64_t i = 0; i < count; ++i) features.list.push_back({layer, 1 + i / 2, 5 * (i % 2), 1.0f});
    Values decoders(count, (per_layer ? 1 : layers - layer) * width, static_cast<std::uint64_t>(layer + 20));
    features.decoders.push_back(std::move(decoders.memory));
  }
  Values encoders(layers * count, width, 30);
  features.encoders = std::move(encoders.memory);
  return features;
}

}  // namespace

TEST_CASE("effects are gradients times what features, errors and tokens write") {
  TransformerSettings variant = gpt2();
  variant.architecture.model.layers = 3;
  const Frozen frozen(variant.architecture);
  const std::int64_t width = frozen.width(), layers = frozen.layers();
  for (const bool per_layer : {false, true}) {
    const ActiveFeatures features = random_features(frozen, per_layer);
    const Values errors(kLength, layers * width, 40);
    model::StepArena arena(execution(), frozen.grid);
    FrozenBackward backward(frozen.text, frozen.model.model().layers(), kLength, 5, {}, execution(), arena);
    Attribution attribution(backward, frozen.model.model(), features, errors.matrix(), frozen.ids, 5, execution(),
                            arena);
    const Graph graph = attribution.graph({{7, 0.6}, {3, 0.3}}, {}, world().all());
    const std::int64_t n = std::ssize(features.list);
    REQUIRE(graph.sources() == n + (layers + 1) * kLength);
    REQUIRE(graph.targets() == n + 2);

    // One target of each kind: the last feature of layer 2, and the first logit.
    const std::vector<float> encoders = to_host(features.encoders.data(), n * width),
                             head = frozen.model.get(frozen.model.model().layers().token_table());
    for (const std::int64_t target : {n - 1, n}) {
      std::vector<float> dx(encoders.end() - width, encoders.end());
      if (target == n)
        for (std::int64_t i = 0; i < width; ++i) {
          double mean = 0;
          for (std::int64_t id = 0; id < 29; ++id)
            mean += static_cast<double>(head[static_cast<std::size_t>(id * width + i)]) / 29;
          dx[static_cast<std::size_t>(i)] =
              static_cast<float>(static_cast<double>(head[static_cast<std::size_t>(7 * width + i)]) - mean);
        }
      Values gradient(1, width, 0);
      gradient.host = dx;
      gradient.upload();
      const std::vector<std::int64_t> tokens{kLength - 1};
      const std::int64_t block = target == n ? layers : 2;
      backward.run({block, tokens, gradient.matrix()});
      const std::span<const float> row = graph.row(target);
      const auto check = [&](std::int64_t source, const Sum& expected) {
        CHECK(std::abs(static_cast<double>(row[static_cast<std::size_t>(source)]) - expected.value) <
              1e-5 * expected.magnitude + 1e-12);
      };
      for (std::int64_t source = 0; source < n; ++source) {
        const ActiveFeature& feature = features.list[static_cast<std::size_t>(source)];
        Sum expected;
        if (feature.layer < block) {
          const std::int64_t strips = per_layer ? 1 : layers - feature.layer, number = source % (2 * (kLength - 1));
          const std::vector<float> g = values_of(backward.output_gradients(feature.token)),
                                   w = to_host(features.decoders[static_cast<std::size_t>(feature.layer)].data() +
                                                   number * strips * width,
                                               strips * width);
          expected.add(g.data() + feature.layer * width, w.data(), (per_layer ? 1 : block - feature.layer) * width);
        }
        check(source, expected);
      }
      for (std::int64_t token = 0; token < kLength; ++token) {
        const std::vector<float> g = values_of(backward.output_gradients(token)),
                                 e = values_of(backward.embedding_gradients(token));
        for (std::int64_t layer = 0; layer < layers; ++layer) {
          Sum expected;
          if (layer < block && token > 0)
            expected.add(g.data() + layer * width, errors.row(token) + layer * width, width);
          check(graph.first_error() + layer * kLength + token, expected);
        }
        Sum expected;
        expected.add(e.data(), frozen.embeddings.data() + token * width, width);
        check(graph.first_token() + token, expected);
      }
    }

    // A selection has the rows and columns of the strongest; by direct effects on logits, of a first round.
    const Graph fewer = attribution.graph({{7, 0.6}, {3, 0.3}}, {.max_nodes = 9}, world().all());
    REQUIRE(std::ssize(fewer.features) == 9);
    CHECK(fewer.active == n);
    std::vector<TargetRow> logits;
    for (std::int64_t i = 0; i < 2; ++i)
      logits.push_back({-1, graph.logits[static_cast<std::size_t>(i)].probability, graph.row(n + i).data()});
    const std::vector<double> direct = influence(logits, graph.sources());
    std::vector<double> weakest;
    for (const ActiveFeature& feature : fewer.features) {
      const auto at = std::find_if(features.list.begin(), features.list.end(), [&](const ActiveFeature& other) {
        return other.layer == feature.layer && other.token == feature.token && other.index == feature.index;
      });
      weakest.push_back(direct[static_cast<std::size_t>(at - features.list.begin())]);
      CHECK(fewer.row(9).back() == graph.row(n).back());
    }
    CHECK(std::count_if(direct.begin(), direct.begin() + n,
                        [&](double value) { return value > *std::min_element(weakest.begin(), weakest.end()); }) == 8);
  }
}

namespace {

/// Two layers of two features, two tokens, one logit: features 0, 1 (layer 0), 2, 3 (layer 1); then errors 4 to 7, and
/// tokens 8, 9.
Graph small_graph() {
  Graph graph;
  graph.ids = {4, 5};
  graph.layers = 2;
  graph.active = 4;
  graph.features = {{0, 1, 0, 1.0f}, {0, 1, 1, 1.0f}, {1, 1, 0, 1.0f}, {1, 1, 1, 1.0f}};
  graph.logits = {{3, 0.9}};
  graph.effects = {
      // clang-format off
      0, 0, 0, 0,   0, 0, 0, 0,   1, 3,
      0, 0, 0, 0,   0, 0, 0, 0,   0, -2,
      2, -1, 0, 0,  0, 1, 0, 0,   0, 4,
      0, 0, 0, 0,   0, 2, 0, 0,   0, 2,
      0, 0, 6, -2,  0, 0, 0, 1,   0, 1,
      // clang-format on
  };
  return graph;
}

}  // namespace

TEST_CASE("influence, scores and pruning of a small graph") {
  const Graph graph = small_graph();
  const std::vector<double> found = influence(graph);
  // By hand: p times the products of the parts along all paths.
  const double two = 0.9 * 0.6, three = 0.9 * 0.2, zero = two * 2 / 8, one = two / 8, error = two / 8 + three / 2,
               last = 0.9 / 10, token = zero * 3 / 4 + one + two * 4 / 8 + three / 2 + 0.9 / 10;
  const std::vector<double> expected = {zero, one, two, three, 0, error, 0, last, zero / 4, token};
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-12));

  // Feature 0 on the logit: through feature 2 alone; all activations are 1.
  CHECK(changes_without(graph, 0) == std::vector<double>{-2 * 6.0});
  CHECK(changes_without(graph, 3) == std::vector<double>{2.0});

  const GraphScores measured = scores(graph, found);
  const double tokens = zero / 4 + token, errors = error + last;
  CHECK(measured.replacement == doctest::Approx(tokens / (tokens + errors)).epsilon(1e-12));
  const double weighted = zero + one + two * 7 / 8 + three / 2 + 0.9 * 0.9 + tokens + errors,
               all = zero + one + two + three + 0.9 + tokens + errors;
  CHECK(measured.completeness == doctest::Approx(weighted / all).epsilon(1e-12));

  const Pruned everything = prune(graph, found, 1, 1);
  CHECK(everything.edges.size() == 13);
  // The largest two hold 0.54 + 0.63 of 1.99: at a half, features 2 and token 9 stay, and token 8.
  const Pruned few = prune(graph, found, 0.5, 1);
  CHECK(few.sources == std::vector<char>{0, 0, 1, 0, 0, 0, 0, 0, 1, 1});
  REQUIRE(few.edges.size() == 3);
  CHECK(few.edges[0].target == 2);
  CHECK(few.edges[0].source == 9);
  CHECK(few.edges[1].target == 4);
  // Without the effect of the token on it, feature 2 reads nothing and goes, and with it its effect on the logit.
  Graph unread = graph;
  unread.effects[29] = 0;
  const Pruned none = prune(unread, influence(unread), 0.3, 1);
  CHECK(none.sources[2] == 0);
}

TEST_CASE("the JSON of a graph names nodes as circuit-tracer does, each once") {
  const Graph graph = small_graph();
  const std::vector<double> of_nodes = influence(graph);
  const GraphFacts facts{.slug = "one",
                         .scan = "model",
                         .prompt = "a\xff",
                         .tokens = {"a", "\xff"},
                         .logits = {"b\""},
                         .model = "model",
                         .transcoder = "transcoder",
                         .generation = Json::object()};
  const Json json = parse_json(graph_json(graph, prune(graph, of_nodes, 1, 1), scores(graph, of_nodes), facts));
  REQUIRE(!json.is_discarded());
  std::vector<std::string> ids;
  for (const Json& node : json["nodes"]) ids.push_back(node["node_id"]);
  // The errors of token 1 would have the names of features 0 and 1 of layer 0.
  CHECK(ids == std::vector<std::string>{"0_0_1", "0_1_1", "1_0_1", "1_1_1", "0_0_1_error", "0_1_1_error", "E_4_0",
                                        "E_5_1", "3_3_1"});
  CHECK(json["links"].size() == 13);
  CHECK(json["nodes"][2]["feature"] == 1);
  CHECK(json["nodes"].back()["clerp"] == "Output \"b\"\" (p=0.900)");
}

TEST_CASE("the fewest logits that hold the probability are nodes") {
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.25f), std::log(0.05f)};
  const auto found = salient_logits(logits, {.max_logits = 10, .logit_probability = 0.7});
  REQUIRE(found.size() == 2);
  CHECK(found[0].id == 1);
  CHECK(found[1].probability == doctest::Approx(0.25));
  CHECK(salient_logits(logits, {.max_logits = 1, .logit_probability = 0.7}).size() == 1);
  CHECK(salient_logits(logits, {.max_logits = 10, .logit_probability = 1}).size() == 4);
}
