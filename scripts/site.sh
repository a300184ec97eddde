#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the documents as a site with search, build/site/index.html, by MkDocs, which pip installs into .deps/site. A broken link or anchor
# is an error.
#
#   bash scripts/site.sh            build
#   bash scripts/site.sh --serve    build, and serve it on the loopback device until Ctrl-C
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -eq 0 || ($# -eq 1 && $1 == --serve) ]] || { echo "site.sh: unknown option $* (known: --serve)" >&2; exit 2; }

place=.deps/site
if [[ ! -x $place/bin/mkdocs ]]; then
  python3 -m venv "$place"
  "$place/bin/pip" install --quiet --disable-pip-version-check 'mkdocs>=1.6,<2' 'pymdown-extensions>=10' ||
    { rm -rf "$place"; echo "site.sh: MkDocs could not be installed (see above); check pip's index" >&2; exit 1; }
fi
source=build/site_source
rm -rf "$source"
mkdir -p "$source"
cp -r README.md CHANGELOG.md CITATION.cff docs "$source/"
"$place/bin/mkdocs" build --strict
echo "build/site/index.html: open it in a browser"
[[ $# -eq 0 ]] || exec "$place/bin/python" -m http.server --bind 127.0.0.1 --directory build/site 8766
