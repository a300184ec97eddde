// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"

#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

constexpr std::int64_t kGap = 8;  // elements of NaN after each row of a packed matrix

/// Inputs on the host, and what attention is by its definition: rows x rows probabilities of every head, in fp64.
struct Reference {
  Attention shape;
  std::vector<std::int32_t> first_key;
  std::vector<double> queries, keys, values, out_gradient;  // [rows, heads or kv_heads, head_size]
  std::vector<double> out, log_sum, dq, dk, dv;

  bool reads(std::int64_t i, std::int64_t j, std::int64_t sequence) const {
    const std::int64_t first = first_key.empty() ? 0 : first_key[sequence * shape.length + i];
    return first <= j && j <= i && (shape.window == 0 || i - j < shape.window);
  }

  void compute() {
    const std::int64_t length = shape.length, d = shape.head_size;
    out.assign(queries.size(), 0.0);
    dq.assign(queries.size(), 0.0);
    dk.assign(keys.size(), 0.0);
    dv.assign(keys.size(), 0.0);
    log_sum.assign(shape.sequences * shape.heads * length, 0.0);
    std::vector<double> score(length), p(length);
    for (std::int64_t b = 0; b < shape.sequences; ++b)
      for (std::int64_t h = 0; h < shape.heads; ++h)
        for (std::int64_t i = 0; i < length; ++i) {
          const std::int64_t query = ((b * length + i) * shape.heads + h) * d;
          const auto key = [&](std::int64_t j) {
            return ((b * length + j) * shape.kv_heads + h / (shape.heads / shape.kv_heads)) * d;
          };
          double largest = -HUGE_VAL, total = 0, delta = 0;
          for (std::int64_t j = 0; j <= i; ++j) {
            score[j] = 0;
            for (std::int64_t c = 0; c < d; ++c) score[j] += shape.scale * queries[query + c] * keys[key(j) + c];
            if (shape.softcap > 0) score[j] = shape.softcap * std::tanh(score[j] / shape.softcap);
            if (reads(i, j, b)) largest = std::max(largest, score[j]);
          }
          for (std::int64_t j = 0; j <= i; ++j) {
            p[j] = reads(i, j, b) ? std::exp(score[j] - largest) : 0;
            total += p[j];
          }
          log_sum[(b * shape.heads + h) * length + i] = largest + std::log(total);
          for (std::int64_t j = 0; j <= i; ++j) {
            p[j] /= total;
            for (std::int64_t c = 0; c < d; ++c) out[query + c] += p[j] * values[key(j) + c];
          }
          for (std::int64_t c = 0; c < d; ++c) delta += out_gradient[query + c] * out[query + c];
          for (std::int64_t j = 0; j <= i; ++j) {
            if (p[j] == 0) continue;
            double dp = 0;
            for (std::int64_t c = 0; c < d; ++c) dp += out_gradient[query + c] * values[key(j) + c];
            double ds = p[j] * (dp - delta);
            if (shape.softcap > 0) ds *= 1 - score[j] / shape.softcap * score[j] / shape.softcap;
            for (std::int64_t c = 0; c < d; ++c) {
              dv[key(j) + c] += p[j] * out_gradient[query + c];
              dq[query + c] += shape.scale * ds * keys[key(j) + c];
              dk[key(j) + c] += shape.scale * ds * queries[query + c];
            }
          }
        }
  }
};

struct Case {
  std::int64_t sequences, length, heads, kv_heads, head_size;
  float softcap = 0;
  std::int64_t window = 0;
  bool documents = false;
  Scalar type = Scalar::fp32;
  float magnitude = 1;         // of queries and keys
  std::int64_t document = 37;  // rows per document
};

struct Results {
  std::vector<float> out, log_sum, dq, dk, dv;
};

/// Rows of [queries | keys | values | NaN], or of their gradients.
struct Packed {
  std::int64_t rows, query_columns, key_columns, stride;
  TestMatrix matrix;

  Packed(const Case& c, const std::vector<float>& values)
      : rows(c.sequences * c.length),
        query_columns(c.heads * c.head_size),
        key_columns(c.kv_heads * c.head_size),
        stride(stride_of(c)),
        matrix(values, rows, stride, c.type) {}
  static std::int64_t stride_of(const Case& c) { return (c.heads + 2 * c.kv_heads) * c.head_size + kGap; }

  AnyMatrix queries() const { return matrix.view().columns_from(0, query_columns); }
  AnyMatrix keys() const { return matrix.view().columns_from(query_columns, key_columns); }
  AnyMatrix values() const { return matrix.view().columns_from(query_columns + key_columns, key_columns); }
  template <class T>
  std::vector<T> part(std::int64_t begin, std::int64_t columns) const {
    const std::vector<float> all = matrix.values();
    std::vector<T> out;
    for (std::int64_t i = 0; i < rows; ++i)
      out.insert(out.end(), all.begin() + i * stride + begin, all.begin() + i * stride + begin + columns);
    return out;
  }
};

