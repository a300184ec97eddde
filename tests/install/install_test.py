# SPDX-License-Identifier: Apache-2.0
"""cmake --install creates a relocatable tree: the program, the inputs and the job scripts. The installation tests of the Spack recipe
are run on it as well.

install_test.py WEFT REPOSITORY BUILD CMAKE
"""
import filecmp
import os
import subprocess
import sys

import program

sys.path.insert(0, os.path.join(sys.argv[2], "tests", "spack"))
import stand_in  # noqa: E402

REPOSITORY, BUILD, CMAKE = map(os.path.abspath, sys.argv[2:5])


def same_tree(installed, source):
    compared = filecmp.dircmp(installed, source)
    assert not (compared.left_only or compared.right_only or compared.diff_files or compared.funny_files), compared.report()
    for folder in compared.common_dirs:
        same_tree(os.path.join(installed, folder), os.path.join(source, folder))


def check(weft):
    prefix = weft.folder / "prefix"
    subprocess.run([CMAKE, "--install", BUILD, "--prefix", prefix], check=True, stdout=subprocess.DEVNULL)
    assert sorted(os.listdir(prefix)) == ["bin", "share"] and os.listdir(prefix / "share") == ["weft"]
    assert os.listdir(prefix / "bin") == ["weft"]
    for folder in ("inputs", "jobscripts"):
        same_tree(prefix / "share" / "weft" / folder, os.path.join(REPOSITORY, folder))

    # From another folder, through PATH.
    elsewhere = weft.folder / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    recipe = stand_in.Recipe(os.path.join(REPOSITORY, "spack_repo", "weft", "packages", "weft", "package.py"))
    for path in recipe.package.sanity_check_is_file:
        assert (prefix / path).is_file(), path
    for path in recipe.package.sanity_check_is_dir:
        assert (prefix / path).is_dir(), path
    stand_in.instance(recipe, prefix=str(prefix), cuda=False).check_install()
    assert program.record(elsewhere / "weft_quickstart" / "run")["exit"]["code"] == 0


program.main(check)
