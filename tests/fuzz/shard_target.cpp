// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a checkpoint shard, read like a resumed run does, but without checking the digests of the manifest
// first.
#include <vector>

#include "storage/tensor_file.hpp"
#include "tests/fuzz/target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using kernels::Scalar;
  struct Tensor {
    const char* name;
    Scalar type;
    std::vector<std::int64_t> shape;
  };
  static const std::vector<Tensor> tensors = {{"encoder_0/weight", Scalar::fp32, {13, 7}},
                                              {"encoder_0/weight.first_moment", Scalar::bf16, {13, 7}},
                                              {"encoder_0/weight.codes", Scalar::u8, {13, 301}},
                                              {"encoder_0/tokens_since_fired", Scalar::i64, {13}},
                                              {"decoder_0/weight", Scalar::fp16, {2, 3, 5}},
                                              {"statistics/mean_inputs", Scalar::fp64, {4, 5}},
                                              {"schedule/words", Scalar::u64, {1}}};
  static const fuzz::Scratch scratch;
  fuzz::write_file(scratch / "rank_00000.h5", data, size);
  storage::Handle file;
  const std::initializer_list<ExitCode> codes = {ExitCode::io, ExitCode::data};
  const bool opened = fuzz::accepts(codes, [&] {
    file = storage::open_file(scratch / "rank_00000.h5");
    storage::read_integer_attribute(file, "step");
    storage::read_integer_attribute(file, "rank");
  });
  if (!opened) return 0;
  for (const Tensor& tensor : tensors)
    fuzz::accepts(codes, [&] {
      std::int64_t bytes = kernels::bytes_of(tensor.type);
      for (const std::int64_t extent : tensor.shape) bytes *= extent;
      const storage::Handle dataset = storage::open_dataset(file, tensor.name, tensor.type, tensor.shape);
      storage::read_integer_attribute(dataset, "first_row");
      std::vector<std::byte> values(static_cast<std::size_t>(bytes));
      storage::read_rows(dataset, 0, tensor.shape[0], values.data());
      storage::require_complete(dataset, tensor.name);
    });
  return 0;
}