/// Inputs of a case in the memory of the kernels, with the reference of what is stored there.
struct Problem {
  Case c;
  Reference reference;
  Packed inputs;
  TestMatrix out_gradient;
  DeviceArray<std::int32_t> first_key;
  Attention shape;

  explicit Problem(const Case& case_)
      : c(case_),
        inputs(c, packed_values(c)),
        out_gradient(random_floats(inputs.rows * inputs.query_columns, 2), inputs.rows, inputs.query_columns, c.type) {
    shape = {c.sequences, c.length, c.heads, c.kv_heads, c.head_size, 1.0f / std::sqrt(static_cast<float>(c.head_size)),
             c.softcap,   c.window, {}};
    reference.shape = shape;
    if (c.documents) {
      // Borders shifted from sequence to sequence.
      for (std::int64_t b = 0; b < c.sequences; ++b)
        for (std::int64_t i = 0; i < c.length; ++i)
          reference.first_key.push_back(
              static_cast<std::int32_t>(std::max<std::int64_t>(0, (i + 5 * b) / c.document * c.document - 5 * b)));
      first_key = DeviceArray<std::int32_t>(reference.first_key);
      shape.first_key = first_key.array();
    }
    reference.queries = inputs.part<double>(0, inputs.query_columns);
    reference.keys = inputs.part<double>(inputs.query_columns, inputs.key_columns);
    reference.values = inputs.part<double>(inputs.query_columns + inputs.key_columns, inputs.key_columns);
    const std::vector<float> gradient = out_gradient.values();
    reference.out_gradient.assign(gradient.begin(), gradient.end());
  }

  static std::vector<float> packed_values(const Case& c) {
    const std::int64_t stride = Packed::stride_of(c), scaled = (c.heads + c.kv_heads) * c.head_size;
    std::vector<float> values = random_floats(c.sequences * c.length * stride, 1);
    for (std::int64_t i = 0; i < std::ssize(values); ++i) {
      if (i % stride < scaled) values[i] *= 2 * c.magnitude;
      if (i % stride >= stride - kGap) values[i] = std::nanf("");
    }
    return values;
  }

  Results run(const Execution& execution) const {
    const std::int64_t rows = inputs.rows, columns = inputs.query_columns;
    const std::vector<float> nothing(rows * columns, std::nanf(""));
    const TestMatrix out(nothing, rows, columns, c.type);
    const Packed gradients(c, std::vector<float>(rows * inputs.stride, std::nanf("")));
    const DeviceArray<float> log_sum(c.sequences * c.heads * c.length);
    const device::Buffer<std::byte> workspace(
        std::max<std::int64_t>(1, std::max(attention_workspace(execution, shape, c.type),
                                           attention_backward_workspace(execution, shape, c.type))));
    attention(execution, shape, inputs.queries(), inputs.keys(), inputs.values(), out.view(), log_sum.array(),
              workspace.array());
    attention_backward(execution, shape, inputs.queries(), inputs.keys(), inputs.values(), out.view(), log_sum.array(),
                       out_gradient.view(), gradients.queries(), gradients.keys(), gradients.values(),
                       workspace.array());
    for (const float value : gradients.part<float>(inputs.stride - kGap, kGap)) CHECK(std::isnan(value));
    return {out.values(), log_sum.values(), gradients.part<float>(0, columns),
            gradients.part<float>(columns, inputs.key_columns),
            gradients.part<float>(columns + inputs.key_columns, inputs.key_columns)};
  }
};

/// |x - reference| / |reference| in the 2-norm; absolute where the reference is 0.
double relative_error(const std::vector<float>& x, const std::vector<double>& reference) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - reference[i]) * (x[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error) / (norm > 1e-12 ? std::sqrt(norm) : 1.0);
}

void check_agreement(const Case& c) {
  CAPTURE(c.sequences);
  CAPTURE(c.length);
  CAPTURE(c.heads);
  CAPTURE(c.kv_heads);
  CAPTURE(c.head_size);
  CAPTURE(c.softcap);
  CAPTURE(c.window);
  CAPTURE(c.documents);
  CAPTURE(static_cast<int>(c.type));
  Problem problem(c);
  problem.reference.compute();
  const Reference& r = problem.reference;
  // fp32: sums of up to a few hundred products in fp32. bf16: results are rounded to 2^-9, and a kernel may round
  // probabilities and their gradients to bf16 before the second product.
  const double tolerance = c.type == Scalar::fp32 ? 1e-5 : 5e-3;
  for_each_backend([&](const Execution& execution) {
    const Results x = problem.run(execution);
    CHECK(relative_error(x.out, r.out) <= tolerance);
    CHECK(relative_error(x.log_sum, r.log_sum) <= 1e-5);  // fp32 for all types
    CHECK(relative_error(x.dq, r.dq) <= tolerance);
    CHECK(relative_error(x.dk, r.dk) <= tolerance);
    CHECK(relative_error(x.dv, r.dv) <= tolerance);
  });
}

}  // namespace

