#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the released packages that tests/peers drives, in pinned versions, into two virtual environments: transformers4
# (circuit-tracer and SAELens need it) and transformers5, which takes from the first what it does not replace, torch above all.
# Running it again changes nothing; an interruption leaves an environment that the tests skip and the next call makes anew.
#
#   bash scripts/peers.sh [DIR]       default .deps/peers; downloads about 3 GB, of which the CUDA libraries of torch are most. Where pip
#                                     finds a build of torch for CPUs (its settings, such as PIP_EXTRA_INDEX_URL), much less
#   WEFT_PYTHON=FILE                  the interpreter, 3.10 or later (default /usr/bin/python3, else python3)
#
# Exit codes: 0 ready; 1 not installed, for example without network.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -le 1 && ${1:-} != -* ]] || { echo "peers.sh: takes one argument, a directory" >&2; exit 2; }
mkdir -p "${1:-$root/.deps/peers}"
place=$(cd "${1:-$root/.deps/peers}" && pwd)
python=${WEFT_PYTHON:-/usr/bin/python3}
[[ -x $python ]] || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "peers.sh: $python is no Python 3.10 or later; name one in WEFT_PYTHON" >&2; exit 1; }
# Of two concurrent calls the second waits and then finds the environments.
exec {lock}>"$place/.lock"
flock "$lock"

# install NAME: the environment place/NAME of tests/peers/NAME.txt, unless it is complete with these versions.
install() {
  local name=$1 wanted=$root/tests/peers/$1.txt
  cmp -s "$wanted" "$place/$name/complete" && return 0
  echo "Installing $name: $(grep -v '^#' "$wanted" | tr '\n' ' ')"
  rm -f "$place/$name/complete"
  "$python" -m venv "$place/$name" || { echo "peers.sh: no virtual environment (package python3-venv)" >&2; exit 1; }
  if [[ $name == transformers5 ]]; then
    "$place/transformers4/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      >"$("$place/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/transformers4.pth"
  fi
  if ! "$place/$name/bin/python" -m pip install --quiet --disable-pip-version-check -r "$wanted" >"$place/$name.log" 2>&1; then
    tail -n 15 "$place/$name.log" >&2
    echo "peers.sh: pip could not install $name (its last lines are above); it needs a package index, by network or as PIP_INDEX_URL names it" >&2
    exit 1
  fi
  cp "$wanted" "$place/$name/complete"
}

install transformers4
install transformers5
