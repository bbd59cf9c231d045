"""The kinds of problems a dataset can have, and what loading does about each."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from aploss.errors import DataError, listed


class Effect(StrEnum):
    """What loading does about a problem, most severe first."""

    REFUSED = "refused"  # nothing of the dataset is loaded
    SPLIT_UNUSABLE = "split unusable"
    IMAGE_DROPPED = "image dropped"
    BOX_DROPPED = "box dropped"
    BOX_CLIPPED = "box clipped"
    KEPT = "kept"  # loaded unchanged


_DESCRIPTIONS = {
    Effect.REFUSED: {
        "path-outside-dataset": "a path that leads outside the dataset's folder",
        "xml-entities": "an XML file with a document type or entities, which are never expanded",
    },
    Effect.SPLIT_UNUSABLE: {
        "unreadable-annotations": "an annotation file for a whole split that cannot be read",
        "missing-section": "an annotation file without a required section",
        "bad-categories": "a class list that is not a list of distinct names",
        "missing-folder": "an image folder or list that does not exist",
        "empty-split": "a split without a usable image",
        "no-classes": "no class names, neither in the dataset nor given",
        "no-boxes": "a dataset without a single usable box",
    },
    Effect.IMAGE_DROPPED: {
        "missing-image": "an annotation whose image does not exist",
        "annotation-without-image": "an annotation file outside of every split, without its image",
        "missing-annotation": "a listed image without its annotation file",
        "unreadable-annotation": "an annotation file of one image that cannot be read",
        "bad-image-entry": "an image entry without a file name or an integer id",
        "duplicate-image": "an image listed more than once in a split",
        "duplicate-image-id": "an image id used more than once",
        "empty-image": "an image file of 0 bytes",
        "unreadable-image": "a file that is not an image of a known format",
        "truncated-image": "an image whose data is cut off or damaged",
        "image-too-large": "an image with so many pixels that it may be a decompression bomb",
        "image-not-a-file": "a folder or device in place of an image",
        "size-mismatch": "an image whose size differs from its annotation's",
    },
    Effect.BOX_DROPPED: {
        "degenerate-box": "a box without width or height, or with its corners swapped",
        "outside-box": "a box that lies wholly outside its image",
        "non-numeric-coordinate": "a coordinate that is not a number",
        "non-finite-coordinate": "a NaN or infinite coordinate",
        "missing-coordinate": "a box with too few or too many coordinates",
        "missing-box": "an object without a box",
        "missing-class": "an object without a class",
        "unknown-class": "an object of a class that is not in the class list",
        "unknown-image": "a box of an image that is not listed",
        "not-normalised": "YOLO coordinates that are not fractions of the image size",
        "bad-row": "a YOLO row that is not 'class cx cy w h' or 'class x1 y1 x2 y2 x3 y3 ...'",
        "bad-entry": "an annotation entry that is not an object with fields",
    },
    Effect.BOX_CLIPPED: {"out-of-bounds-box": "a box that exceeds its image"},
    Effect.KEPT: {
        "class-lists-differ": "splits with different class lists",
        "class-without-boxes": "a class without a box in any split",
        "similar-class-names": "class names that differ only in case, spaces or punctuation",
        "duplicate-box": "the same box of the same class twice in an image",
        "duplicate-annotation-id": "an annotation id used more than once",
        "bad-flag": "a difficult or crowd flag that is neither 0 nor 1 (read as 0)",
        "missing-size": "an annotation without an image size (read from the image)",
        "file-name-mismatch": "an annotation that names another image than the one paired with it",
        "zero-based-box": "coordinates from 0 in VOC, which counts from 1 (clipped to the image)",
        "unlisted-annotation": "an annotated image outside of every split",
        "image-without-annotation": "an image without an annotation",
        "image-in-two-splits": "the same image in two splits",
        "same-content": "two image files with the same content",
        "wrong-extension": "an image whose content does not match its extension",
        "several-frames": "an image with several frames (the first is used)",
        "rotated-image": "a photograph whose EXIF rotation its annotation ignores (so does loading)",
        "tiny-image": "an image with a side of less than 16 pixels",
        "blank-image": "an image of one colour",
    },
}
# kind → (effect, description), for readers, checks, tests and documentation
KINDS = {kind: (effect, text) for effect, kinds in _DESCRIPTIONS.items() for kind, text in kinds.items()}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a dataset.

    Args:
        kind: a key of :data:`KINDS`.
        file: the file to look at, relative to the dataset's folder.
        message: a description with the value that was found.
        count: number of boxes or images concerned, if one line stands for many.

    Example:
        >>> problem = Problem("degenerate-box", "Annotations/7.xml", "object 2: xmin 5 = xmax 5")
        >>> problem.effect
        <Effect.BOX_DROPPED: 'box dropped'>
        >>> print(problem)
        Annotations/7.xml: object 2: xmin 5 = xmax 5 (degenerate-box, box dropped)
    """

    kind: str
    file: str
    message: str
    count: int = 1

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        for text in ("file", "message"):
            if not getattr(self, text).isascii():
                # An unpaired surrogate, from JSON or a file name, could not be printed.
                printable = getattr(self, text).encode("utf-8", "backslashreplace").decode()
                object.__setattr__(self, text, printable)

    @property
    def effect(self) -> Effect:
        """What loading does about this problem."""
        return KINDS[self.kind][0]

    def __str__(self) -> str:
        return f"{self.file}: {self.message} ({self.kind}, {self.effect.value})"


class ProblemError(DataError):
    """A problem that prevents reading a split; a check lists it and continues."""

    def __init__(self, kind: str, file: str, message: str) -> None:
        super().__init__(kind, file, message)
        self.problem = Problem(kind, file, message)

    def of_one_image(self) -> Problem:
        """The problem for an unreadable file that belongs to one image instead of a whole split."""
        whole_split = self.problem.kind == "unreadable-annotations"
        return replace(self.problem, kind="unreadable-annotation") if whole_split else self.problem

    def __str__(self) -> str:
        return f"{self.problem.file}: {self.problem.message}"


def summarise(problems: Iterable[Problem], *, files: int = 3) -> str:
    """Counts problems by kind in one line, with the first files of each.

    Example:
        >>> summarise([Problem("degenerate-box", f"{i}.xml", "no width") for i in range(5)])
        '5 degenerate-box (box dropped): 0.xml, 1.xml, 2.xml and 2 more'
        >>> summarise([])
        'no problems'
    """
    by_kind: dict[str, Counter[str]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, Counter())[problem.file] += problem.count
    parts = []
    for kind, counts in by_kind.items():
        parts.append(f"{counts.total()} {kind} ({KINDS[kind][0].value}): {listed(list(counts), files)}")
    return "; ".join(parts) or "no problems"
