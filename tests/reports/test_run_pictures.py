"""The pictures of a run's page: which ones are chosen, and what is written below them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from aploss.reports.run_files import read_run
from aploss.reports.run_report import PictureSource, false_positives, gallery, misses, side_by_side

MakeRun = Callable[..., Path]


def edit(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_paths_may_be_relative_to_the_run(make_run: MakeRun) -> None:
    run = make_run(images=2, steps=0)

    def relative(truth: dict) -> None:
        for image in truth["images"]:
            image["path"] = f"scenes/{Path(image['path']).name}"

    edit(run / "evaluation/ground_truth.json", relative)
    assert len(gallery(PictureSource(read_run(run)))) == 2


def test_misses_and_false_positives_are_those_of_the_matching(make_run: MakeRun) -> None:
    """A scene of two objects: one found, one not; and two wrong detections beside them."""
    run = make_run(images=1, steps=100)
    box = {"image_id": 1, "category_id": 1, "iscrowd": 0, "difficult": 0}
    objects = [
        {**box, "id": 5, "bbox": [10, 10, 30, 30]},
        {**box, "id": 6, "bbox": [80, 80, 40, 40]},
        {**box, "id": 7, "bbox": [120, 10, 30, 30], "difficult": 1},
    ]
    rows = [(0.2, [10, 10, 30, 30]), (0.1, [60, 10, 20, 20]), (0.15, [70, 80, 20, 20]),
            (0.3, [120, 10, 30, 30])]  # fmt: skip
    detections = [{"image_id": 1, "category_id": 1, "score": score, "bbox": corners} for score, corners in rows]
    edit(run / "evaluation/ground_truth.json", lambda one: one.update(annotations=objects))
    (run / "evaluation/detections.json").write_text(json.dumps(detections))
    (run / "evaluation/calibration.json").write_text(json.dumps({"draw_threshold": 0.12}))
    matches = {"detections": [True, False, False, None], "ground_truth": {"5": 0, "6": None, "7": 3}}
    (run / "evaluation/matches.json").write_text(json.dumps(matches))
    source = PictureSource(read_run(run))
    assert [picture.caption for picture in misses(source)] == ["disk, not detected: scene_001.png"]
    assert [picture.caption for picture in false_positives(source)] == [
        "disk 0.15: scene_001.png",
        "disk 0.10: scene_001.png",
    ]
    assert [picture.caption for picture in gallery(source)] == ["scene_001.png: objects 3, detections 3, wrong 1"]


def test_two_runs_are_shown_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=4, steps=100)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (run / "scenes" / "scene_001.png").unlink()
    pictures = side_by_side({"focal": read_run(run), "ap": read_run(other, images=tmp_path)}, count=4)
    assert pictures.columns == 2
    assert [picture.caption for picture in pictures.figures] == [
        f"{loss}: scene_{number:03d}.png" for number in (2, 3, 4) for loss in ("Focal loss", "AP-loss")
    ]
