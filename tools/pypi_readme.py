"""The README as the description of a wheel: without the pictures and links that only the repository has."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackageIndexReadme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"<p>\n<img.*?</p>\n\n", "", text, flags=re.DOTALL)
        text = re.sub(r"^Left: .*?\n\n", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"## Try it\n.*?(?=## )", "", text, flags=re.DOTALL)
        text = text.replace("pip install .  ", "pip install aploss").replace("'.[", "'aploss[")
        text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
