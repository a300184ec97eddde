// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a model, declared once. A model is a list of ParameterSpec; from this list come
//
//   storage and kernel views    class Parameters
//   initial values              Parameters::initialise
//   checkpoints, re-sharding    Parameters::add_to (checkpoint::Registry)
//   memory plan                 state_bytes, checkpoint_bytes
//   inspection, report          tensors_of
//
// so that a new parameter (threshold vector, low-rank factor, transformer block) is a new entry of a list and no code.
//
// Storage. A parameter has one or two axes. One axis: a vector, fp32 with fp32 moments. Two axes: a matrix in the
// storage type of a StorageType (kernels/optimize/parameter_rows.hpp). At most one axis is cut over a process axis,
// into contiguous parts. The cut axis is the first axis in memory and in checkpoints: a matrix [out, in] that is cut
// over `in` is stored as its transpose [in, out]. Parts are therefore whole rows, and blocks of 8-bit moments,
// ownership on the data axis and checkpoints need no second case. "Row" always means a row of the stored array, or one
// element of a vector.
//
// On a rank. `held` rows: the part of this rank's coordinate on the cutting axis, all rows if none cuts. Weights of
// held rows are complete on every rank of the data axis, unless they are gathered while they are read (WeightSlots).
// `owned` rows: those that this rank updates, with their moments and further state (enum Update). `stored` rows: those
// whose weights this rank keeps, held or owned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "device/memory.hpp"
#include "kernels/optimize/initial_values.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/random.hpp"
#include "model/moments.hpp"
#include "parallel/grid.hpp"

namespace weft::model {

/// Bytes of the weights, and of both moments with their scales, of one matrix in its storage type.
std::int64_t weight_bytes(kernels::StorageType, std::int64_t rows, std::int64_t columns);
std::int64_t moment_bytes(kernels::StorageType, std::int64_t rows, std::int64_t columns, std::int64_t segment);

/// Array axis `axis` (0 or 1) is cut over the process axis `over`, a constant of parallel/grid.hpp; "" cuts nothing.
/// `unit`, a divisor of the extent: that many rows (columns, with axis = 1) stay together, such as those of a head.
struct Cut {
  int axis = 0;
  std::string_view over = {};
  std::int64_t unit = 1;
};

/// Which ranks of the data axis update a parameter.
enum class Update {
  own_rows,    ///< each its part of the held rows; new weights are then gathered. Moments are cut likewise
  everywhere,  ///< each all held rows, from the same gradient: nothing is gathered. For small vectors
};

/// Fresh values: the same on any grid.
using kernels::Initial;
inline Initial constant(double value) { return {Initial::Kind::constant, value, {}}; }
inline Initial uniform(double bound, kernels::Purpose purpose) { return {Initial::Kind::uniform, bound, purpose}; }
inline Initial normal(double deviation, kernels::Purpose purpose) {
  return {Initial::Kind::normal, deviation, purpose};
}

/// Further state of a parameter, one value per owned row (a dead-feature clock). Its tensor is named `name` in the
/// parameter's directory: "encoder_0/bias" with "tokens_since_fired" gives "encoder_0/tokens_since_fired".
struct RowState {
  std::string name;
  kernels::Scalar type = kernels::Scalar::i64;
};

struct ParameterSpec {
  std::string name;  ///< name of the weights in checkpoints; those of its other tensors are "NAME.first_moment", …
  std::vector<std::int64_t> shape;  ///< global, as in the model's formulas: [n] or [rows, columns]
  Cut cut = {};
  Update update = Update::own_rows;
  std::optional<kernels::StorageType> storage = {};  ///< storage type of a matrix, instead of that of the run
  /// Codes of a frozen matrix. A block lies in one row, so that no cut divides it.
  kernels::Packing packing = kernels::Packing::none;
  std::int64_t segment = 0;  ///< stored columns that a block of 8-bit moments does not cross; 0: all of a row
  Initial initial = {};
  /// Global index of the first element. Keys the initial values and stochastic rounding: ranges of matrices must not
  /// overlap (`number_elements`).
  std::uint64_t first_element = 0;
  /// Keeps its values: no gradient, no moments, no update. Its weights are in checkpoints as those of all.
  bool frozen = false;
  /// A vector that nothing cuts, used with one that "tensor" cuts: each rank of this axis has a part of its gradient.
  bool partial_gradient = false;
  bool weight_decay = false;  ///< decoupled weight decay applies. By convention to matrices, not to vectors
  /// Parameters of one group are contiguous in one allocation, in list order; "": an allocation of its own.
  std::string group = {};
  /// The weights of a matrix without a group are followed in memory by rows of zeros, up to a multiple of this. They
  /// are no rows of the parameter: not updated, not in checkpoints. On a GPU products over 50,257 rows take 8 times as
  /// long as those over 50,304.
  std::int64_t row_multiple = 1;
  std::size_t unit = 0;          ///< part of the model that is computed as a whole (model/unit_memory.hpp)
  std::string export_name = {};  ///< in files of other projects; "" = `name`
  std::vector<RowState> row_state = {};

