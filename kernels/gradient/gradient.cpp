// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/gradient.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/gradient/rows_by_id.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::add_column_sums) add_column_sums;
decltype(kernels::add_column_products) add_column_products;
decltype(kernels::add_rows_by_id) add_rows_by_id;
}  // namespace portable

namespace cuda {
decltype(kernels::add_column_sums) add_column_sums;
decltype(kernels::add_column_products) add_column_products;
decltype(kernels::add_rows_by_id) add_rows_by_id;
}  // namespace cuda

namespace {

void require_workspace(std::int64_t needed, Array<std::byte> workspace) {
  if (workspace.size < needed) throw Error(ExitCode::internal, "a gradient: its workspace is too small");
}

}  // namespace

std::int64_t rows_by_id_workspace(std::int64_t n, std::int64_t columns) {
  return rows_by_id_layout(nullptr, n, columns).bytes;
}

void add_column_sums(const Execution& execution, AnyMatrix g, Array<float> out, bool overwrite,
                     Array<std::byte> workspace) {
  require_workspace(column_sums_workspace(g.rows, g.columns), workspace);
  dispatch<portable::add_column_sums, cuda::add_column_sums>(execution, g, out, overwrite, workspace);
}

void add_column_products(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<float> out, bool overwrite, Array<std::byte> workspace) {
  require_workspace(column_sums_workspace(g.rows, g.columns), workspace);
  dispatch<portable::add_column_products, cuda::add_column_products>(execution, x, g, shift, scale, out, overwrite,
                                                                     workspace);
}

void add_rows_by_id(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out, Array<std::byte> workspace) {
  require_workspace(rows_by_id_workspace(ids.size, out.columns), workspace);
  dispatch<portable::add_rows_by_id, cuda::add_rows_by_id>(execution, ids, g, first_row, out, workspace);
}

}  // namespace weft::kernels
