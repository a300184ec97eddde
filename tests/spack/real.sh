#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the environment of spack.yaml by a real Spack, without a GPU and with Debian's libraries, and runs the tests of the
# installed program. From Spack 1.0 the environment as it stands, for a GPU and without any library of the system, is concretized first.
# Nothing outside a temporary folder is changed.
#
#   WEFT_SPACK=DIR bash tests/spack/real.sh [KOKKOS [VERSION]]     default .deps/kokkos-cpu, 4.5.1; KOKKOS: the prefix of an installed one
#     WEFT_SPACK            a clone of Spack 0.22 or later, set up to concretize (`spack bootstrap now`, or clingo from PyPI in PYTHONPATH)
#     WEFT_SPACK_PACKAGES   from Spack 1.0: repos/spack_repo/builtin in a clone of spack-packages; without it Spack fetches the recipes
#                           Those of 2026.06 download a compiler wrapper; without network take earlier ones (2026.03).
#
# Exit codes: 0 passed; 1 a step failed, the end of its log is shown; 77 skipped, the last line has the reason.
set -euo pipefail

skip() { echo "skipped: $*"; exit 77; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
kokkos=$(realpath -m "${1:-$root/.deps/kokkos-cpu}") kokkos_version=${2:-4.5.1}
[[ -n ${WEFT_SPACK:-} ]] || skip "WEFT_SPACK does not name a Spack"
spack=$WEFT_SPACK/bin/spack
[[ -x $spack ]] || { echo "real.sh: WEFT_SPACK=$WEFT_SPACK has no bin/spack"; exit 1; }
command -v dpkg-query >/dev/null || skip "the libraries are those of Debian packages, and there is no dpkg-query"
[[ -d $kokkos ]] || skip "no Kokkos in $kokkos (scripts/setup.sh builds it)"
version=$("$spack" --version)
version=${version%% *}
old=no
[[ $version != 0.* ]] || old=yes

scratch=$(mktemp -d "${TMPDIR:-/tmp}/weft_spack.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
started=$SECONDS

# step NAME COMMAND...: the output goes to a log, which is shown if the command fails.
step() {
  local name=$1 since=$SECONDS
  shift
  "$@" >"$scratch/log" 2>&1 || { tail -n 60 "$scratch/log"; echo "failed: $name"; exit 1; }
  echo "$name: $((SECONDS - since)) s"
}

# --- Configuration: that of the user and of the machine is not read --------------------------------------------------------

export SPACK_USER_CONFIG_PATH=$scratch/user SPACK_SYSTEM_CONFIG_PATH=$scratch/system
mkdir -p "$scratch/user" "$scratch/debian"
ccache=false
! command -v ccache >/dev/null || ccache=true
cat >"$scratch/user/config.yaml" <<YAML
config:
  install_tree: {root: $scratch/opt}
  build_stage: [$scratch/stage]
  test_stage: $scratch/tests
  source_cache: $scratch/sources
  misc_cache: $scratch/misc
  ccache: $ccache
YAML
if [[ $old == no && -n ${WEFT_SPACK_PACKAGES:-} ]]; then
  printf 'repos:\n  builtin: %s\n' "$(realpath "$WEFT_SPACK_PACKAGES")" >"$scratch/user/repos.yaml"
fi

# Package of Spack, package of Debian, variants. All of them or none: what Spack built instead would come from the network.
packages="
cmake            cmake
gmake            make
ninja            ninja-build
openmpi          libopenmpi-dev         schedulers=slurm
hdf5             libhdf5-dev            ~mpi
openblas         libopenblas-openmp-dev threads=openmp
openssl          libssl-dev
pcre2            libpcre2-dev           +jit
utf8proc         libutf8proc-dev
kissfft          libkissfft-dev
zstd             libzstd-dev
lz4              liblz4-dev
fmt              libfmt-dev
spdlog           libspdlog-dev
nlohmann-json    nlohmann-json3-dev
cli11            libcli11-dev
tomlplusplus     libtomlplusplus-dev
python           python3
python-venv      python3
py-pip           python3-pip
py-setuptools    python3-setuptools
py-wheel         python3-wheel
py-numpy         python3-numpy
py-h5py          python3-h5py
py-matplotlib    python3-matplotlib
py-jinja2        python3-jinja2
"
external() { printf '  %s: {externals: [{spec: "%s", prefix: %s}], buildable: false}\n' "$1" "$2" "$3"; }
{
  echo "packages:"
  while read -r name debian variants; do
    [[ -n $name ]] || continue
    found=$(dpkg-query -W -f '${Version}' "$debian" 2>/dev/null) || skip "Debian's package $debian is not installed (scripts/setup.sh --tests)" >&2
    found=${found#*:}
    external "$name" "$name@${found%%[-+~]*} $variants" /usr
  done <<<"$packages"
  external kokkos "kokkos@$kokkos_version +serial +openmp cxxstd=20" "$kokkos"
} >"$scratch/debian/packages.yaml"

# --- This tree as a clone: what git would commit, on the branch that the recipe names --------------------------------------

clone=$scratch/weft
mkdir "$clone"
git -C "$root" ls-files -z --cached --others --exclude-standard | while IFS= read -rd '' file; do
  [[ ! -e $root/$file && ! -L $root/$file ]] || printf '%s\0' "$file"
done | tar -C "$root" --null -T - -c | tar -C "$clone" -x
git -C "$clone" init -q -b main
git -C "$clone" add -A
git -C "$clone" -c user.name=test -c user.email=test@example.org commit -q -m "The tree under test"

step "Spack $version finds compilers" "$spack" compiler find

if [[ $old == yes ]]; then
  # Its own recipes have no Kokkos 4.5, which Debian has not either.
  sed -i 's|^    weft: \(.*\)/weft$|  - \1/before_1_0|' "$clone/spack.yaml"
else
  step "spack.yaml is concretized, for a GPU" "$spack" -e "$clone" concretize
  rm "$clone/spack.lock"
fi

# --- Installation and its tests --------------------------------------------------------------------------------------------

sed -i 's/weft@main +cuda cuda_arch=90/weft@main ~cuda +python/' "$clone/spack.yaml"
spack_debian=("$spack" -C "$scratch/debian")
step "spack.yaml is concretized, with Debian's libraries" "${spack_debian[@]}" -e "$clone" concretize
step "installed" "${spack_debian[@]}" -e "$clone" install --no-cache
git -C "$clone" diff --stat --exit-code -- . ':!spack.yaml' || { echo "failed: the build changed its sources"; exit 1; }
step "tests of the installed program" "${spack_debian[@]}" -e "$clone" test run weft
"${spack_debian[@]}" -e "$clone" test results -l | grep -E 'PASSED|FAILED|SKIPPED' || true

environment=$("${spack_debian[@]}" -e "$clone" load --sh weft)
eval "$environment"
[[ $(command -v weft) == "$scratch"/opt/* ]] || { echo "failed: weft is not that of Spack"; exit 1; }
step "weft --version" weft --version
# Debian's Python installs into PREFIX/local, where Spack does not look.
python=$("${spack_debian[@]}" -e "$clone" location -i py-weft)/local
modules=$(echo "$python"/lib/python3*/dist-packages)
export PATH=$PATH:$python/bin PYTHONPATH=$modules${PYTHONPATH:+:$PYTHONPATH}
step "weft report, of the Python package" weft report --help
echo "passed, in $((SECONDS - started)) s"
