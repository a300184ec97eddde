// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/products.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace weft::kernels {

FormedProducts formed_products_layout(std::byte* data, Scalar x, Scalar g, std::int64_t in, std::int64_t out,
                                      const ExampleSizes& sizes, std::int64_t tile) {
  constexpr std::int64_t kFewest = 64;  // outputs, so that a product keeps the processor busy
  const std::int64_t row = std::max<std::int64_t>(1, in) * static_cast<std::int64_t>(sizeof(float));
  FormedProducts formed;
  formed.outputs = std::min(std::max<std::int64_t>(1, out), tile > 0 ? tile : std::max(kFewest, kFormedBytes / row));
  formed.examples =
      std::clamp<std::int64_t>(kFormedBytes / (formed.outputs * row), 1, std::max<std::int64_t>(1, sizes.examples));
  const std::int64_t size = formed.outputs * in;
  Workspace workspace(data);
  formed.values = workspace.take<float>(formed.examples * size);
  formed.parts = workspace.take<double>(formed.examples * square_parts(size));
  formed.library = workspace.take<std::byte>(gemm_workspace(
      g, x, Scalar::fp32, formed.outputs, std::max<std::int64_t>(1, in), std::max<std::int64_t>(1, sizes.most_rows)));
  formed.bytes = workspace.bytes();
  return formed;
}

void require_examples(const Examples& examples, std::int64_t values, std::int64_t needed, Array<std::byte> workspace,
                      const char* what) {
  if (values != examples.count())
    throw Error(ExitCode::internal, std::string(what) + ": there are not as many values as examples");
  if (examples.count() > 0 && examples.device_offsets.size != examples.count() + 1)
    throw Error(ExitCode::internal, std::string(what) + ": the offsets on the host and the device differ in number");
  if (workspace.size < needed) throw Error(ExitCode::internal, std::string(what) + ": its workspace is too small");
}

}  // namespace weft::kernels
