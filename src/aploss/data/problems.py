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


# kind → (effect, description), for readers, checks, tests and documentation
KINDS = {
    "path-outside-dataset": (Effect.REFUSED, "a path that leads outside the dataset's folder"),
    "xml-entities": (Effect.REFUSED, "an XML file with a document type or entities, which are never expanded"),
    "unreadable-annotations": (Effect.SPLIT_UNUSABLE, "an annotation file for a whole split that cannot be read"),
    "bad-categories": (Effect.SPLIT_UNUSABLE, "a class list that is missing or not a list of distinct names"),
    "missing-folder": (Effect.SPLIT_UNUSABLE, "an image folder or list that does not exist"),
    "empty-split": (Effect.SPLIT_UNUSABLE, "a split without a usable image"),
    "no-boxes": (Effect.SPLIT_UNUSABLE, "a dataset without a single usable box"),
    "missing-image": (Effect.IMAGE_DROPPED, "an annotation whose image does not exist"),
    "unreadable-annotation": (Effect.IMAGE_DROPPED, "an annotation file of one image that is missing or unreadable"),
    "bad-image-entry": (Effect.IMAGE_DROPPED, "an image entry without a file name or an integer id"),
    "duplicate-image": (Effect.IMAGE_DROPPED, "an image or image id listed more than once in a split"),
    "unreadable-image": (Effect.IMAGE_DROPPED, "a file that is damaged, too large, or not an image of a known format"),
    "size-mismatch": (Effect.IMAGE_DROPPED, "an image whose size differs from its annotation's"),
    "degenerate-box": (Effect.BOX_DROPPED, "a box without width or height inside its image"),
    "bad-box": (Effect.BOX_DROPPED, "an object without a box of finite numbers, in YOLO of fractions"),
    "fraction-box": (Effect.BOX_DROPPED, "a box inside the first pixel: fractions of the image instead of pixels"),
    "unknown-class": (Effect.BOX_DROPPED, "an object without a class, or of a class that is not in the class list"),
    "bad-entry": (Effect.BOX_DROPPED, "an annotation that is not an object with fields, or of an unlisted image"),
    "out-of-bounds-box": (Effect.BOX_CLIPPED, "a box that exceeds its image"),
    "class-lists-differ": (Effect.KEPT, "splits with different class lists"),
    "image-without-annotation": (Effect.KEPT, "an image without a label file, used as an image without objects"),
    "image-in-two-splits": (Effect.KEPT, "the same image, or a copy of it, in two splits"),
    "copied-image": (Effect.KEPT, "two files of a split with the same content"),
    "repeated-box": (Effect.KEPT, "two objects of an image with the same box"),
    "tiny-box": (Effect.KEPT, "a box with a side below 2 pixels"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a dataset.

    Args:
        kind: a key of :data:`KINDS`.
        file: the file to look at, relative to the dataset's folder.
        message: a description with the value that was found.
        count: number of boxes or images concerned, if one line stands for many.
        image: the image concerned, relative to the dataset's folder.
        box: the box concerned, x1, y1, x2, y2 in the image's pixels.

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
    image: str = ""
    box: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        for text in ("file", "message"):
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


def summarise(problems: Iterable[Problem]) -> str:
    """Counts problems by kind in one line, with the first files of each.

    Example:
        >>> summarise([Problem("degenerate-box", f"{i}.xml", "no width") for i in range(5)])
        '5 degenerate-box (box dropped): 0.xml, 1.xml, 2.xml and 2 more'
    """
    by_kind: dict[str, Counter[str]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, Counter())[problem.file] += problem.count
    return "; ".join(
        f"{counts.total()} {kind} ({KINDS[kind][0].value}): {listed(list(counts))}" for kind, counts in by_kind.items()
    )
