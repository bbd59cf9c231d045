"""Hooks of ``make docs``: generated pages (commands, API, examples, notebooks), formulas, and checks of the site.

The Markdown under docs/ links to files of the repository, as a code host shows them. The hooks rewrite these links to
the corresponding pages of the site.
"""

import html
import inspect
import json
import posixpath
import re
import textwrap
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from aploss.data.folder import KINDS

ROOT = Path(__file__).resolve().parents[1]
# A page of the API reference each; `aploss` re-exports `aploss.losses`.
PACKAGES = (
    "aploss.losses", "aploss.detectors", "aploss.integrations", "aploss.data", "aploss.evaluation", "aploss.training",
    "aploss.theory", "aploss.registry", "aploss.errors",
)  # fmt: skip
# file of the repository → page of the site
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}


class Docstrings(griffe.Extension):
    """Docstrings as ``help`` shows them: some are completed at run time, such as those of the losses as modules.

    In the form that griffe knows: ``Examples:``, whose content it shows as code, and one name per entry of ``Args:``.
    Settings of a run show their default.
    """

    def __init__(self):
        classes = {f"{value.__module__}.{value.__qualname__}": value for value in public_classes()}
        self.texts = {name: inspect.getdoc(value) for name, value in classes.items()}

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = self.texts.get(obj.path, obj.docstring.value)
            text = re.sub(r"^    (\w+(?:, \w+)+)(: .*(?:\n {8,}.*)*)", one_entry_each, text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        for parameter in obj.parameters if obj.is_class else ():
            value = parameter.default
            if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":  # setting(default, help, ...)
                parameter.default = value.arguments[0]


def on_files(files, config):
    pages = {page: (ROOT / name).read_text("utf-8") for name, page in ROOT_PAGES.items() if (ROOT / name).is_file()}
    pages |= {"commands.md": commands_page(), "examples.md": examples_page()}
    pages |= {f"api/{package.removeprefix('aploss.')}.md": api_page(package) for package in PACKAGES}
    pages |= {f"notebooks/{file.stem}.md": notebook_page(file) for file in (ROOT / "notebooks").glob("*.ipynb")}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    source = next((name for name, own in ROOT_PAGES.items() if own == page.file.src_uri), f"docs/{page.file.src_uri}")
    parts = re.split(r"^(```.*?^```)$", markdown, flags=re.MULTILINE | re.DOTALL)  # text, code, text, ...
    parts[::2] = [
        re.sub(r"(\]\()([^)#\s]+)", lambda match: match[1] + target_of(match[2], source), text) for text in parts[::2]
    ]
    parts[::2] = [
        re.sub(r"\$([^$`\n]+)\$", lambda match: f"<span>{convert(match[1])}</span>", text) for text in parts[::2]
    ]
    parts[1::2] = [re.sub(r"^```math\n(.*)```$", as_mathml, code, flags=re.DOTALL) for code in parts[1::2]]
    return "".join(parts).replace("<!-- table: aploss.data.folder.KINDS -->", problems_table())


def on_page_content(html_text, page, config, files):
    # Sphinx roles in docstrings become plain code.
    html_text = re.sub(
        r":(?:func|class|meth|attr|mod|data|ref):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html_text
    )
    html_text = re.sub('(<li class="doc-section-item field-body">\\s*)\N{EN DASH}', r"\1", html_text)  # untyped result
    return html_text.replace("::</p>", ":</p>")


def on_post_build(config):
    """Checks that every public name is documented, and that no page loads anything from another host."""
    site = Path(config["site_dir"])
    reference = "".join(file.read_text("utf-8") for file in site.glob("api/*.html"))
    missing = [name for package in PACKAGES for name in names_of(package) if f'id="{name}"' not in reference]
    if missing:
        raise PluginError(f"public names that are not documented: {', '.join(missing)}")
    for file in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]+)"', file.read_text("utf-8"))
        loaded += re.findall(
            r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)"', file.read_text("utf-8")
        )
        if loaded:
            raise PluginError(f"{file.relative_to(site)} loads {loaded[0]}")


