"""What is released agrees with itself: extras and imports, version, changelog and citation."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from aploss.errors import EXTRAS, ConfigError, require_packages

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {"torch", "numpy", "numba"}
# Imported where they are there, and done without where not. Triton comes with torch, llvmlite with numba.
OPTIONAL = {"triton", "llvmlite"}


def names_of(requirements):
    """Names of distributions, as PyPI compares them."""
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in requirements}


def imported_packages():
    """Every package from elsewhere that a file of ours imports, with one such file."""
    found = {}
    for file in sorted((ROOT / "src/aploss").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: file.name for name in names}
    return {name: file for name, file in found.items() if name != "aploss" and name not in sys.stdlib_module_names}


def test_every_imported_package_is_in_the_table_of_extras():
    known = CORE | OPTIONAL | {package for packages in EXTRAS.values() for package in packages}
    assert {name: file for name, file in imported_packages().items() if name not in known} == {}


def test_the_loss_needs_three_packages_and_the_table_of_extras_is_that_of_pyproject():
    assert names_of(PROJECT["dependencies"]) == CORE
    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        required = names_of(PROJECT["optional-dependencies"][extra])
        for package in packages:
            names = names_of([package, *distributions.get(package, [])])
            assert names & required, f"{package} is not in the extra {extra}"


def test_the_audit_names_every_package_with_the_least_version_that_is_allowed():
    extras = [extra for extra in PROJECT["optional-dependencies"] if extra not in ("docs", "dev")]
    required = PROJECT["dependencies"] + [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    table = (ROOT / "docs/reliability.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| \w.*\d", line)]
    audited = {
        f"{name}>={versions.split(',')[0]}"
        for names, all_versions, *_ in rows
        for name, versions in zip(names.split(", "), all_versions.split("; "), strict=True)
    }
    assert audited == set(required)


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # None: as if it were not installed
    with pytest.raises(ConfigError, match=re.escape("pip install 'aploss[export]'")):
        require_packages("numpy", "onnxruntime")


def test_version_changelog_and_citation_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[(\d\S*)\]", changelog, flags=re.MULTILINE)
    assert PROJECT["version"] == released[0] == citation["version"]
    assert released == sorted(released, key=lambda text: [int(part) for part in text.split(".")], reverse=True)
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{released[0]}]")
    assert PROJECT["license"] == citation["license"]
