"""The built-in set: the same everywhere, safe to make twice at once, varied, boxes tight."""

import hashlib
import multiprocessing
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from aploss.data import builtin
from aploss.errors import ConfigError, DataError

SMALL = {"image_size": 48, "counts": (5, 2, 2)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    builtin.builtin_folder(cache=folder, **SMALL)
    return folder


def made_in(folder: Path) -> list[Path]:
    """What a cache folder holds, but for the lock."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_processes_that_start_at_once_get_the_same_complete_folder_bit_for_bit(cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [context.Process(target=builtin.builtin_folder, kwargs={"cache": tmp_path, **SMALL}) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    (made,) = made_in(tmp_path)  # no scratch folder is left behind
    assert fingerprint(made) == fingerprint(made_in(cache)[0])


def test_second_use_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(builtin, "draw_scene")
    assert builtin.builtin_folder(cache=cache, **SMALL) == made_in(cache)[0]


def test_folder_with_a_split_missing_is_drawn_again(cache: Path, tmp_path: Path) -> None:
    folder = builtin.builtin_folder(cache=tmp_path, **SMALL)
    shutil.rmtree(folder / "train")
    assert builtin.builtin_folder(cache=tmp_path, **SMALL) == folder
    assert fingerprint(folder) == fingerprint(made_in(cache)[0])
    assert made_in(tmp_path) == [folder]


def test_pictures_depend_on_the_seed_and_not_on_how_many_there_are(tmp_path: Path) -> None:
    few = builtin.builtin_folder(cache=tmp_path, image_size=48, counts=(2, 1, 1))
    more = builtin.builtin_folder(cache=tmp_path, image_size=48, counts=(3, 1, 1))
    other = builtin.builtin_folder(cache=tmp_path, image_size=48, counts=(2, 1, 1), seed=1)
    first = "train/000001.png"
    assert fingerprint(few)[first] == fingerprint(more)[first]
    assert fingerprint(few)[first] != fingerprint(other)[first]
    assert fingerprint(few)[first] != fingerprint(few)["test/000001.png"]


def test_every_split_loads_as_coco_without_problems(cache: Path) -> None:
    for split, count in zip(builtin.SPLITS, SMALL["counts"], strict=True):
        dataset = builtin.builtin_dataset(split, cache=cache, **SMALL)
        assert (dataset.name, dataset.split, len(dataset)) == ("builtin", split, count)
        assert dataset.class_names == ("circle", "square", "triangle", "star", "cross")
        assert dataset.problems == []
        image, target = dataset[0]
        assert image.shape == (3, 48, 48)
        assert len(target["boxes"]) == len(target["labels"])


def test_cache_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"file.*APLOSS_CACHE") as caught:
        builtin.builtin_folder(cache=blocked, **SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("setting", "value"), [("seed", -1), ("image_size", 16), ("counts", (5, 0, 1))])
def test_impossible_settings_are_refused(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(value).strip("()")):
        builtin.builtin_folder(cache=tmp_path, **{**SMALL, setting: value})
    with pytest.raises(ConfigError, match="no split 'valid'"):
        builtin.builtin_dataset("valid", cache=tmp_path)


def test_scenes_are_varied_and_boxes_stay_inside() -> None:
    scenes = [builtin.draw_scene(np.random.default_rng([7, index]), 64) for index in range(60)]
    boxes = np.concatenate([scene.boxes for scene in scenes])
    counts = np.bincount(np.concatenate([scene.labels for scene in scenes]), minlength=5)
    assert counts.min() > 0.1 * counts.sum()
    assert max(len(scene.labels) for scene in scenes) >= 4
    longer = (boxes[:, 2:] - boxes[:, :2]).max(axis=1) / 64
    assert longer.max() < 0.53  # a pixel beyond one half
    assert np.quantile(longer, 0.05) < 0.24
    assert np.quantile(longer, 0.95) > 0.42
    assert boxes.min() >= 0
    assert boxes.max() <= 64