  bool is_matrix() const { return shape.size() == 2; }
  /// Stored as the transpose: the second axis is cut.
  bool transposed() const { return is_matrix() && cut.axis == 1 && !cut.over.empty(); }
  /// Rows and columns of the stored array; a vector has one column.
  std::int64_t rows() const { return shape[transposed() ? 1 : 0]; }
  std::int64_t columns() const { return is_matrix() ? shape[transposed() ? 0 : 1] : 1; }
  std::int64_t elements() const { return rows() * columns(); }
  std::int64_t rows_in_memory(std::int64_t held) const {
    return (held + row_multiple - 1) / row_multiple * row_multiple;
  }
  /// Shape in memory (of the whole parameter) and in checkpoints.
  std::vector<std::int64_t> stored_shape() const;
};

/// Gives the elements of all parameters consecutive global indices, in list order.
void number_elements(std::span<ParameterSpec> specs);
/// Elements of all parameters; of those that are trained.
std::int64_t elements_of(std::span<const ParameterSpec> specs);
std::int64_t trained_elements_of(std::span<const ParameterSpec> specs);

/// The tensors of a model in the order of its checkpoints.
std::vector<checkpoint::TensorEntry> tensors_of(std::span<const ParameterSpec> specs, kernels::StorageType, Moments);
/// The first tensor of `expected` that is missing in `found` or has another type or shape there, with the reason:
/// "decoder_0/weight is missing"; "" if all are there. Further tensors are no difference.
std::string first_difference(std::span<const checkpoint::TensorEntry> found,
                             std::span<const checkpoint::TensorEntry> expected);

/// Memory of one rank.
struct StateBytes {
  std::int64_t weights = 0;
  std::int64_t moments = 0;
  std::int64_t row_state = 0;
  std::int64_t conversion = 0;  ///< buffer through which weights kept as two planes pass to and from checkpoints
  std::int64_t host = 0;        ///< optimizer state in host memory (Moments::on_host), not in the others

  /// Bytes of the memory where the kernels run.
  std::int64_t total() const { return weights + moments + row_state + conversion; }
  bool operator==(const StateBytes&) const = default;
};
/// Rows whose weights a rank keeps.
enum class StoredWeights {
  of_held_rows,
  of_owned_rows,  ///< the others are gathered while they are read (WeightSlots)
};
/// What Parameters allocates on a rank; needs no device and no MPI, so the grid may be that of another machine.
StateBytes state_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t rank,
                       kernels::StorageType, kernels::Backend, Moments,
                       StoredWeights stored = StoredWeights::of_held_rows);
/// Bytes of the state on the rank with the largest total.
StateBytes largest_state_bytes(std::span<const ParameterSpec> specs, const parallel::GridShape&, kernels::StorageType,
                               kernels::Backend, Moments, StoredWeights stored = StoredWeights::of_held_rows);
/// Payload of one checkpoint, all ranks together.
std::int64_t checkpoint_bytes(std::span<const ParameterSpec> specs, kernels::StorageType);

/// One of the arrays that a parameter consists of: [rows, columns].
struct Plane {
  /// Weights are there for the held rows, the others for the owned rows.
  enum class Part { weight, moment, row_state } part = Part::weight;
  /// "weight", "weight_rest", "block_scales", "row_scales", "first_moment", "second_scale", …, or the name of a
  /// RowState
  std::string key;
  kernels::Scalar type = kernels::Scalar::fp32;
  std::int64_t columns = 1;
};
/// True if the plane is in host memory.
bool is_on_host(const ParameterSpec&, const Plane&, Moments);
/// All planes of a parameter. A checkpoint holds those of the portable backend, so that either backend reads it.
std::vector<Plane> planes_of(const ParameterSpec&, kernels::StorageType, kernels::Backend, Moments);
/// Which planes ranks receive of rows that others own, for fp32 weights that are stored as two planes
/// (ParameterRows::weight_rest): all; or the bf16 plane, if nothing else is read of these rows. Checkpoints contain
/// owned rows alone.
enum class GatheredWeights { all, upper_plane };
/// The planes of a matrix that are read of its held rows, in the order of `planes_of`: of a packed one codes and both
/// scales, of other weights that of products or both.
std::vector<Plane> read_planes(const ParameterSpec&, kernels::StorageType, kernels::Backend, GatheredWeights);

/// The parts of a parameter on one rank.
struct RowParts {
  parallel::Range held, owned;  ///< global rows; `owned` lies inside `held`
  bool writes = true;           ///< the rank writes its owned rows; of ranks with the same owned rows, one does
};
RowParts row_parts(const ParameterSpec&, const parallel::GridShape&, std::int64_t rank);
/// The held rows of the rank that holds most.
std::int64_t most_held_rows(const ParameterSpec&, const parallel::GridShape&);

