#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the release of the version in CMakeLists.txt: enters its date in CHANGELOG.md and CITATION.cff and its tag in the Spack recipe,
# commits that, and sets the tag on the commit. Nothing is pushed.
#
#   bash scripts/release.sh             then: git push origin HEAD vVERSION
#
# Before it: the version in CMakeLists.txt, CITATION.cff and python/weft/__init__.py, and a first section "## VERSION (tag vVERSION)" of CHANGELOG.md.
# Exit codes: 0 the tag is set; 2 this tree cannot be released (nothing was changed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() { echo "release.sh: $*" >&2; exit 2; }

[[ $# -eq 0 ]] || refuse "unknown argument $1 (it takes none)"
version=$(sed -n 's/^project(weft VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
tag=v$version today=$(date -u +%F) recipe=spack_repo/weft/packages/weft/package.py
[[ -n $version ]] || refuse "CMakeLists.txt has no version"
[[ -z $(git status --porcelain --untracked-files=no) ]] || refuse "there are changes that are not committed; commit them first"
! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || refuse "tag $tag exists; raise the version in CMakeLists.txt and CITATION.cff"
grep -qxF "version: $version" CITATION.cff || refuse "CITATION.cff has another version than CMakeLists.txt ($version)"
[[ $(grep -m 1 '^## ' CHANGELOG.md) == "## $version (tag $tag)" ]] ||
  refuse "CHANGELOG.md does not begin with a section \"## $version (tag $tag)\" without a date"

sed -i "0,/^## .*/s//## $version (tag $tag, $today)/" CHANGELOG.md
sed -i "/^date-released:/d; \$a date-released: $today" CITATION.cff
sed -i "/^    version(\"main\", branch=\"main\"/a\\    version(\"$version\", tag=\"$tag\")" "$recipe"
python3 tests/docs/release_test.py . --metadata || { git checkout -q -- CHANGELOG.md CITATION.cff "$recipe"; exit 2; }
git commit -q -m "Version $version" -- CHANGELOG.md CITATION.cff "$recipe"
git tag -a -m "Weft $version" "$tag"
echo "Tag $tag is on $(git rev-parse --short HEAD). Publish it: git push origin HEAD $tag"
