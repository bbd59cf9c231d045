"""The built-in set: the same everywhere, safe to make twice at once, varied, boxes tight."""

import hashlib
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aploss.data import _paint, _scene, builtin
from aploss.data._paint import Figure
from aploss.errors import ConfigError, DataError

SMALL = {"image_size": 48, "counts": (5, 2, 2)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    builtin.builtin_folder(cache=folder, **SMALL)
    return folder


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_processes_that_start_at_once_get_the_same_complete_folder_bit_for_bit(
    cache: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [
        context.Process(target=builtin.builtin_folder, kwargs={"cache": tmp_path, **SMALL})
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    (made,) = tmp_path.iterdir()  # no scratch folder is left behind
    assert fingerprint(made) == fingerprint(next(cache.iterdir()))


def test_second_use_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(builtin, "draw_scene")
    assert builtin.builtin_folder(cache=cache, **SMALL) == next(cache.iterdir())


def test_folder_with_a_file_missing_is_drawn_again(cache: Path, tmp_path: Path) -> None:
    folder = builtin.builtin_folder(cache=tmp_path, **SMALL)
    (folder / "train" / "000003.png").unlink()
    assert builtin.builtin_folder(cache=tmp_path, **SMALL) == folder
    assert fingerprint(folder) == fingerprint(next(cache.iterdir()))
    assert list(tmp_path.iterdir()) == [folder]


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


def test_cache_folder_is_the_one_named_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "here"))
    assert builtin.cache_folder() == tmp_path / "here"
    monkeypatch.delenv("APLOSS_CACHE")
    assert builtin.cache_folder().is_absolute()


def test_cache_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file.*APLOSS_CACHE") as caught:
        builtin.builtin_folder(cache=blocked, **SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", -1), ("image_size", 16), ("counts", (5, 0, 1))]
)
def test_impossible_settings_are_refused(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(value).strip("()")):
        builtin.builtin_folder(cache=tmp_path, **{**SMALL, setting: value})
    with pytest.raises(ConfigError, match="no split 'valid'"):
        builtin.builtin_dataset("valid", cache=tmp_path)


def test_scenes_are_varied_and_boxes_stay_inside() -> None:
    scenes = [_scene.draw_scene(np.random.default_rng([7, index]), 64) for index in range(60)]
    labels = np.concatenate([scene.labels for scene in scenes])
    boxes = np.concatenate([scene.boxes for scene in scenes])
    counts = np.bincount(labels, minlength=5)
    assert counts.min() > 0.1 * counts.sum()
    assert max(len(scene.labels) for scene in scenes) >= 4
    longer = (boxes[:, 2:] - boxes[:, :2]).max(axis=1) / 64
    assert longer.max() < 0.53  # a pixel beyond one half
    assert np.quantile(longer, 0.05) < 0.24
    assert np.quantile(longer, 0.95) > 0.42
    assert boxes.min() >= 0
    assert boxes.max() <= 64
    assert all(scene.pixels.std() > 5 for scene in scenes)


def test_some_pictures_show_no_object_and_some_show_lookalikes() -> None:
    casts = [_scene._cast(np.random.default_rng([3, index])) for index in range(1500)]
    objects = np.array([sum(label is not None for label in cast) for cast in casts])
    lookalikes = np.array([sum(label is None for label in cast) for cast in casts])
    assert abs(np.mean(objects == 0) - _scene.EMPTY_SHARE) < 0.02
    assert np.mean(lookalikes > 0) > 0.5


@pytest.mark.parametrize("label", range(5))
@pytest.mark.parametrize("size", [96, 224])
def test_box_is_tight_around_the_pixels_that_an_object_changes(
    label: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scene, "GRAIN", (0.0, 0.0))
    monkeypatch.setattr(_paint, "_shadow", lambda small, size: small.point(lambda value: 0))
    pictures = []
    for cast in ([label], []):
        monkeypatch.setattr(_scene, "_cast", lambda generator, cast=cast: cast)
        pictures.append(_scene.draw_scene(np.random.default_rng(label), size))
    changed = np.any(pictures[0].pixels != pictures[1].pixels, axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    # A pixel that is touched at all changes, so the box lies less than a pixel inside.
    inset = (pictures[0].boxes[0] - seen) * [1, 1, -1, -1]
    assert inset.min() >= 0
    assert inset.max() < 1.3


def rectangle(x1: float, y1: float, x2: float, y2: float) -> Figure:
    """A square object's figure with another outline."""
    outline = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], dtype=float)
    some = _scene._figure(np.random.default_rng(0), 64, 1)
    return replace(some, outline=outline, centre=outline.mean(axis=0), angle=0.0, extent=40.0)


def test_hidden_part_does_not_count_for_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second hides 4 of the first one's 40 columns, a tenth of it.
    figures = iter([rectangle(10, 10, 50, 50), rectangle(46, 4, 60, 56)])
    monkeypatch.setattr(_scene, "_cast", lambda generator: [1, 1])
    monkeypatch.setattr(_scene, "_figure", lambda *_: next(figures))
    scene = _scene.draw_scene(np.random.default_rng(0), 64)
    np.testing.assert_allclose(scene.boxes, [[10, 10, 46, 50], [46, 4, 60, 56]], atol=0.26)


def test_thing_that_would_hide_too_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    same = rectangle(10, 10, 50, 50)
    monkeypatch.setattr(_scene, "_cast", lambda generator: [1, 2, None])
    monkeypatch.setattr(_scene, "_figure", lambda *_: same)
    scene = _scene.draw_scene(np.random.default_rng(0), 64)
    assert scene.labels.tolist() == [1]
