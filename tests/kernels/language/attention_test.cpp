// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/attention/attention.hpp"

#include <numeric>

#include "tests/kernels/language/attention_problem.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

void check_agreement(const Case& c) {
  CAPTURE(c.sequences);
  CAPTURE(c.length);
  CAPTURE(c.heads);
  CAPTURE(c.kv_heads);
  CAPTURE(c.head_size);
  CAPTURE(c.softcap);
  CAPTURE(c.window);
  CAPTURE(c.documents);
  CAPTURE(c.sparse);
  CAPTURE(c.dropout);
  CAPTURE(static_cast<int>(c.type));
  Problem problem(c);
  problem.reference.compute();
  const Reference& r = problem.reference;
  // fp32: sums of up to a few hundred products in fp32. bf16: results are rounded to 2^-9, and a kernel may round
  // probabilities and their gradients to bf16 before the second product. fp16: an eighth of it.
  const double tolerance = c.type == Scalar::fp32 ? 1e-5 : c.type == Scalar::bf16 ? 5e-3 : 7e-4;
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
    for (const Scalar type : kRowTypes) {
      Case one = c;
      one.type = type;
      check_agreement(one);
    }
}

TEST_CASE("window, cap, documents and sparse blocks, alone and together") {
  for (int features = 1; features < 16; ++features)
    for (const Scalar type : kRowTypes) {
      Case c{1, 200, 4, 2, features % 2 == 0 ? 64 : 32};
      c.window = (features & 1) != 0 ? 90 : 0;
      c.softcap = (features & 2) != 0 ? 3.0f : 0.0f;
      c.documents = (features & 4) != 0;
      c.document = 80;
      c.sparse = (features & 8) != 0;
      c.type = type;
      if (features == 15) {
        c.sequences = 2;
        c.head_size = 128;
      }
      check_agreement(c);
    }
}

TEST_CASE("dropout of probabilities, alone and with everything else") {
  for (const bool all : {false, true})
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const float probability : {0.1f, 0.6f}) {
        Case c{2, 150, 4, 2, 64};
        c.dropout = probability;
        c.type = type;
        if (all) {
          c.window = 70;
          c.softcap = 3.0f;
          c.documents = c.sparse = true;
          c.document = 61;
        }
        check_agreement(c);
      }
}

TEST_CASE("a mask depends on the global row alone, and keeps the mean") {
  Case whole{3, 75, 2, 1, 16}, last{1, 75, 2, 1, 16};
  whole.dropout = last.dropout = 0.25f;
  last.first_row = whole.first_row + 2 * 75;
  const Problem a(whole), b(last);
  double sum = 0;
  std::int64_t n = 0;
  for (std::int64_t head = 0; head < 2; ++head)
    for (std::int64_t i = 0; i < 75; ++i)
      for (std::int64_t j = 0; j <= i; ++j, ++n) {
        REQUIRE(a.reference.factor(i, j, 2, head) == b.reference.factor(i, j, 0, head));
        sum += a.reference.factor(i, j, 2, head);
      }
  // Variance of a factor: p / (1 - p). Fixed numbers: five standard deviations of the mean.
  CHECK(std::abs(sum / static_cast<double>(n) - 1) < 5 * std::sqrt(0.25 / 0.75 / static_cast<double>(n)));
  CHECK(a.reference.factor(9, 4, 0, 0) == a.reference.factor(9, 4, 0, 0));
  std::int64_t differing = 0;
  for (std::int64_t j = 0; j < 75; ++j) differing += a.reference.factor(74, j, 0, 0) != a.reference.factor(74, j, 0, 1);
  CHECK(differing > 10);  // 28 expected: heads have masks of their own
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
      double error = 0, slope = 0;
      for (std::int64_t i = 0; i < problem.reference.rows(); ++i)
        for (std::int64_t h = 0; h < c.heads; ++h)
          for (std::int64_t j = 0; j < c.head_size; ++j) {
            const std::int64_t at = (i * c.heads + h) * c.head_size + j;
            error = std::max(error, std::abs(x.out[at] - problem.reference.values[i * c.head_size + j]));
            slope = std::max(slope, std::abs(static_cast<double>(x.dq[at])));
          }
      CHECK(error < 1e-6);
      CHECK(slope < 1e-5);  // its probability is 1 whatever the score is
    });
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
        CHECK(std::all_of(part->begin(), part->end(), is_finite));
    });
  }
}

