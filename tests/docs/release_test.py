# SPDX-License-Identifier: Apache-2.0
"""The version is the same everywhere: CMakeLists.txt, the first section of CHANGELOG.md (with the name of its tag), CITATION.cff and
the Spack recipe. CITATION.cff has the required fields.

release_test.py REPOSITORY
"""
import re
import sys
from pathlib import Path


def main():
    repository = Path(sys.argv[1])
    version = re.search(r"^project\(weft VERSION ([\d.]+)", (repository / "CMakeLists.txt").read_text(), flags=re.M)[1]
    sections = re.findall(r"^## (\S+) \(tag (\S+?)(?:, (\d{4}-\d\d-\d\d))?\)$", (repository / "CHANGELOG.md").read_text(), flags=re.M)
    assert sections and sections[0][0] == version, f"CHANGELOG.md begins with {sections[:1]}, the version is {version}"
    assert all(tag == f"v{number}" for number, tag, _ in sections), sections
    assert all(date for _, _, date in sections[1:]), f"only the newest section may be without a date: {sections}"
    citation = dict(re.findall(r"^([\w-]+): *(.*)$", (repository / "CITATION.cff").read_text(), flags=re.M))
    assert citation["version"] == version and citation["cff-version"] == "1.2.0", citation
    assert {"message", "title", "authors", "license", "type"} <= set(citation), citation
    recipe = (repository / "spack_repo" / "weft" / "packages" / "weft" / "package.py").read_text()
    tags = re.findall(r'version\("([\d.]+)", tag="(\S+?)"', recipe)
    assert tags == [(number, tag) for number, tag, _ in sections], f"the recipe has {tags}, CHANGELOG.md {sections}"
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE"):
        assert (repository / name).stat().st_size > 300, name
    print(f"version {version}, {len(sections)} sections")


main()