/// The memory of all parameters on one rank, with views for kernels. Everything is zero until `initialise` or a
/// checkpoint fills it. Parameters are numbered in the order of their specs.
class Parameters {
 public:
  /// The storage of `rank` of a grid. Allocates on the device. gathered: by parameter and plane of `read_planes`, where
  /// the weights of its held rows are gathered if it is a matrix (WeightSlots); empty: the rank keeps them. Throws
  /// Error(internal) for specs that contradict each other.
  Parameters(std::vector<ParameterSpec> specs, kernels::StorageType, const parallel::GridShape&, std::int64_t rank,
             const kernels::Execution&, Moments, std::vector<std::vector<std::byte*>> gathered = {});

  /// Fills the weights with their initial values: of all stored rows, the same on any grid.
  void initialise(std::uint64_t seed);

  /// Registers every tensor of `tensors_of`. The registry refers to this object's memory, not to the object.
  void add_to(checkpoint::Registry&) const;

  std::span<const ParameterSpec> specs() const { return specs_; }
  std::size_t size() const { return specs_.size(); }
  Moments moments() const { return moments_; }
  /// Number of the parameter of this name. Throws Error(internal) if there is none.
  std::size_t index(std::string_view name) const;
  const RowParts& parts(std::size_t parameter) const { return parts_[parameter]; }

  /// A matrix: all held rows, [held, columns]. It has moments if all held rows are owned. In a WeightSlot only what
  /// products read is there, while the unit is used.
  const kernels::ParameterRows& matrix(std::size_t parameter) const;
  /// Type of the plane that products read; of a packed matrix that of its codes.
  kernels::Scalar read_type(std::size_t parameter) const { return planes_[parameter].front().plane.type; }
  /// A plane that products read of a matrix whose held rows are gathered.
  struct Gathered {
    const std::byte* owned;  ///< the owned rows
    std::byte* held;         ///< where all held rows are gathered
    std::int64_t row_bytes;
  };
  std::vector<Gathered> gathered(std::size_t parameter) const;
  /// Rows of a matrix or vector whose weights this rank keeps, and those of a matrix.
  parallel::Range stored(std::size_t parameter) const {
    return is_gathered(parameter) ? parts_[parameter].owned : parts_[parameter].held;
  }
  const kernels::ParameterRows& stored_matrix(std::size_t parameter) const {
    return is_gathered(parameter) ? owned_matrix(parameter) : matrix(parameter);
  }
  /// The owned rows of a matrix with their moments. Row 0 is held row owned.begin - held.begin. With Moments::on_host
  /// its state is in host memory, which kernels of a GPU reach, slowly.
  const kernels::ParameterRows& owned_matrix(std::size_t parameter) const;
  /// Weights of the held rows and the rows of zeros after them (ParameterSpec::row_multiple).
  std::int64_t rows_in_memory(std::size_t parameter) const {
    return specs_[parameter].rows_in_memory(parts_[parameter].held.size());
  }
  /// A vector: all held elements.
  const kernels::ParameterVector& vector(std::size_t parameter) const;
  const kernels::ParameterVector& owned_vector(std::size_t parameter) const;

  /// The weights of a group of matrices [sum of held rows, columns], or of vectors of one length [vectors, held] fp32.
  /// Of fp32 matrices on the CUDA backend these are the upper halves (ParameterRows::weight).
  kernels::AnyMatrix group(std::string_view name) const;
  /// The row state of that name of the vectors or matrices of a group [members, owned]; T must be its type.
  template <class T>
  kernels::Array<T> group_state(std::string_view group, std::string_view state) const {
    const kernels::Array<std::byte> bytes = group_state_bytes(group, state, sizeof(T));
    return {reinterpret_cast<T*>(bytes.data), bytes.size / static_cast<std::int64_t>(sizeof(T))};
  }

  /// What is allocated.
  const StateBytes& bytes() const { return bytes_; }

 private:
  struct View {
    kernels::ParameterRows rows, owned_rows;        // views of a matrix
    kernels::ParameterVector vector, owned_vector;  // views of a vector
  };
  bool is_gathered(std::size_t parameter) const { return !gathered_.empty() && specs_[parameter].is_matrix(); }
  void allocate(std::span<const std::size_t> members);
  View view_of(std::size_t parameter) const;
  std::vector<std::size_t> members_of(std::string_view group) const;
  std::byte* data(std::size_t parameter, std::string_view key) const;  // nullptr if there is no such plane
  kernels::Array<std::byte> group_state_bytes(std::string_view group, std::string_view state,
                                              std::size_t element) const;
  void add_split_weights_to(checkpoint::Registry&, std::size_t parameter, checkpoint::Tensor) const;
  void fill(std::size_t parameter, std::uint64_t seed);

  struct Placed {
    Plane plane;
    std::byte* data = nullptr;
  };

  std::vector<ParameterSpec> specs_;
  kernels::StorageType storage_;
  kernels::Execution execution_;
  Moments moments_;
  const std::vector<std::vector<std::byte*>> gathered_;
  std::vector<RowParts> parts_;  // the following three: by parameter
  std::vector<std::vector<Placed>> planes_;
  std::vector<View> views_;
  std::vector<device::Buffer<std::byte>> memory_;
  std::vector<device::HostBuffer<std::byte>> host_memory_;
  device::Buffer<float> conversion_;
  StateBytes bytes_;
};

}  // namespace weft::model