TEST_CASE("equal calls give equal bits, and a sequence the same bits alone") {
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
      // Threads take the blocks in another order each time; here there are fewer.
      Case first = c;
      first.sequences = 1;
      const Results z = Problem(first).run(execution);
      const auto begins_with = [](const std::vector<float>& all, const std::vector<float>& part) {
        return std::equal(part.begin(), part.end(), all.begin());
      };
      CHECK(begins_with(x.out, z.out));
      CHECK(begins_with(x.dq, z.dq));
      CHECK(begins_with(x.dk, z.dk));
      CHECK(begins_with(x.dv, z.dv));
    });
  }
}

TEST_CASE("sparse attention that keeps all blocks gives the bits of dense attention") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    Case c{2, 300, 4, 2, 64};
    c.type = type;
    const Problem dense(c);
    c.sparse = true;
    Problem all(c);
    for_each_backend([&](const Execution& execution) {
      const device::Buffer<std::byte> workspace(select_key_blocks_workspace(all.shape));
      select_key_blocks(execution, all.shape, {1, all.shape.blocks()}, all.queries(all.inputs), all.keys(all.inputs),
                        all.kept.array(), workspace.array());
      const Results x = dense.run(execution), y = all.run(execution);
      CHECK(x.out == y.out);
      CHECK(x.log_sum == y.log_sum);
      CHECK(x.dq == y.dq);
      CHECK(x.dk == y.dk);
      CHECK(x.dv == y.dv);
    });
  }
}

TEST_CASE("select_key_blocks keeps the local blocks and the best of those before them") {
  for (const bool documents : {false, true}) {
    Case c{2, 1000, 4, 2, 16};
    c.sparse = true;
    c.documents = documents;
    c.document = 450;
    const Problem problem(c);
    const Reference& r = problem.reference;
    const BlockChoice choice{2, 3};
    const std::int64_t blocks = problem.shape.blocks();
    const auto mean = [&](const std::vector<double>& rows, std::int64_t b, std::int64_t heads, std::int64_t head,
                          std::int64_t block) {
      std::vector<double> sum(c.head_size);
      const std::int64_t end = std::min(c.length, (block + 1) * kKeyBlock);
      for (std::int64_t i = block * kKeyBlock; i < end; ++i)
        for (std::int64_t j = 0; j < c.head_size; ++j)
          sum[j] += rows[((b * c.length + i) * heads + head) * c.head_size + j] / (end - block * kKeyBlock);
      return sum;
    };
    std::vector<std::uint8_t> expected;
    for (std::int64_t b = 0; b < c.sequences; ++b)
      for (std::int64_t h = 0; h < c.heads; ++h)
        for (std::int64_t i = 0; i < blocks; ++i) {
          const std::int64_t first = documents ? r.first_key[b * c.length + i * kKeyBlock] / kKeyBlock : 0;
          const std::vector<double> query = mean(r.queries, b, c.heads, h, i);
          std::vector<std::pair<double, std::int64_t>> candidates;  // by descending score
          for (std::int64_t j = first; j <= i - choice.local; ++j) {
            const std::vector<double> key = mean(r.keys, b, c.kv_heads, h / 2, j);
            candidates.emplace_back(-std::inner_product(query.begin(), query.end(), key.begin(), 0.0), j);
          }
          std::sort(candidates.begin(), candidates.end());
          std::vector<std::uint8_t> flags(blocks);
          for (std::int64_t j = std::max<std::int64_t>(0, i - choice.local + 1); j <= i; ++j) flags[j] = 1;
          for (std::int64_t n = 0; n < std::min<std::int64_t>(choice.best, std::ssize(candidates)); ++n)
            flags[candidates[n].second] = 1;
          expected.insert(expected.end(), flags.begin(), flags.end());
        }
    for_each_backend([&](const Execution& execution) {
      const device::Buffer<std::byte> workspace(select_key_blocks_workspace(problem.shape));
      select_key_blocks(execution, problem.shape, choice, problem.queries(problem.inputs), problem.keys(problem.inputs),
                        problem.kept.array(), workspace.array());
      CHECK(problem.kept.values() == expected);
    });
  }
}

}  // namespace weft::testing