TEST_CASE("attention and its gradients agree with the definition, whatever the shape") {
  // Lengths around multiples of the blocks, one row; all kinds of head sizes; groups of heads.
  for (const Case& c : {Case{1, 1, 1, 1, 8}, Case{3, 1, 2, 1, 16}, Case{2, 17, 2, 2, 24}, Case{1, 63, 1, 1, 32},
                        Case{2, 64, 3, 1, 64}, Case{1, 65, 4, 2, 40}, Case{2, 130, 2, 1, 64}, Case{1, 200, 2, 2, 128},
                        Case{1, 70, 1, 1, 256}, Case{1, 96, 6, 2, 32}})
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      Case one = c;
      one.type = type;
      check_agreement(one);
    }
}

TEST_CASE("window, cap and documents, alone and together") {
  for (const std::int64_t head_size : {32, 64, 128})
    for (int features = 1; features < 8; ++features)
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        Case c{2, 150, 4, 2, head_size};
        c.window = (features & 1) != 0 ? 50 : 0;
        c.softcap = (features & 2) != 0 ? 3.0f : 0.0f;
        c.documents = (features & 4) != 0;
        c.type = type;
        check_agreement(c);
      }
}

TEST_CASE("windows and documents of any size") {
  for (const std::int64_t window : {2, 16, 63, 64, 65, 129, 130, 1000}) {
    Case c{1, 130, 1, 1, 16};
    c.window = window;
    check_agreement(c);
  }
  for (const std::int64_t document : {2, 16, 64, 65, 129}) {
    Case c{2, 140, 2, 1, 16};
    c.documents = true;
    c.document = document;
    check_agreement(c);
    c.type = Scalar::bf16;
    c.head_size = 64;
    check_agreement(c);
  }
}

TEST_CASE("a row that reads itself alone returns its value") {
  for (const bool by_window : {true, false}) {
    Case c{2, 70, 2, 1, 64};
    c.window = by_window ? 1 : 0;
    c.documents = !by_window;
    c.document = 1;
    const Problem problem(c);
    for_each_backend([&](const Execution& execution) {
      const Results x = problem.run(execution);
      for (std::int64_t i = 0; i < problem.inputs.rows; ++i)
        for (std::int64_t h = 0; h < c.heads; ++h)
          for (std::int64_t j = 0; j < c.head_size; ++j) {
            const std::int64_t at = (i * c.heads + h) * c.head_size + j;
            REQUIRE(x.out[at] == doctest::Approx(problem.reference.values[i * c.head_size + j]).epsilon(1e-6));
            // One key: its probability is 1 whatever the score is.
            REQUIRE(std::abs(x.dq[at]) < 1e-5);
          }
    });
  }
}

TEST_CASE("the gradients of the definition are those of central differences") {
  Case c{1, 19, 2, 1, 8};
  c.softcap = 2.0f;
  c.window = 11;
  c.documents = true;
  c.document = 13;
  Problem problem(c);
  Reference& r = problem.reference;
  r.compute();
  const std::vector<double> gradients[] = {r.dq, r.dk, r.dv};
  std::vector<double>* const inputs[] = {&r.queries, &r.keys, &r.values};
  constexpr double kStep = 1e-5;  // error kStep^2 times third derivatives of order 1
  for (int k = 0; k < 3; ++k)
    for (std::size_t i = 0; i < inputs[k]->size(); i += 7) {
      const auto loss_at = [&](double x) {
        const double before = (*inputs[k])[i];
        (*inputs[k])[i] = x;
        r.compute();
        (*inputs[k])[i] = before;
        double loss = 0;
        for (std::size_t e = 0; e < r.out.size(); ++e) loss += r.out[e] * r.out_gradient[e];
        return loss;
      };
      const double x = (*inputs[k])[i];
      const double difference = (loss_at(x + kStep) - loss_at(x - kStep)) / (2 * kStep);
      REQUIRE(std::abs(difference - gradients[k][i]) < 1e-7);
    }
}

TEST_CASE("huge scores do not overflow") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    Case c{1, 130, 2, 1, 64};
    c.type = type;
    c.magnitude = 1e4f;  // scores of 1e8: one key has probability 1
    const Problem problem(c);
    for_each_backend([&](const Execution& execution) {
      const Results x = problem.run(execution);
      for (const std::vector<float>* part : {&x.out, &x.log_sum, &x.dq, &x.dk, &x.dv})
        for (const float value : *part) REQUIRE(is_finite(value));
    });
  }
}

TEST_CASE("equal calls give equal bits") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    Case c{3, 200, 4, 2, 64};
    c.type = type;
    const Problem problem(c);
    for_each_backend([&](const Execution& execution) {
      const Results x = problem.run(execution), y = problem.run(execution);
      CHECK(x.out == y.out);
      CHECK(x.log_sum == y.log_sum);
      CHECK(x.dq == y.dq);
      CHECK(x.dk == y.dk);
      CHECK(x.dv == y.dv);
    });
  }
}

}  // namespace weft::testing
