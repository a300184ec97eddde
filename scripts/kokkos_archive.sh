#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Puts the pinned source archive of Kokkos (cmake/kokkos_archive.txt) into a folder and prints its path. The digest is
# checked before anything in the archive is used.
#
#   bash scripts/kokkos_archive.sh DIR
#   WEFT_KOKKOS_ARCHIVE=FILE   use this archive instead of downloading
#
# Exit codes: 0 done; 3 pip, which downloads it, is missing; 1 any other failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pin=$root/cmake/kokkos_archive.txt
destination=${1:?usage: kokkos_archive.sh DIR}
mkdir -p "$destination"

archive=${WEFT_KOKKOS_ARCHIVE:-}
if [[ -z $archive ]]; then
  for candidate in python3 /usr/bin/python3; do
    "$candidate" -m pip --version >/dev/null 2>&1 && python=$candidate && break
  done
  [[ -n ${python:-} ]] || exit 3
  echo "Downloading Kokkos (source archive of PyPI's pycompadre, by pip)" >&2
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary pycompadre --require-hashes \
    -r "$pin" -d "$destination" >&2 || {
    echo "kokkos_archive.sh: pip could not download the Kokkos archive (no network?); make a bundle on a machine with network access" \
      "(scripts/bundle.sh) and set WEFT_BUNDLE to it here" >&2
    exit 1
  }
  archive=$(find "$destination" -name 'pycompadre-*.tar.gz')
fi
digest=$(sed -n 's/.*--hash=sha256:\([0-9a-f]*\).*/\1/p' "$pin")
if ! echo "$digest  $archive" | sha256sum --check --status; then
  echo "kokkos_archive.sh: $archive is not the pinned archive (its sha256 differs from cmake/kokkos_archive.txt);" \
    "delete it and download it again" >&2
  exit 1
fi
[[ $archive -ef $destination/$(basename "$archive") ]] || cp "$archive" "$destination"
echo "$destination/$(basename "$archive")"
