# SPDX-License-Identifier: Apache-2.0
"""The version is the same everywhere: CMakeLists.txt, the Python package, the first section of CHANGELOG.md (with the name of its tag) and
CITATION.cff.
The Spack recipe names the tags of released versions alone: those whose section has a date, which scripts/release.sh enters with the
tag. CITATION.cff has the required fields. The script is run on a copy.

release_test.py REPOSITORY [--metadata]     --metadata: without running the script
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path("spack_repo/weft/packages/weft/package.py")
FILES = [Path(name) for name in ("CMakeLists.txt", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE",
                                 "scripts/release.sh", "tests/docs/release_test.py", "python/weft/__init__.py")] + [RECIPE]


def check_metadata(repository):
    version = re.search(r"^project\(weft VERSION ([\d.]+)", (repository / "CMakeLists.txt").read_text(), flags=re.M)[1]
    sections = re.findall(r"^## (\S+) \(tag (\S+?)(?:, (\d{4}-\d\d-\d\d))?\)$", (repository / "CHANGELOG.md").read_text(), flags=re.M)
    assert sections and sections[0][0] == version, f"CHANGELOG.md begins with {sections[:1]}, the version is {version}"
    assert all(tag == f"v{number}" for number, tag, _ in sections), sections
    package = re.search(r'^__version__ = "(.*)"', (repository / "python/weft/__init__.py").read_text(), flags=re.M)[1]
    assert package == version, f"python/weft/__init__.py has {package}, the version is {version}"
    citation = dict(re.findall(r"^([\w-]+): *(.*)$", (repository / "CITATION.cff").read_text(), flags=re.M))
    assert citation["version"] == version and citation["cff-version"] == "1.2.0", citation
    assert {"message", "title", "authors", "license", "type"} <= set(citation), citation
    tags = re.findall(r'version\("([\d.]+)", tag="(\S+?)"', (repository / RECIPE).read_text())
    released = [(number, tag) for number, tag, date in sections if date]
    assert tags == released, f"the recipe has the tags {tags}; released, with a date in CHANGELOG.md: {released}"
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE"):
        assert (repository / name).stat().st_size > 300, name
    return version, len(sections)


def check_script(repository, version):
    """The script dates the section, enters the tag and sets it; a second call, and a tree with changes, are refused."""
    if not shutil.which("git"):
        return
    with tempfile.TemporaryDirectory(prefix="weft_release_") as folder:
        copy = Path(folder)
        for name in FILES:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, copy / name)
        text = (copy / "CHANGELOG.md").read_text()
        (copy / "CHANGELOG.md").write_text(re.sub(r"^## .*", f"## {version} (tag v{version})", text, count=1, flags=re.M))
        recipe = (copy / RECIPE).read_text()
        (copy / RECIPE).write_text(re.sub(rf'^    version\("{re.escape(version)}".*\n', "", recipe, flags=re.M))
        environment = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null", GIT_CEILING_DIRECTORIES=folder,
                           **{f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")})

        def run(*command, code=0):
            done = subprocess.run(command, cwd=copy, env=environment, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert done.returncode == code, f"{command} ended with {done.returncode}: {done.stdout}"
            return done.stdout
        run("git", "init", "-q")
        run("git", "add", "-A")
        run("git", "commit", "-q", "-m", "before")
        with open(copy / "LICENSE", "a", encoding="utf-8") as file:
            file.write("changed")
        assert "not committed" in run("bash", "scripts/release.sh", code=2)
        run("git", "checkout", "-q", "LICENSE")
        run("bash", "scripts/release.sh")
        assert run("git", "rev-parse", f"v{version}^{{commit}}") == run("git", "rev-parse", "HEAD") and not run("git", "status", "--porcelain")
        assert f'version("{version}", tag="v{version}")' in (copy / RECIPE).read_text()
        assert f"tag v{version} exists" in run("bash", "scripts/release.sh", code=2)


def main():
    repository = Path(sys.argv[1])
    version, sections = check_metadata(repository)
    if "--metadata" not in sys.argv:
        check_script(repository, version)
    print(f"version {version}, {sections} sections")


main()
