"""The README is short; its code, targets, extras and pictures exist. test_documented_commands tries its commands."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for name, text in FENCED.findall(README) if name == language]


def test_every_make_target_and_extra_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    commands = [shlex.split(line, comments=True) for block in blocks("") for line in block.splitlines()]
    for program, *words in commands:
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, flags=re.MULTILINE), words
        else:
            assert program in ("pip", "aploss")
    for named in re.findall(r"\.\[([\w,]+)\]|extra (\w+)", README):
        assert set("".join(named).split(",")) <= set(extras), named


def test_the_python_blocks_run():
    detection = pytest.importorskip("torchvision.models.detection", reason="torchvision is missing (extra `detect`)")
    targets = torch.zeros(2, 50, 3)
    targets[:, :4, 1] = 1
    model = detection.retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None)
    names = {"logits": torch.randn(2, 50, 3, requires_grad=True), "targets": targets, "model": model}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert 0 < names["loss"].item() <= 1
    assert names["logits"].grad.abs().sum() > 0
    assert names["model"].score_thresh == 0


def test_the_readme_is_one_screen_and_its_pictures_are_small():
    assert len(README.split()) <= 650
    pictures = re.findall(r'src="([^"]+)"', README)
    assert len(pictures) == 2
    for name in pictures:
        assert 1000 < (ROOT / name).stat().st_size < 150_000
