# SPDX-License-Identifier: Apache-2.0
"""cmake --install creates a relocatable tree: the program, inputs, job scripts, the Python package, the guide, completion in bash and a
file for environment modules. The installed program trains the installed quickstart.

install_test.py WEFT REPOSITORY BUILD CMAKE
"""
import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import program

REPOSITORY, BUILD, CMAKE = map(os.path.abspath, sys.argv[2:5])


def same_tree(installed, source):
    compared = filecmp.dircmp(installed, source, ignore=["__pycache__"])
    assert not (compared.left_only or compared.right_only or compared.diff_files or compared.funny_files), compared.report()
    for folder in compared.common_dirs:
        same_tree(os.path.join(installed, folder), os.path.join(source, folder))


def check_links(doc):
    """Links between the installed pages are valid."""
    for page in doc.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            assert re.match(r"[a-z]+:", target) or (page.parent / target).exists(), f"{page}: {target}"


def check_module(prefix, version):
    """The module file, run by Tcl with the commands of a module system replaced: paths below the prefix, wherever that is."""
    if not shutil.which("tclsh"):
        print("not checked: the module file (no tclsh)")
        return
    path = prefix / "share" / "modulefiles" / "weft" / version
    script = f"""
proc module-whatis {{args}} {{}}
proc conflict {{args}} {{}}
proc prepend-path {{name value}} {{ puts "$name=$value" }}
proc setenv {{name value}} {{ puts "$name=$value" }}
set ModulesCurrentModulefile {{{path}}}
source {{{path}}}
"""
    done = subprocess.run(["tclsh"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert variables == {"PATH": f"{prefix}/bin", "XDG_DATA_DIRS": f"{prefix}/share", "WEFT_ROOT": str(prefix)}, variables


def check_configures(folder):
    """The build of README.md: it needs none of the packages that scripts/setup.sh installs for the tests alone."""
    done = subprocess.run([CMAKE, "-S", REPOSITORY, "-B", folder / "configured", "-G", "Ninja", "-DCMAKE_DISABLE_FIND_PACKAGE_doctest=ON"],
                          text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout


def check_package(folder):
    """scripts/python.sh installs the package into an environment of its own, without a network where the libraries are there."""
    try:
        import matplotlib, setuptools, venv, wheel      # noqa: F401, E401
    except ImportError as missing:
        print(f"not checked: the installation of the Python package ({missing.name} is not installed)")
        return
    place = folder / "environment"
    environment = dict(os.environ, WEFT_PYTHON=sys.executable, PYTHONPATH="")

    def install():
        done = subprocess.run(["bash", os.path.join(REPOSITORY, "scripts", "python.sh"), place], env=environment, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0 and not done.stdout, done.stdout
    install()
    for name in program.PROGRAMS:
        said = subprocess.run([place / "bin" / f"weft-{name}", "--help"], env=environment, text=True, check=True, stdout=subprocess.PIPE).stdout
        assert f"usage: weft {name}" in said, said
    version = re.search(r"project\(weft VERSION ([\d.]+)", Path(REPOSITORY, "CMakeLists.txt").read_text())[1]
    found = subprocess.run([place / "bin" / "python", "-c", "import weft, weft.page; print(weft.__version__, weft.Run); weft.page.Page('x').html()"],
                           env=environment, cwd=folder, text=True, check=True, stdout=subprocess.PIPE).stdout
    assert found.startswith(f"{version} ") and str(place) in subprocess.run(
        [place / "bin" / "python", "-c", "import weft; print(weft.__file__)"], env=environment, cwd=folder, text=True, check=True,
        stdout=subprocess.PIPE).stdout
    before = (place / "bin" / "weft-report").stat().st_mtime_ns
    install()       # nothing has changed
    assert (place / "bin" / "weft-report").stat().st_mtime_ns == before


def check(weft):
    check_package(weft.folder.resolve())
    check_configures(weft.folder)
    prefix = weft.folder.resolve() / "prefix"
    first = prefix.with_name("first")
    subprocess.run([CMAKE, "--install", BUILD, "--prefix", first], check=True, stdout=subprocess.DEVNULL)
    first.rename(prefix)        # relocatable
    version = re.search(r"project\(weft VERSION ([\d.]+)", Path(REPOSITORY, "CMakeLists.txt").read_text())[1]
    assert sorted(os.listdir(prefix)) == ["bin", "share"]
    assert os.listdir(prefix / "bin") == ["weft"]
    share = prefix / "share"
    assert sorted(os.listdir(share)) == ["bash-completion", "doc", "modulefiles", "weft"], os.listdir(share)
    for folder in ("inputs", "jobscripts", "python"):
        same_tree(share / "weft" / folder, os.path.join(REPOSITORY, folder))
    same_tree(share / "weft" / "reframe", os.path.join(REPOSITORY, "scripts", "reframe"))
    same_tree(share / "doc" / "weft" / "docs", os.path.join(REPOSITORY, "docs"))
    assert (share / "doc" / "weft" / "LICENSE").is_file()
    check_links(share / "doc" / "weft")
    assert (share / "bash-completion" / "completions" / "weft").stat().st_size > 200
    check_module(prefix, version)
    for path in prefix.rglob("*"):
        if path.is_file() and path.parts[-2] != "bin":
            assert BUILD.encode() not in path.read_bytes(), f"{path} names the build"

    # Elsewhere: what the Spack recipe runs after an installation.
    installed = program.Program(prefix / "bin" / "weft", weft.folder / "elsewhere")
    installed.folder.mkdir()
    small = [word for one in ("synthetic.tokens=4096", "synthetic.validation_tokens=512", "run.steps=10") for word in ("--set", one)]
    quickstart = share / "weft" / "inputs" / "quickstart.toml"
    installed.run("synth", quickstart, *small)
    installed.run("train", quickstart, "--output", "run", *small)
    assert program.record(installed.folder / "run")["exit"]["code"] == 0


program.main(check)
