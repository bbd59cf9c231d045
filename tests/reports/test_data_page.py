"""The page of a dataset: counts, and pictures of suspicious boxes and copies."""

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from aploss.data.check import check_dataset
from aploss.reports.data_page import write_data_page


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Three images, two of them the same file; a box twice, a thin one, and one that exceeds its image."""
    for name, noise in (("a.png", 40), ("b.png", 60)):
        Image.effect_noise((64, 48), noise).save(tmp_path / name)
    shutil.copy(tmp_path / "a.png", tmp_path / "c.png")
    boxes = [[2, 2, 20, 20], [2, 2, 20, 20], [30, 5, 1, 20], [50, 30, 30, 10]]
    annotations = [{"id": k, "image_id": 1, "category_id": 1, "bbox": box} for k, box in enumerate(boxes, start=1)]
    images = [{"id": k, "file_name": f"{name}.png", "width": 64, "height": 48} for k, name in enumerate("abc", start=1)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "<cell>"}]}
    (tmp_path / "train.json").write_text(json.dumps(content))
    return tmp_path


def test_the_page_has_counts_crops_and_copies(damaged: Path) -> None:
    text = write_data_page(check_dataset(damaged), damaged / "page.html").read_text()
    assert "&lt;cell&gt;" in text
    assert re.findall(r"<dt>(\w+)</dt><dd>([\d,]+)</dd>", text)[:3] == [
        ("Images", "3"),
        ("Boxes", "4"),
        ("Classes", "1"),
    ]
    for kind in ("repeated-box", "tiny-box", "out-of-bounds-box", "copied-image"):
        assert f"<code>{kind}</code>" in text
    assert text.count('<figure class="picture">') == 3 + 1  # a crop of each box, and the copied image
    assert "c.png: the same file as a.png" in text
    (damaged / "a.png").unlink()  # gone since the check
    (damaged / "c.png").unlink()
    result = check_dataset(damaged)
    assert "missing-image" in write_data_page(result, damaged / "page.html").read_text()


def test_a_dataset_that_cannot_be_used_has_a_page(damaged: Path) -> None:
    (damaged / "train.json").write_text('{"images": [')
    page = write_data_page(check_dataset(damaged, format="coco"), damaged / "page.html")
    assert "cannot be used" in page.read_text()
