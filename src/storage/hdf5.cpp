// SPDX-License-Identifier: Apache-2.0
#include "storage/hdf5.hpp"

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/fault.hpp"
#include "base/file.hpp"

namespace weft::storage {
namespace {

constexpr const char* kRewrite =
    "rewrite it with libver bounds up to v110 (h5py: libver=(\"v110\", \"v110\")), or without compression";

std::recursive_mutex& mutex() {
  static std::recursive_mutex m;
  return m;
}

/// HDF5 1.10 reads what it has freed when an object is closed after an operation on it found no memory: valgrind shows
/// it for a property list whose H5Pset_chunk failed. From the first such failure on, nothing is closed.
std::atomic<bool> without_memory = false;

/// Memory that must be left before work: see Lock.
constexpr std::size_t kRoom = std::size_t{1} << 20;

/// Why the library failed: the innermost message of its error stack, and the errno of the system call, or 0.
struct Reason {
  std::string text = "no reason given by HDF5";
  int number = 0;
};

Reason reason() {
  Reason found;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* entry, void* data) -> herr_t {
        if (n == 0 && entry->desc != nullptr) *static_cast<std::string*>(data) = entry->desc;
        if (entry->maj_num == H5E_RESOURCE && (entry->min_num == H5E_NOSPACE || entry->min_num == H5E_CANTALLOC))
          without_memory = true;
        return 0;
      },
      &found.text);
  H5Eclear2(H5E_DEFAULT);
  std::string& text = found.text;
  if (text.find("version number") != text.npos) {
    text += fmt::format("; it was written by a newer HDF5 than this program's {}: {}", hdf5_version(), kRewrite);
    return found;
  }
  // Keep the quoted part of "file write failed: time = ..., errno = 28, error message = 'No space left on device',
  // ...".
  constexpr std::string_view kNumber = "errno = ", kMark = "error message = '";
  if (const std::size_t at = text.find(kNumber); at != text.npos)
    std::from_chars(text.data() + at + kNumber.size(), text.data() + text.size(), found.number);
  if (const std::size_t at = text.find(kMark); at != text.npos)
    if (const std::size_t end = text.find('\'', at + kMark.size()); end != text.npos)
      text = text.substr(at + kMark.size(), end - at - kMark.size());
  return found;
}

/// Throws Error(io), or SystemError(io) if a system call failed.
[[noreturn]] void fail(std::string_view what) {
  const Reason why = reason();
  std::string message = fmt::format("{} failed ({})", what, why.text);
  if (why.number != 0) throw SystemError(ExitCode::io, why.number, std::move(message));
  throw Error(ExitCode::io, std::move(message));
}

/// Files are opened and created without HDF5's locks: file systems without a lock service (NFS, Lustre) report an error
/// for them, and a run has its own lease. The environment variable HDF5_USE_FILE_LOCKING has precedence.
void without_locks([[maybe_unused]] hid_t access) {
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  check(H5Pset_file_locking(access, false, true), "disabling file locks");
#endif
}

/// What to do about a file that could not be locked, as with an older HDF5 or a setting of the environment.
const char* lock_hint(int number) {
  switch (number) {
    case EAGAIN:
      return "; another program has it open for writing";
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      return "; its file system has no locks: set the environment variable HDF5_USE_FILE_LOCKING=FALSE";
    default:
      return "";
  }
}

}  // namespace

Lock::Lock(bool needs_memory) : lock_(mutex()) {
  if (void* volatile room = needs_memory ? std::malloc(kRoom) : nullptr; room != nullptr)
    std::free(room);
  else if (needs_memory)
    throw std::bad_alloc();
  static const bool started = [] {
    H5dont_atexit();
    H5open();
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    return true;
  }();
  static_cast<void>(started);
  // The error stack and its printing are per thread in a thread-safe library.
  thread_local const bool quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  static_cast<void>(quiet);
}

Handle::Handle(hid_t id, herr_t (*close)(hid_t), std::string_view what) : id_(id), close_(close), what_(what) {
  if (id < 0) fail(what);
}

Handle::Handle(Handle&& other) noexcept
    : id_(std::exchange(other.id_, -1)), close_(other.close_), what_(std::move(other.what_)) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  std::swap(id_, other.id_);
  std::swap(close_, other.close_);
  std::swap(what_, other.what_);
  return *this;
}

Handle::~Handle() {
  if (id_ < 0 || without_memory) return;
  const Lock lock(false);
  close_(id_);
  H5Eclear2(H5E_DEFAULT);
}

void Handle::close() {
  if (id_ < 0) return;
  const Lock lock;
  if (close_(std::exchange(id_, -1)) < 0) fail("closing after " + what_);
}

void check(herr_t status, std::string_view what) {
  if (status < 0) fail(what);
}

Handle open_file(const std::filesystem::path& path) {
  open_regular(path);
  const Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "creating file properties");
  without_locks(access);
  const hid_t id = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access);
  if (id < 0) {
    const Reason why = reason();
    std::string message = fmt::format("{}: cannot be opened ({}){}", path.string(), why.text, lock_hint(why.number));
    if (why.number != 0) throw SystemError(ExitCode::io, why.number, std::move(message));
    throw Error(ExitCode::io, std::move(message));
  }
  return Handle(id, H5Fclose, path.string());
}

