#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Puts the headers for attention by cuDNN into a folder, which is created complete or not at all: cudnn-frontend from its
# pinned wheel, those of cuDNN from this machine (next to nvcc, or /usr/include) or else from its pinned wheel (370 MB, of
# which 1 MB is kept). The digests (cmake/cudnn_archives.txt) are checked by pip. The library itself is not needed to build.
#
#   bash scripts/cudnn_headers.sh DIR     include/ and licences/ in DIR
#
# Exit codes: 0 done; 3 pip, which downloads them, is missing; 1 any other failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
destination=${1:?usage: cudnn_headers.sh DIR}
mkdir -p "$(dirname "$destination")"
scratch=$(mktemp -d "$destination.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/result/include" "$scratch/result/licences"

for candidate in python3 /usr/bin/python3; do
  "$candidate" -m pip --version >/dev/null 2>&1 && python=$candidate && break
done
[[ -n ${python:-} ]] || exit 3

# fetch PACKAGE FOLDER-OF-HEADERS: the wheel for one version of Python, whatever the one here: headers are the same in all.
fetch() {
  local package=$1 headers=$2
  grep "^$package==" "$root/cmake/cudnn_archives.txt" >"$scratch/pin.txt"
  echo "Downloading the headers of $package" >&2
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
    --implementation cp --abi cp311 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --require-hashes -r "$scratch/pin.txt" -d "$scratch/$package" >&2 || {
    echo "cudnn_headers.sh: pip could not download $package (no network?)" >&2
    exit 1
  }
  "$python" - "$scratch/$package" "$headers/" "$scratch/result" "$package" <<'PYTHON'
import pathlib, sys, zipfile
folder, headers, result, package = sys.argv[1:]
wheel = zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl")))
for name in wheel.namelist():
    if name.startswith(headers) and name.endswith((".h", ".hpp")):
        target = pathlib.Path(result) / "include" / name[len(headers):]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(name))
    elif ".dist-info/" in name and "licen" in name.lower() and not name.endswith("/"):
        (pathlib.Path(result) / "licences" / package).write_bytes(wheel.read(name))
PYTHON
  rm -r "${scratch:?}/$package"
}

fetch nvidia-cudnn-frontend include
installed=()
command -v nvcc >/dev/null && installed+=("$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")/include")
for folder in "${installed[@]}" /usr/include /usr/include/x86_64-linux-gnu; do
  if [[ -r $folder/cudnn_backend.h ]]; then
    cp -L "$folder"/cudnn*.h "$scratch/result/include/"
    break
  fi
done
[[ -r $scratch/result/include/cudnn_backend.h ]] || fetch nvidia-cudnn-cu13 nvidia/cudnn/include
chmod -R u=rwX,go=rX "$scratch/result"
rm -rf "$destination"
mv -T "$scratch/result" "$destination"
