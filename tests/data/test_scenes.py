"""Pictures of the built-in set: varied, boxes tight around what is visible."""

from dataclasses import replace

import numpy as np
import pytest

from aploss.data.scenes import EMPTY_SHARE, Silhouette, choose_things, draw_scene, make_silhouette


def test_scenes_are_varied_and_boxes_stay_inside() -> None:
    scenes = [draw_scene(np.random.default_rng([7, index]), 64) for index in range(60)]
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
    scenes = [choose_things(np.random.default_rng([3, index])) for index in range(1500)]
    objects = np.array([sum(label is not None for label in things) for things in scenes])
    lookalikes = np.array([sum(label is None for label in things) for things in scenes])
    assert abs(np.mean(objects == 0) - EMPTY_SHARE) < 0.02
    assert np.mean(lookalikes > 0) > 0.5


@pytest.mark.parametrize("label", range(5))
@pytest.mark.parametrize("size", [96, 224])
def test_box_is_tight_around_the_pixels_that_an_object_changes(label: int, size: int) -> None:
    pictures = [
        draw_scene(np.random.default_rng(label), size, things=things, grain=(0.0, 0.0), shadows=False)
        for things in ([label], [])
    ]
    changed = np.any(pictures[0].pixels != pictures[1].pixels, axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    # A pixel that is touched at all changes, so the box lies less than a pixel inside.
    inset = (pictures[0].boxes[0] - seen) * [1, 1, -1, -1]
    assert inset.min() >= 0
    assert inset.max() < 1.3


def rectangle(x1: float, y1: float, x2: float, y2: float) -> Silhouette:
    """A square object's silhouette with another outline."""
    outline = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], dtype=float)
    some = make_silhouette(np.random.default_rng(0), 64, 1)
    return replace(some, outline=outline, centre=outline.mean(axis=0), angle=0.0, extent=40.0)


def test_hidden_part_does_not_count_for_the_box() -> None:
    # The second hides 4 of the first one's 40 columns, a tenth of it.
    outlines = iter([rectangle(10, 10, 50, 50), rectangle(46, 4, 60, 56)])
    scene = draw_scene(np.random.default_rng(0), 64, things=[1, 1], silhouette=lambda *_: next(outlines))
    np.testing.assert_allclose(scene.boxes, [[10, 10, 46, 50], [46, 4, 60, 56]], atol=0.26)


def test_thing_that_would_hide_too_much_is_left_out() -> None:
    same = rectangle(10, 10, 50, 50)
    scene = draw_scene(np.random.default_rng(0), 64, things=[1, 2, None], silhouette=lambda *_: same)
    assert scene.labels.tolist() == [1]
