"""The built-in set: the same everywhere, safe to make twice at once, varied, boxes tight."""

import hashlib
import multiprocessing
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from aploss.data import builtin
from aploss.errors import ConfigError

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


def test_pictures_depend_on_the_seed_and_not_on_how_many_there_are(cache: Path, tmp_path: Path) -> None:
    first, expected = "train/000001.png", fingerprint(made_in(cache)[0])
    more = builtin.builtin_folder(cache=tmp_path, image_size=48, counts=(6, 1, 1))
    other = builtin.builtin_folder(cache=tmp_path, image_size=48, counts=(2, 1, 1), seed=1)
    assert fingerprint(more)[first] == expected[first]
    assert len({expected[first], fingerprint(other)[first], expected["test/000001.png"]}) == 3


def test_every_split_loads_as_coco_without_problems(cache: Path) -> None:
    for split, count in zip(builtin.SPLITS, SMALL["counts"], strict=True):
        dataset = builtin.builtin_dataset(split, cache=cache, **SMALL)
        assert (dataset.name, dataset.split, len(dataset)) == ("builtin", split, count)
        assert dataset.class_names == ("circle", "square", "triangle", "star", "cross")
        assert dataset.problems == []
        image, target = dataset[0]
        assert image.shape == (3, 48, 48)
        assert len(target["boxes"]) == len(target["labels"])


@pytest.mark.parametrize(("setting", "value"), [("seed", -1), ("image_size", 16), ("counts", (5, 0, 1))])
def test_impossible_settings_are_refused(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(value).strip("()")):
        builtin.builtin_folder(cache=tmp_path, **{**SMALL, setting: value})
    with pytest.raises(ConfigError, match="no split 'valid'"):
        builtin.builtin_dataset("valid", cache=tmp_path)


def test_pictures_are_those_of_their_version() -> None:
    """A change of the pictures needs a new VERSION: results on them are compared across releases."""
    scenes = [builtin.draw_scene(np.random.default_rng([builtin.VERSION, 0, 0, index]), 128) for index in range(8)]
    digest = hashlib.sha256(b"".join(column.tobytes() for scene in scenes for column in scene)).hexdigest()
    assert (builtin.VERSION, digest[:16]) == (2, "7e9d3d5c9f57041a")
