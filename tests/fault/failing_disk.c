// SPDX-License-Identifier: Apache-2.0
//
// A disk that fails once: preloaded (LD_PRELOAD), it makes one read, write or fsync of a file below a folder "checkpoints" fail with
// EIO and leaves every other call alone. Used by soak.py.
//
//   WEFT_EIO=RANK:N:MARK   the N-th such call of this rank fails; the file MARK is then created
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls;

static int fails(int file) {
  const char* order = getenv("WEFT_EIO");
  if (order == NULL) return 0;
  const char* rank = getenv("OMPI_COMM_WORLD_RANK");
  char mark[512], link[64], path[4096];
  long own = 0, number = 0;
  if (sscanf(order, "%ld:%ld:%511s", &own, &number, mark) != 3 || own != (rank == NULL ? 0 : atol(rank))) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  if (strstr(path, "/checkpoints/") == NULL || atomic_fetch_add(&calls, 1) + 1 != number) return 0;
  close(open(mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  errno = EIO;
  return 1;
}

#define FAILING(result, name, parameters, arguments)                                     \
  result name parameters {                                                               \
    static result(*real) parameters;                                                     \
    if (real == NULL) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);              \
    return fails(file) ? (result)-1 : real arguments;                                    \
  }

FAILING(ssize_t, read, (int file, void* data, size_t size), (file, data, size))
FAILING(ssize_t, write, (int file, const void* data, size_t size), (file, data, size))
FAILING(ssize_t, pread, (int file, void* data, size_t size, off_t at), (file, data, size, at))
FAILING(ssize_t, pread64, (int file, void* data, size_t size, off64_t at), (file, data, size, at))
FAILING(ssize_t, pwrite, (int file, const void* data, size_t size, off_t at), (file, data, size, at))
FAILING(ssize_t, pwrite64, (int file, const void* data, size_t size, off64_t at), (file, data, size, at))
FAILING(int, fsync, (int file), (file))
FAILING(int, fdatasync, (int file), (file))
