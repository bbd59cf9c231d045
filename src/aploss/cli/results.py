"""The result files of ``aploss predict``: partial results to resume from, COCO results and VOC submissions."""

import json
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from aploss.cli.command import run_folder_of
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.files import as_file_name, write_json, write_text, write_whole

if TYPE_CHECKING:
    from aploss.detectors.predict import Prediction


class Parts:
    """The predictions of a command that has not finished, one line per image; the first line identifies the command.

    Raises:
        RunError: the file belongs to another command.
    """

    def __init__(self, file: Path, header: str) -> None:
        self.file = file
        if not file.is_file():
            write_text(file, header)
        if self.first_line(file) != header:
            raise RunError(f"{file} belongs to another command that was interrupted: finish it, or delete the file")
        self._done = {row["path"]: row["version"] for row in self._rows()}

    @staticmethod
    def first_line(file: Path) -> str:
        """The first line of a file; empty if there is none."""
        if not file.is_file():
            return ""
        with file.open(encoding="utf-8", errors="replace") as lines:
            return lines.readline()

    def __contains__(self, path: Path) -> bool:
        return str(path) in self._done and self._done[str(path)] == file_version(path)

    def add(self, path: Path, found: "Prediction") -> None:
        """Appends the prediction of an image."""
        columns = {name: getattr(found, name).tolist() for name in ("boxes", "scores", "labels")}
        self._done[str(path)] = file_version(path)
        row = {"path": str(path), "version": self._done[str(path)], "size": found.image_size, **columns}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The last prediction of each image, with ``path``, ``size``, ``boxes``, ``scores`` and ``labels``."""
        return (row for row in self._rows() if row["version"] == self._done[row["path"]])

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The lines after the first, one at a time; a line that a kill cut is removed."""
        with self.file.open("rb+") as file:
            end = len(file.readline())
            for line in file:
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if row is None:
                    file.truncate(end)
                    return
                end += len(line)
                yield row


def file_version(path: Path) -> list[int]:
    """Identifies the content of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def annotated_ids(options: Namespace, paths: Sequence[Path], class_names: Sequence[str]) -> tuple[list[int], list[int]]:
    """The ids of the images and of the classes in ``--annotations`` or in the COCO dataset the run was trained on."""
    from aploss.data import find_source
    from aploss.data.coco import CocoFormat, coco_names

    files = [Path(options.annotations)] if options.annotations else []
    folder = run_folder_of(options.run)
    if not files and folder is not None:
        config = folder.read_config()
        source = find_source(config.data, format=config.splits.format)
        files = source.annotation_files if isinstance(source, CocoFormat) else []
    if not files:
        raise ConfigError("--submission coco needs --annotations FILE: the run was not trained on a COCO dataset")
    image_ids: defaultdict[str, set[int]] = defaultdict(set)
    category_ids: defaultdict[str, set[int]] = defaultdict(set)
    for file in files:
        try:
            found_names = coco_names(file.read_bytes())
        except ValueError as error:
            raise DataError(f"{file}: not valid COCO JSON: {error}") from None
        for ids, names in zip((image_ids, category_ids), found_names, strict=True):
            for number, name in names.items():
                ids[name].add(number)
    found = [_ids_of_image(path, image_ids) for path in paths]
    unclear = [str(path) for path, ids in zip(paths, found, strict=True) if len(ids) != 1]
    unclear += [name for name in class_names if len(category_ids[name]) != 1]
    if unclear:
        where = listed([str(file) for file in files])
        raise DataError(f"{listed(unclear)}: no unique id in {where}; choose a file with --annotations")
    return [min(ids) for ids in found], [min(category_ids[name]) for name in class_names]


def _ids_of_image(path: Path, ids: dict[str, set[int]]) -> set[int]:
    """The ids of an image by the longest end of its path that is annotated."""
    ends = ("/".join(path.parts[start:]) for start in range(len(path.parts)))
    return next((ids[end] for end in ends if end in ids), set())


def check_voc_names(paths: Sequence[Path], class_names: Sequence[str]) -> None:
    """Raises DataError for names that the files of the VOC server cannot represent."""
    stems = [path.stem for path in paths]
    if repeated := [stem for stem, times in Counter(stems).items() if times > 1]:
        raise DataError(f"several images are called {listed(repeated)}: a VOC submission names images without folders")
    if wrong := [name for name in (*stems, *class_names) if name != as_file_name(name, longest=200)]:
        raise DataError(f"a VOC submission cannot contain the names {listed(wrong)}")


def write_results(
    folder: Path, parts: Parts, image_ids: dict[Path, int], category_ids: Sequence[int], class_names: Sequence[str]
) -> int:
    """Writes ``detections.json``, and ``images.json`` with the images and classes that its ids stand for.

    Returns:
        The number of detections.
    """
    images, detections = [], 0

    def write(file: IO[bytes]) -> None:
        nonlocal detections
        for row in parts:
            if (number := image_ids.get(Path(row["path"]))) is None:
                continue  # the image has been removed since the command was stopped
            width, height = row["size"]
            images.append({"id": number, "file_name": row["path"], "width": width, "height": height})
            for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
                entry = {"image_id": number, "category_id": category_ids[label], "bbox": [x1, y1, x2 - x1, y2 - y1]}
                file.write(b", " if detections else b"[")
                file.write(json.dumps({**entry, "score": score}).encode())
                detections += 1
        file.write(b"]" if detections else b"[]")

    write_whole(folder / "detections.json", write)
    categories = [{"id": number, "name": name} for number, name in zip(category_ids, class_names, strict=True)]
    write_json(folder / "images.json", {"images": images, "categories": categories, "annotations": []}, indent=1)
    return detections


def write_voc_submission(folder: Path, parts: Parts, class_names: Sequence[str]) -> None:
    """Writes ``comp4_det_test_CLASS.txt`` of each class: image, score and box, whose pixels count from 1."""
    lines: dict[str, list[str]] = {name: [] for name in class_names}
    for row in parts:
        for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
            box = " ".join(f"{corner:.3f}" for corner in (x1 + 1, y1 + 1, x2, y2))
            lines[class_names[label]].append(f"{Path(row['path']).stem} {score:.9g} {box}\n")
    for name, own in lines.items():
        write_text(folder / f"comp4_det_test_{name}.txt", "".join(own))
