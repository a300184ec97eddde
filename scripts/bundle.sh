#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Collects the sources of every library that is compiled into Weft (10 MB) in one folder, for a machine without network access
# that has compilers, MPI, HDF5, OpenBLAS, OpenSSL and perhaps CUDA, but not the header libraries. Runs on Debian or Ubuntu.
#
#   bash scripts/bundle.sh DIR        DIR must not exist yet
# On the other machine, after copying DIR and this repository:
#   WEFT_BUNDLE=DIR bash scripts/setup.sh [--cuda]                       # builds Kokkos from the bundle, installs nothing
#   cmake --preset cpu-release -DWEFT_BUNDLE=DIR && cmake --build build/cpu-release
#
# DIR contains archive/ (Kokkos, pinned), include/ (toml++, CLI11, spdlog, fmt, nlohmann-json, KISS FFT, doctest in this
# machine's versions),
# pcre2/ and utf8proc/ (headers and static libraries, for this machine's processor family), licences/, and contents.txt with the version of each; with
# cudnn/ (headers for attention by cuDNN) if scripts/setup.sh --cuda has fetched them here. An interrupted run does not create DIR.
#
# Exit codes: 0 done; 2 usage error, or a package is missing here; 1 any other failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: bash scripts/bundle.sh DIR" >&2
  exit 2
fi
if [[ -e $1 ]]; then
  echo "bundle.sh: $1 exists (a bundle is never mixed with another); choose another folder or remove it" >&2
  exit 2
fi
mkdir -p "$(dirname "$1")"
destination=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")

# Package, and its folder in /usr/include.
libraries=(
  "libtomlplusplus-dev toml++" "libcli11-dev CLI" "libspdlog-dev spdlog" "libfmt-dev fmt"
  "nlohmann-json3-dev nlohmann" "doctest-dev doctest" "libkissfft-dev kissfft"
)
for entry in "${libraries[@]}"; do
  read -r package folder <<<"$entry"
  if [[ ! -d /usr/include/$folder || ! -r /usr/share/doc/$package/copyright ]]; then
    echo "bundle.sh: /usr/include/$folder or its licence is missing (package $package);" \
      "bash scripts/setup.sh --tests installs it" >&2
    exit 2
  fi
done

# Package, its static library and its header; the folder of the bundle is named after the header.
static_libraries=("libpcre2-dev libpcre2-8.a pcre2" "libutf8proc-dev libutf8proc.a utf8proc")
for entry in "${static_libraries[@]}"; do
  read -r package archive_name _ <<<"$entry"
  if [[ ! -r $(dpkg -L "$package" 2>/dev/null | grep "/$archive_name\$" || true) ]]; then
    echo "bundle.sh: $archive_name is missing (package $package); bash scripts/setup.sh installs it" >&2
    exit 2
  fi
done

scratch=$(mktemp -d "$destination.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/include" "$scratch/licences"
archive=$(bash "$root/scripts/kokkos_archive.sh" "$scratch/archive") || {
  code=$?
  if [[ $code -eq 3 ]]; then
    echo "bundle.sh: pip, which downloads Kokkos, is missing (package python3-pip); install it or set WEFT_KOKKOS_ARCHIVE" >&2
    exit 2
  fi
  exit "$code"
}
# The licence of Kokkos, from its archive.
tar -xzf "$archive" -C "$scratch" --strip-components=1 --wildcards '*/kokkos/LICENSE' '*/kokkos/Copyright.txt'
cat "$scratch"/kokkos/{LICENSE,Copyright.txt} >"$scratch/licences/kokkos"
rm -r "$scratch/kokkos"

system=$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release)
{
  echo "Libraries compiled into Weft. include/ from packages of $system:"
  for entry in "${libraries[@]}"; do
    read -r package folder <<<"$entry"
    cp -r "/usr/include/$folder" "$scratch/include/"
    cp -L "/usr/share/doc/$package/copyright" "$scratch/licences/$folder"
    printf '  %-8s %s %s\n' "$folder" "$package" "$(dpkg-query -W -f '${Version}' "$package")"
  done
  echo "Linked statically:"
  for entry in "${static_libraries[@]}"; do
    read -r package archive_name folder <<<"$entry"
    mkdir "$scratch/$folder"
    cp "/usr/include/$folder.h" "$(dpkg -L "$package" | grep "/$archive_name\$")" "$scratch/$folder/"
    cp -L "/usr/share/doc/$package/copyright" "$scratch/licences/$folder"
    printf '  %-8s %s %s\n' "$folder" "$package" "$(dpkg-query -W -f '${Version}' "$package")"
  done
  if [[ -d $root/.deps/cudnn ]]; then
    cp -r "$root/.deps/cudnn" "$scratch/cudnn"
    cp -r "$scratch"/cudnn/licences/. "$scratch/licences/"
    echo "cudnn/, headers for attention by cuDNN:"
    sed -n 's/ --hash.*//; s/^nvidia/  nvidia/p' "$root/cmake/cudnn_archives.txt"
  fi
  echo "archive/ (Kokkos is folder kokkos/ in it):"
  (cd "$scratch/archive" && sha256sum -- *) | sed 's/^/  /'
} >"$scratch/contents.txt"
chmod -R u=rwX,go=rX "$scratch"
mv -T "$scratch" "$destination"
trap - EXIT
cat "$destination/contents.txt"
