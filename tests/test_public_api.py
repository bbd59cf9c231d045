"""The public interface is frozen in ``public_api.txt``: a change must be made there on purpose.

``python tests/test_public_api.py`` rewrites the file; the changelog then says why.
"""

import inspect
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path

FROZEN = Path(__file__).with_name("public_api.txt")
PACKAGES = (
    "aploss",
    "aploss.losses",
    "aploss.detectors",
    "aploss.integrations",
    "aploss.data",
    "aploss.evaluation",
    "aploss.training",
    "aploss.theory",
    "aploss.registry",
    "aploss.errors",
)


def parameters(function):
    """Names, kinds and defaults; annotations may be written in any way."""
    signature = inspect.signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def members(kind):
    """The public methods and properties that a class itself defines or inherits from ours."""
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("aploss"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(member, (staticmethod, classmethod)):
                yield name, f"{name}{parameters(member.__func__)}"
            elif inspect.isfunction(member):
                yield name, f"{name}{parameters(member)}"
            elif isinstance(member, (property, cached_property)):
                yield name, name


def describe(package):
    module = import_module(package)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            own = issubclass(value, Exception) or "aploss" not in value.__module__
            yield f"{package}.{name}" + ("" if own else parameters(value))
            if not own:
                methods = dict(members(value))
                yield from (f"{package}.{name}.{methods[key]}" for key in sorted(methods))
        elif inspect.isfunction(value):
            yield f"{package}.{name}{parameters(value)}"
        else:
            yield f"{package}.{name}"


def command_line():
    from aploss.cli.commands import COMMANDS, make_parser

    for words in COMMANDS:
        for action in make_parser(words)._actions:
            if "--help" in action.option_strings:
                continue
            names = " ".join(action.option_strings) or action.dest.upper()
            yield f"$ aploss {' '.join(words)} {names}"


def undocumented(value):
    """What ``help`` of a public class or function lacks: arguments, the result, or an example."""
    text = inspect.getdoc(value) or ""
    sections = dict(re.findall(r"^(\w+):\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE))
    fields = sections.get("Args", "") + sections.get("Attributes", "")
    entries = re.findall(r"^    (\w[\w., ]*)(?: \(.*\))?: ", fields, flags=re.MULTILINE)  # also "one, other: ..."
    described = {name.partition(".")[0] for entry in entries for name in entry.split(", ")}
    if inspect.isclass(value) and issubclass(value, Exception):
        yield from () if text else ["docstring"]
        return
    if ">>> " not in sections.get("Example", ""):
        yield "Example"
    signature = inspect.signature(value)
    yield from (name for name in signature.parameters if name not in described)
    no_result = inspect.isclass(value) or signature.return_annotation is None
    if not (no_result or "Returns" in sections or text.startswith("Returns ")):
        yield "Returns"


def interface():
    lines = [line for package in PACKAGES for line in describe(package)]
    return "\n".join([*lines, *command_line()]) + "\n"


def test_the_public_interface_is_the_frozen_one(tmp_path):
    # In a process of its own: other tests register losses and detectors.
    from tiny_runs import start_process

    program = (
        "import runpy\n"
        "with open(log, 'w', encoding='utf-8') as file: file.write(runpy.run_path(values['file'])['interface']())\n"
    )
    process = start_process(program, log=tmp_path / "found", file=__file__)
    process.join()
    assert process.exitcode == 0
    found = (tmp_path / "found").read_text(encoding="utf-8")
    assert found.splitlines() == FROZEN.read_text(encoding="utf-8").splitlines()


def test_help_has_arguments_results_and_an_example_for_every_public_name():
    modules = [import_module(package) for package in PACKAGES]
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    lacking = {name: list(undocumented(value)) for name, value in public.items() if callable(value)}
    assert not {name: parts for name, parts in lacking.items() if parts}


if __name__ == "__main__":
    FROZEN.write_text(interface(), encoding="utf-8")
