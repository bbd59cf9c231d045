"""The registry of formats; tests/test_plugins.py and test_labelme_plugin.py read and train on formats of their own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from aploss.data import DataFormat, DetectionDataset, convert_dataset, register_format
from aploss.errors import ConfigError, DataError


@register_format("test-read-only")
class ReadOnlyFormat(DataFormat):
    """A format that nothing is ever found in."""

    @classmethod
    def find(cls, path: Path) -> None:
        return None

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        raise AssertionError("nothing was found")


def test_a_format_that_cannot_be_written_says_so_and_a_name_is_given_once(coco_folder, tmp_path):
    with pytest.raises(DataError, match="cannot write the format 'test-read-only'"):
        convert_dataset(coco_folder, tmp_path / "out", to="test-read-only")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="'coco'"):
        register_format("coco")(ReadOnlyFormat)
    assert ReadOnlyFormat.format == "test-read-only"
