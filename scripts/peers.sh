#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the released packages that tests/peers drives, in pinned versions, into two virtual environments: transformers4
# (circuit-tracer and SAELens need it) and transformers5, which takes from the first what it does not replace, torch above all.
# Running it again changes nothing; an interruption leaves an environment that the tests skip and the next call completes.
#
#   bash scripts/peers.sh [DIR]       default .deps/peers; 2 GB on disk, with torch for CPUs
#   WEFT_TORCH_INDEX=URL              where torch for CPUs is (default https://download.pytorch.org/whl/cpu). If it has none, or cannot be
#                                     reached, torch is that of the package index: 3 GB of downloads and 7 GB on disk, with CUDA libraries
#   WEFT_PYTHON=FILE                  the interpreter, 3.11 or later (default /usr/bin/python3, else python3)
#
# Exit codes: 0 ready; 1 not installed, for example without network; 2 wrong arguments.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -le 1 && ${1:-} != -* ]] || { echo "peers.sh: takes one argument, a directory" >&2; exit 2; }
mkdir -p "${1:-$root/.deps/peers}"
place=$(cd "${1:-$root/.deps/peers}" && pwd -P)
torch_index=${WEFT_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
python=${WEFT_PYTHON:-/usr/bin/python3}
[[ -x $python ]] || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "peers.sh: $python is no Python 3.11 or later; name one in WEFT_PYTHON" >&2; exit 1; }
# Of two concurrent calls the second waits and then finds the environments.
exec {lock}>"$place/.lock"
flock "$lock"

# install NAME: the environment place/NAME of tests/peers/NAME.txt, unless it is complete with these versions and can be used.
install() {
  local name=$1 wanted=$root/tests/peers/$1.txt packages
  local pip=("$place/$name/bin/python" -m pip install --quiet --disable-pip-version-check)
  cmp -s "$wanted" "$place/$name/complete" && "$place/$name/bin/python" -c 'import h5py' 2>/dev/null && return 0
  echo "Installing $name: $(sed '/^#/d; /^$/Q' "$wanted" | tr '\n' ' ')"
  rm -f "$place/$name/complete"
  "$python" -m venv "$place/$name" || { echo "peers.sh: no virtual environment (package python3-venv)" >&2; exit 1; }
  packages=$("$place/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if [[ $name == transformers5 ]]; then
    # Relative, so that both can be moved together.
    echo "../../../../transformers4/${packages#"$place/$name/"}" >"$packages/transformers4.pth"
  elif [[ -n $torch_index ]] && ! "${pip[@]}" --retries 0 --timeout 20 --no-deps --index-url "$torch_index" \
      "$(grep '^torch==' "$wanted")" >"$place/$name.log" 2>&1; then
    echo "peers.sh: $torch_index has no torch for CPUs that can be installed here; that of the package index is taken, with CUDA libraries"
  fi
  if ! "${pip[@]}" -r "$wanted" >"$place/$name.log" 2>&1; then
    tail -n 15 "$place/$name.log" >&2
    echo "peers.sh: pip could not install $name (its last lines are above); it needs a package index, by network or as PIP_INDEX_URL names it, and space in $place" >&2
    exit 1
  fi
  cp "$wanted" "$place/$name/complete"
}

install transformers4
install transformers5