Handle open_data_file(const std::filesystem::path& path) {
  open_regular(path, ExitCode::data);
  try {
    return open_file(path);
  } catch (const SystemError&) {
    throw;
  } catch (const Error& failure) {
    const std::string why = failure.what();
    throw error(ExitCode::data, "{}{}", why, damage_question(why).empty() ? "" : "; is the file truncated?");
  }
}

std::string_view damage_question(std::string_view why) {
  return why.find("newer HDF5") == why.npos ? "; is the file damaged?" : "";
}

Handle creation_access(std::int64_t metadata_bytes) {
  const Lock lock;
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "creating file properties");
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "setting HDF5 version bounds");
  without_locks(access);
  check(H5Pset_meta_block_size(access, static_cast<hsize_t>(metadata_bytes)), "setting the size of a metadata block");
  return access;
}

Handle create_file(const std::filesystem::path& path, const Handle& access) {
  const Lock lock;
  const Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "creating file properties");
  check(H5Pset_obj_track_times(creation, false), "disabling time stamps");  // files of the same content are identical
  Handle file(H5Fcreate(path.c_str(), H5F_ACC_EXCL, creation, access), H5Fclose, "creating " + path.string());
  fault::point("output-open");
  return file;
}

Handle create_file(const std::filesystem::path& path, std::int64_t metadata_bytes) {
  return create_file(path, creation_access(metadata_bytes));
}

Handle bf16_type() {
  const Lock lock;
  Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, "creating the bf16 type");
  check(H5Tset_fields(type, 15, 7, 8, 0, 7), "creating the bf16 type");
  check(H5Tset_precision(type, 16), "creating the bf16 type");
  check(H5Tset_size(type, 2), "creating the bf16 type");
  check(H5Tset_ebias(type, 127), "creating the bf16 type");
  return type;
}

Handle half_type() {
  const Lock lock;
  Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, "creating the half type");
  check(H5Tset_fields(type, 15, 10, 5, 0, 10), "creating the half type");
  check(H5Tset_precision(type, 16), "creating the half type");
  check(H5Tset_size(type, 2), "creating the half type");
  check(H5Tset_ebias(type, 15), "creating the half type");
  return type;
}

bool scalar_of(hid_t type, kernels::Scalar& scalar) {
  using kernels::Scalar;
  const Lock lock;
  const H5T_class_t kind = H5Tget_class(type);
  const std::size_t size = H5Tget_size(type);
  if (size > 1 && H5Tget_order(type) != H5T_ORDER_LE) return false;
  if (kind == H5T_FLOAT) {
    // Compare fields: HDF5 2 has other predefined types for the same bits.
    std::size_t sign, exponent_at, exponent_bits, mantissa_at, mantissa_bits;
    if (H5Tget_fields(type, &sign, &exponent_at, &exponent_bits, &mantissa_at, &mantissa_bits) < 0) return false;
    const std::size_t bias = H5Tget_ebias(type);
    const auto is = [&](std::size_t bytes, std::size_t e, std::size_t m, std::size_t b) {
      return size == bytes && sign == bytes * 8 - 1 && exponent_bits == e && mantissa_bits == m && mantissa_at == 0 &&
             exponent_at == m && bias == b;
    };
    if (is(2, 8, 7, 127))
      scalar = Scalar::bf16;
    else if (is(2, 5, 10, 15))
      scalar = Scalar::fp16;
    else if (is(4, 8, 23, 127))
      scalar = Scalar::fp32;
    else if (is(8, 11, 52, 1023))
      scalar = Scalar::fp64;
    else
      return false;
    return true;
  }
  if (kind != H5T_INTEGER) return false;
  const bool with_sign = H5Tget_sign(type) == H5T_SGN_2;
  if (size == 1 && !with_sign)
    scalar = Scalar::u8;
  else if (size == 2)
    scalar = with_sign ? Scalar::i16 : Scalar::u16;
  else if (size == 4)
    scalar = with_sign ? Scalar::i32 : Scalar::u32;
  else if (size == 8)
    scalar = with_sign ? Scalar::i64 : Scalar::u64;
  else
    return false;
  return true;
}

std::string type_text(hid_t type) {
  const Lock lock;
  const std::size_t bits = 8 * H5Tget_size(type);
  std::string name;
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
      name = fmt::format("float{}", bits);
      break;
    case H5T_INTEGER:
      name = fmt::format("{}int{}", H5Tget_sign(type) == H5T_SGN_2 ? "" : "u", bits);
      break;
    case H5T_STRING:
      return "text";
    case H5T_COMPOUND:
      return "a compound type (complex numbers?)";
    case H5T_ENUM:
      return "an enumeration (booleans?)";
    default:
      return "neither floating-point nor integer";
  }
  return name + (bits > 8 && H5Tget_order(type) == H5T_ORDER_BE ? " big-endian" : "");
}

