"""Comparisons without their pages, and a real data set of a few small pictures."""

from pathlib import Path

import pytest
from fake_training import fake_training  # noqa: F401
from tiny_runs import config_in, rectangles, short_detector  # noqa: F401

from aploss.data.builtin import builtin_folder


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the drawing, which takes longer than all the rest."""
    monkeypatch.setattr("aploss.experiments.results.write_comparison_report", lambda comparison, out: out)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO data set of 12 + 4 + 4 pictures of 64 pixels."""
    return builtin_folder(cache=tmp_path_factory.mktemp("pictures"), image_size=64, counts=(12, 4, 4))
