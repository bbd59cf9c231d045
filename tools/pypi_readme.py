"""The README as the description of a wheel: without the pictures, commands and links that only the repository has."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

DOCUMENTATION = """## Documentation

`help` of every public name, such as `help(aploss.APLoss)`, lists arguments, shapes and an example. The source
distribution contains the documentation, examples and notebooks.
"""


class PackageIndexReadme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description_of(text)}


def description_of(readme: str) -> str:
    text = re.sub(r"<p>\n<img.*?</p>\n\n", "", readme, flags=re.DOTALL)
    text = re.sub(r"^Photographs: .*?\n\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"## Try it\n.*?(?=## )", "", text, flags=re.DOTALL)
    text = re.sub(r"## Documentation\n.*", DOCUMENTATION, text, flags=re.DOTALL)
    text = text.replace("pip install .  ", "pip install aploss").replace("'.[", "'aploss[")
    text = re.sub(r"^\[[^]]*\]\((?!https?:)[^)]*\)\n", "", text, flags=re.MULTILINE)  # lines that only lead to a page
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
