"""The site is built strictly: no broken link, every page in the navigation, every public name documented."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed (extra `docs`)")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_holds_the_commands_the_api_and_the_formulas(site):
    from aploss.cli.commands import COMMANDS, make_parser

    commands = (site / "commands.html").read_text(encoding="utf-8")
    for words in COMMANDS:
        assert f"aploss {' '.join(words)}</h2>" in re.sub(r"<a class=.*?</a>", "", commands)
        for option in re.findall(r"^  (--[\w.-]+)", make_parser(words).format_help(), flags=re.MULTILINE):
            assert f"<code>{option}" in commands, (words, option)
    api = (site / "api/losses.html").read_text(encoding="utf-8")
    assert 'id="aploss.losses.ap_loss.ap_loss"' in api
    assert api.count("monotone in the score, as benchmarks do") == 2  # an argument of ap_loss and of APLoss
    assert api.count('<span class="gp">&gt;&gt;&gt; </span>') > 50  # examples are code
    formulas = (ROOT / "docs/formulas.md").read_text(encoding="utf-8").count("```math")
    assert (site / "formulas.html").read_text(encoding="utf-8").count('class="formula"') == formulas > 9
    assert "<code>image-in-two-splits</code>" in (site / "data.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere_and_the_search_works_from_disk(site):
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r'(?:src="|url\(|@import )["\']?https?:', text), file.name
    # Browsers forbid pages from disk to fetch the index: a script holds it, and an iframe takes the place of a worker.
    assert "AP-loss" in (site / "search/search_index.js").read_text(encoding="utf-8")
    assert '<script src="iframe-worker-shim.js">' in (site / "index.html").read_text(encoding="utf-8")
    assert (site / "iframe-worker-shim.js").is_file()


def test_the_documentation_stays_short():
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md")}
    assert words["results"] <= 2000
    assert sum(words.values()) <= 20_000, words


def test_every_loss_is_in_the_overview_and_has_its_formula():
    from aploss.losses.traits import LOSSES

    overview = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
    formulas = (ROOT / "docs/formulas.md").read_text(encoding="utf-8")
    own = {name: loss.__name__ for name, loss in LOSSES.items() if loss.__module__.startswith("aploss.")}
    assert len(own) == 13  # without those that other tests have registered
    for name, module in own.items():
        assert f"`{module}` | `{name}` |" in overview
        assert f"`{module}`, `--loss {name}`" in formulas


def test_links_between_files_of_the_repository_lead_somewhere():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
    assert len(files) > 25
    for file in files:
        text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not re.match(r"[a-z]+:", link):
                assert (file.parent / link).exists(), f"{file.relative_to(ROOT)}: {link}"


def test_names_imported_by_code_in_the_documentation_exist():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    imports = set(re.findall(r"^from (aploss[\w.]*) import (.+)$", pages, flags=re.MULTILINE))
    assert len(imports) > 20
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(import_module(module), name), f"from {module} import {name}"