Handle type_of(kernels::Scalar scalar) {
  using kernels::Scalar;
  const Lock lock;
  const auto copy = [](hid_t predefined) { return Handle(H5Tcopy(predefined), H5Tclose, "copying a type"); };
  switch (scalar) {
    case Scalar::fp32:
      return copy(H5T_IEEE_F32LE);
    case Scalar::fp16:
      return half_type();
    case Scalar::bf16:
      return bf16_type();
    case Scalar::fp64:
      return copy(H5T_IEEE_F64LE);
    case Scalar::u8:
      return copy(H5T_STD_U8LE);
    case Scalar::u16:
      return copy(H5T_STD_U16LE);
    case Scalar::i16:
      return copy(H5T_STD_I16LE);
    case Scalar::i32:
      return copy(H5T_STD_I32LE);
    case Scalar::i64:
      return copy(H5T_STD_I64LE);
    case Scalar::u32:
      return copy(H5T_STD_U32LE);
    case Scalar::u64:
      return copy(H5T_STD_U64LE);
  }
  throw error(ExitCode::internal, "no HDF5 type for scalar {}", static_cast<int>(scalar));
}

bool is_hard_link(hid_t parent, const std::string& name) {
  const Lock lock;
  H5L_info_t info;
  return H5Lget_info(parent, name.c_str(), &info, H5P_DEFAULT) >= 0 && info.type == H5L_TYPE_HARD;
}

std::vector<std::int64_t> shape_of(hid_t dataset) {
  const Lock lock;
  const Handle space(H5Dget_space(dataset), H5Sclose, "reading a dataset's shape");
  const int rank = H5Sget_simple_extent_ndims(space);
  check(rank, "reading a dataset's shape");
  std::vector<hsize_t> extent(static_cast<std::size_t>(rank));
  check(H5Sget_simple_extent_dims(space, extent.data(), nullptr), "reading a dataset's shape");
  return {extent.begin(), extent.end()};
}

void write_attribute(hid_t object, const std::string& name, std::string_view text) {
  const Lock lock;
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "creating a string type");
  check(H5Tset_size(type, std::max<std::size_t>(1, text.size())), "creating a string type");
  check(H5Tset_cset(type, H5T_CSET_UTF8), "creating a string type");
  check(H5Tset_strpad(type, H5T_STR_NULLPAD), "creating a string type");
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose, "creating a scalar dataspace");
  Handle attribute(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                   "creating attribute " + name);
  const std::string padded = text.empty() ? std::string(1, '\0') : std::string(text);
  check(H5Awrite(attribute, type, padded.data()), "writing attribute " + name);
  attribute.close();
}

void write_attribute(hid_t object, const std::string& name, std::int64_t value) {
  const Lock lock;
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose, "creating a scalar dataspace");
  Handle attribute(H5Acreate2(object, name.c_str(), H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                   "creating attribute " + name);
  check(H5Awrite(attribute, H5T_NATIVE_INT64, &value), "writing attribute " + name);
  attribute.close();
}

bool has_attribute(hid_t object, const std::string& name) {
  const Lock lock;
  return H5Aexists(object, name.c_str()) > 0;
}

std::string read_text_attribute(hid_t object, const std::string& name) {
  constexpr std::size_t kLargest = std::size_t{1} << 20;
  const Lock lock;
  const Handle attribute(H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose, "opening attribute " + name);
  const Handle type(H5Aget_type(attribute), H5Tclose, "reading the type of attribute " + name);
  const Handle space(H5Aget_space(attribute), H5Sclose, "reading the shape of attribute " + name);
  if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1)
    throw error(ExitCode::data, "attribute {} is not a single string; was the file written by another program?", name);
  if (H5Tis_variable_str(type) > 0) {
    char* text = nullptr;
    check(H5Aread(attribute, type, &text), "reading attribute " + name);
    std::string copy = text == nullptr ? "" : text;
    H5free_memory(text);
    return copy;
  }
  const std::size_t size = H5Tget_size(type);
  if (size > kLargest)
    throw error(ExitCode::data, "attribute {} claims {} bytes (at most {} are accepted)", name, size, kLargest);
  std::string text(size, '\0');
  check(H5Aread(attribute, type, text.data()), "reading attribute " + name);
  return text.substr(0, text.find('\0'));
}

std::int64_t read_integer_attribute(hid_t object, const std::string& name) {
  const Lock lock;
  const Handle attribute(H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose, "opening attribute " + name);
  const Handle type(H5Aget_type(attribute), H5Tclose, "reading the type of attribute " + name);
  const Handle space(H5Aget_space(attribute), H5Sclose, "reading the shape of attribute " + name);
  if (H5Tget_class(type) != H5T_INTEGER || H5Tget_size(type) > sizeof(std::int64_t) ||
      H5Sget_simple_extent_npoints(space) != 1)
    throw error(ExitCode::data, "attribute {} is not a single integer; was the file written by another program?", name);
  std::int64_t value = 0;
  check(H5Aread(attribute, H5T_NATIVE_INT64, &value), "reading attribute " + name);
  return value;
}

std::string hdf5_version() {
  unsigned major = 0, minor = 0, release = 0;
  const Lock lock;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

}  // namespace weft::storage
