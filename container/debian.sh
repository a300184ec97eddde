#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Weft for CPUs on Debian in a directory, from Debian's packages: no registry of images is needed. As root, with debootstrap and
# network access:
#   bash container/debian.sh ROOT [ARCHIVE.tar.zst]     ROOT must not exist yet; ARCHIVE: its files, for podman import
#   bash container/debian.sh --run ROOT COMMAND...      runs a command in it, with /proc, /sys and /dev
#   apptainer build weft.sif ROOT                       an image for apptainer exec and jobscripts/apptainer.sbatch
#
#   WEFT_DEBIAN=trixie         the release of Debian (default: the stable one when this was written)
#   WEFT_DEBIAN_MIRROR=URL     default http://deb.debian.org/debian
#   WEFT_KOKKOS_ARCHIVE=FILE   the pinned archive of Kokkos, if pip in ROOT cannot download it
#
# Exit codes: 0 done; 2 usage error, not root, or debootstrap is missing; 1 any other failure. ROOT is created complete or not at all.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage="usage: debian.sh ROOT [ARCHIVE.tar.zst], or debian.sh --run ROOT COMMAND..."
[[ $(id -u) -eq 0 ]] || { echo "debian.sh: chroot needs root" >&2; exit 2; }

# inside ROOT COMMAND...: in namespaces of its own, so that mounts and processes end with the command.
inside() {
  # shellcheck disable=SC2016   # the inner shell expands them
  unshare --mount --pid --fork --kill-child bash -c '
    set -e
    root=$1
    shift
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" /usr/bin/env -i HOME=/root TERM="${TERM:-dumb}" LANG=C.UTF-8 OMP_WAIT_POLICY=passive \
      PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      ${WEFT_KOKKOS_ARCHIVE:+WEFT_KOKKOS_ARCHIVE=/opt/kokkos/${WEFT_KOKKOS_ARCHIVE##*/}} \
      ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} "$@"' inside "$@"
}

if [[ ${1:-} == --run ]]; then
  [[ $# -ge 3 && -d $2 ]] || { echo "$usage" >&2; exit 2; }
  inside "${@:2}"
  exit
fi
[[ ($# -eq 1 || $# -eq 2) && $1 != -* ]] || { echo "$usage" >&2; exit 2; }
root=$(realpath -m "$1") archive=${2:+$(realpath -m "$2")}
[[ ! -e $root ]] || { echo "debian.sh: $root exists; choose another directory or remove it" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "debian.sh: debootstrap is missing (the package of that name)" >&2; exit 2; }

mkdir -p "$(dirname "$root")"
scratch=$(mktemp -d "$root.XXXXXX")
trap 'rm -rf --one-file-system "$scratch"' EXIT
chmod 755 "$scratch"
echo "Debian ${WEFT_DEBIAN:=trixie}"
debootstrap --variant=minbase --include=ca-certificates "$WEFT_DEBIAN" "$scratch" "${WEFT_DEBIAN_MIRROR:-http://deb.debian.org/debian}" \
  >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; echo "debian.sh: debootstrap failed (its last lines are above)" >&2; exit 1; }
cp /etc/resolv.conf "$scratch/etc/resolv.conf"

# The files that weft.def copies.
mkdir "$scratch/opt/weft"
mapfile -t sources < <(sed -n '/^%files/,/^$/s|^ \+\(\S\+\) /opt/weft/.*|\1|p' "$repository/container/weft.def")
(cd "$repository" && cp -r --parents "${sources[@]}" "$scratch/opt/weft")
if [[ -n ${WEFT_KOKKOS_ARCHIVE:-} ]]; then
  mkdir "$scratch/opt/kokkos"
  cp "$WEFT_KOKKOS_ARCHIVE" "$scratch/opt/kokkos"
fi

inside "$scratch" bash /opt/weft/container/install.sh cpu-release
unset WEFT_KOKKOS_ARCHIVE
rm -rf "$scratch/opt/kokkos"
inside "$scratch" weft --version
inside "$scratch" weft report --help >/dev/null
: >"$scratch/etc/resolv.conf"   # that of the machine on which it runs

if [[ -n $archive ]]; then
  tar --create --zstd --numeric-owner --file "$archive.part" --exclude './dev/*' --directory "$scratch" .
  mv "$archive.part" "$archive"
fi
mv -T "$scratch" "$root"
trap - EXIT
rm -f "$root.log"
echo "done: $root${archive:+, $archive}"
