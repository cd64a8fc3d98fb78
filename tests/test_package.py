"""The shipped files: the complete package and nothing else."""

import importlib.metadata
import re
import shutil
import tarfile
import tomllib
import zipfile
from functools import reduce
from operator import and_

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from bilens import __version__
from bilens.cli.running import BIBTEX
from bilens.kernels.attention import TRITON
from tests.command_line import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")

# What `python -m build --no-isolation` does in five processes.
BUILD = """
import os, shutil
from setuptools import build_meta
archive = build_meta.build_sdist("dist")
shutil.unpack_archive(f"dist/{archive}", "unpacked")
os.chdir(f"unpacked/{os.listdir('unpacked')[0]}")
build_meta.build_wheel("../../dist")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a source distribution, and the wheel that was built from it, as by `make dist`."""
    folder = tmp_path_factory.mktemp("package")
    # The egg-info of an earlier build would bring back files that pyproject.toml leaves out.
    ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    python("-c", BUILD, cwd=folder)
    return folder / "dist"


def test_the_wheel_holds_the_package_whole(built):
    (wheel,) = built.glob(f"bilens-{__version__}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (license_,) = (name for name in file.namelist() if name.endswith("/licenses/LICENSE"))
        assert "MIT" in file.read(license_).decode()
    files = [path for path in (ROOT / "src" / "bilens").rglob("*") if path.is_file()]
    assert names == {str(path.relative_to(ROOT / "src")) for path in files if path.suffix != ".pyc"}
    assert {"bilens/py.typed", "bilens/pages/page.html", "bilens/pages/page.css"} <= names


def test_the_source_distribution_holds_what_building_and_citing_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"CITATION.cff", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "experiments"))]


def test_the_changelog_begins_with_this_version():
    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == __version__


def test_the_entry_of_bibtex_is_that_of_the_citation_file():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    author, year = f"{{{cited['authors'][0]['name']}}}", cited["date-released"].year
    for value in (cited["title"], author, year, cited["version"]):
        assert f"{{{value}}}" in BIBTEX
    assert f"```bibtex\n{BIBTEX}\n```" in (ROOT / "README.md").read_text()


CUDA_TRITON = {"2.13.0": "3.7.1", "2.14.0": "3.8.0", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
"""By version of torch: the Triton that its wheel for CUDA requires, as read in November 2026."""


def required(lines, name):
    """Return the versions of a package that requirements allow together."""
    requirements = [Requirement(line) for line in lines]
    specifiers = (r.specifier for r in requirements if canonicalize_name(r.name) == name)
    return reduce(and_, specifiers, SpecifierSet())


def test_the_extra_for_gpus_resolves_with_builds_for_cuda():
    lines = [*PROJECT["dependencies"], *EXTRAS["gpu"]]
    allowed = [torch for torch in CUDA_TRITON if torch in required(lines, "torch")]
    assert allowed
    for torch in allowed:
        assert CUDA_TRITON[torch] in required(lines, "triton")
        assert CUDA_TRITON[torch] in TRITON


def constraints(file="constraints.txt"):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def of_extra(extra):
    """Return the requirements of an extra, with those of the package and of extras within it."""
    lines = list(PROJECT["dependencies"])
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name != "bilens":
            lines.append(line)
        for inner in requirement.extras:
            lines += of_extra(inner)
    return lines


def conflicts(lines):
    """Return the packages of which requirements and constraints allow no version together."""
    pins = constraints()
    torch = [v for v in CUDA_TRITON if v in required([*lines, *pins], "torch")]
    # Of builds for CPUs any Triton will do; those for CUDA bring theirs.
    with_cuda = [v for v in torch if CUDA_TRITON[v] in required([*lines, *pins], "triton")]
    found = [] if with_cuda else ["torch"]
    for name in {canonicalize_name(Requirement(line).name) for line in lines} - {"torch", "triton"}:
        versions = [spec.version for spec in required(pins, name) if spec.operator == "=="]
        if len(versions) != 1 or versions[0] not in required(lines, name):
            found.append(name)
    return found


def test_the_constraints_hold_for_the_oldest_python():
    """Debian's Python is 3.11.2: a pin for 3.11.5 stops the install with a riddle."""
    (floor,) = SpecifierSet(PROJECT["requires-python"])
    assert floor.operator == ">="
    pins = {canonicalize_name(Requirement(line).name) for line in constraints()}
    refused = []
    for installed in importlib.metadata.distributions():
        pythons = installed.metadata["Requires-Python"] or ""
        pinned = canonicalize_name(installed.metadata["Name"]) in pins
        if pinned and f"{floor.version}.0" not in SpecifierSet(pythons):
            refused.append(f"{installed.metadata['Name']} {pythons}")
    assert not refused


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_with_the_constraints(extra):
    assert not conflicts(of_extra(extra))


def test_the_torch_of_make_resolves_with_the_constraints():
    """README's commands, with a build of torch for CPUs or not."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (torch,) = re.findall("^TORCH := (.*)$", makefile, re.MULTILINE)
    assert not re.search(r"--constraint constraints\.txt(?! \$\(TORCH\))", makefile)
    for extra in ("all", "dev", "docs"):
        assert not conflicts([torch, *of_extra(extra)])
    action = (ROOT / ".github/actions/environment/action.yml").read_text(encoding="utf-8")
    assert f'"{torch}"' in action


def test_the_oldest_dependencies_are_the_bounds_of_the_package():
    # triton has bounds of its own, and is not in the wheel's tests.
    required = [*PROJECT["dependencies"], *EXTRAS["train"], *EXTRAS["gguf"]]
    assert len(PROJECT["dependencies"]) == 8
    bounds = {(r := Requirement(line)).name: str(r.specifier) for line in required}
    oldest = map(Requirement, constraints("constraints-oldest.txt"))
    assert {r.name: str(r.specifier).replace("==", ">=") for r in oldest} == bounds