def target_of(link, source):
    """The page of the site for a link in a file of the repository, relative to the page of that file."""
    if re.match(r"[a-z]+:", link):
        return link
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if file.startswith("docs/"):
        target = file.removeprefix("docs/")
    elif file in ROOT_PAGES:
        target = ROOT_PAGES[file]
    elif file.startswith("examples"):
        target = "examples.md" if file == "examples" else f"examples.md#{Path(file).stem.replace('_', '-')}"
    elif file.startswith("notebooks/"):
        target = file.replace(".ipynb", ".md")
    else:
        raise PluginError(f"{source} links to {link}, which has no page on the site")
    own = source.removeprefix("docs/") if source.startswith("docs/") else ROOT_PAGES[source]
    return posixpath.relpath(target, posixpath.dirname(own) or ".")


def as_mathml(match):
    """A ``math`` block as MathML; parts separated by ``\\qquad`` wrap on narrow screens."""
    parts = (convert(part.strip(), display="block") for part in match[1].split(r"\qquad"))
    return f'<div class="formula">{"".join(parts)}</div>'


def problems_table():
    rows = (f"| `{kind}` | {description} | {effect.value} |" for kind, (effect, description) in KINDS.items())
    return "\n".join(("| kind | description | effect on loading |", "|---|---|---|", *rows))


def one_entry_each(match):
    """``one, other: text`` as an entry for each name."""
    return "\n".join(f"    {name}{match[2]}" for name in match[1].split(", "))


def public_classes():
    modules = map(import_module, PACKAGES)
    return (value for module in modules for name in module.__all__ if inspect.isclass(value := getattr(module, name)))


def names_of(package):
    """The public names of a package, qualified by the module that defines them."""
    module = import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        defined = inspect.isclass(value) or inspect.isfunction(value)
        yield f"{value.__module__}.{value.__qualname__}" if defined else f"{package}.{name}"


def commands_page():
    from aploss.cli.commands import COMMANDS, make_parser

    parts = ["# Commands\n\nThe output of `aploss COMMAND --help`.\n"]
    for words in COMMANDS:
        with patch.dict("os.environ", COLUMNS="100000"):  # every option in a line, or two if it is long
            _, what, *sections = make_parser(words).format_help().rstrip().split("\n\n")
        examples = sections.pop().partition("\n")[2]
        options = re.findall(r"^  (\S.*?)(?:\n? {2,}(\S.*))?$", "\n\n".join(sections), flags=re.MULTILINE)
        parts += [
            f"## aploss {' '.join(words)}\n",
            f"{what.strip()}\n\n```text\n{textwrap.dedent(examples)}\n```\n",
            *(f"- `{option}`{': ' if text else ''}{as_markdown(text)}" for option, text in options),
            "",
        ]
    return "\n".join(parts)


def as_markdown(text):
    escaped = re.sub(r"([*_\[])", r"\\\1", html.escape(text, quote=False))
    return re.sub(r"--\w[\w.-]*\w", r"`\g<0>`", escaped)


def api_page(package):
    parts = [f"# {package}\n\n{inspect.getdoc(import_module(package))}\n"]
    if package == "aploss.losses":
        parts.append("`aploss` exports the same names: `from aploss import APLoss`.\n")
    return "\n".join(parts + [f"::: {name}\n" for name in names_of(package)])


def examples_page():
    parts = ["# Examples\n\nComplete programs that run in seconds on a CPU; the tests run all of them.\n"]
    for file in sorted((ROOT / "examples").glob("*.py")):
        parts.append(
            f'## {file.stem.replace("_", " ")}\n\n```python title="{file.name}"\n{file.read_text("utf-8")}```\n'
        )
    return "\n".join(parts)


def notebook_page(file):
    parts = []
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    first, *others = parts
    return "\n\n".join([first, f"This page is the notebook `notebooks/{file.name}`, without its output.", *others])
