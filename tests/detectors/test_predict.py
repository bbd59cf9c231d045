"""Any kind of picture, calibrated scores, and results that do not depend on the company."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from aploss.detectors import Detector, build_detector
from aploss.detectors.predict import evaluation_mode, image_tensor
from aploss.errors import ConfigError, DataError
from aploss.evaluation import Calibration


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def test_all_kinds_of_pictures_give_the_same_prediction(detector: Detector, pixels: np.ndarray, tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / "image.png")
    chw = torch.from_numpy(pixels).permute(2, 0, 1)
    kinds = [
        tmp_path / "image.png",
        str(tmp_path / "image.png"),
        Image.fromarray(pixels),
        pixels,
        chw,
        chw.float() / 255,
        chw.double() / 255,
    ]
    predictions = detector.predict(kinds)
    assert len(predictions) == len(kinds)
    for prediction in predictions:
        assert len(prediction) == 100
        assert prediction.image_size == (70, 50)
        torch.testing.assert_close(prediction.boxes, predictions[0].boxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(prediction.scores, predictions[0].scores)
        assert prediction.class_names == predictions[0].class_names
    assert predictions[0].path == str(tmp_path / "image.png")
    assert predictions[3].path is None


def test_a_prediction_is_what_the_detector_gives_with_names(detector: Detector, pixels: np.ndarray) -> None:
    (prediction,) = detector.predict(pixels)
    with torch.no_grad():
        (found,) = detector([torch.from_numpy(pixels).permute(2, 0, 1) / 255])
    assert torch.equal(prediction.boxes, found["boxes"])
    assert torch.equal(prediction.scores, found["scores"])
    names = tuple(("cat", "dog")[label] for label in found["labels"].tolist())
    assert prediction.class_names == names
    plain = json.loads(json.dumps(prediction.to_dict()))
    assert (plain["width"], plain["height"]) == (70, 50)
    assert plain["detections"][3]["class_name"] == names[3]
    assert plain["detections"][3]["box"] == found["boxes"][3].tolist()


def test_scores_are_calibrated_and_the_threshold_is_of_calibrated_scores(
    detector: Detector, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw,) = detector.predict(pixels)
    middle = float(raw.scores.median())
    calibration = Calibration(x=[0.0, middle, 1.0], y=[0.0, 0.6, 0.9])
    monkeypatch.setattr(detector, "calibration", calibration)

    (calibrated,) = detector.train().predict(iter([pixels]))
    assert detector.training  # the mode is left as it was
    detector.eval()
    expected = calibration(raw.scores.double().numpy())
    np.testing.assert_allclose(calibrated.scores.numpy(), expected, rtol=1e-6)
    assert torch.equal(calibrated.boxes, raw.boxes)

    monkeypatch.setattr(detector, "draw_threshold", 0.6)
    (drawn,) = detector.predict(pixels)
    assert len(drawn) == int((expected >= 0.6).sum()) < 100
    assert len(detector.predict(pixels, threshold=0.0)[0]) == 100
    assert len(detector.predict(pixels, threshold=0.95)[0]) == 0


def test_the_other_images_of_a_batch_do_not_matter(detector: Detector) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(40, 60), (64, 64), (40, 60), (90, 30), (64, 64)]
    images = [torch.rand(3, *size, generator=generator) for size in sizes]
    together = detector.predict(images, batch_size=4)
    for image, among_others in zip(images, together, strict=True):
        (alone,) = detector.predict([image])
        torch.testing.assert_close(among_others.scores, alone.scores, rtol=1e-4, atol=1e-6)
        # two detections with all but equal scores may change places
        rows = torch.cat([alone.boxes, 100.0 * alone.labels[:, None]], dim=1)
        others = torch.cat([among_others.boxes, 100.0 * among_others.labels[:, None]], dim=1)
        assert float((rows[:, None] - others).abs().amax(dim=2).amin(dim=1).max()) < 1e-2


def test_pillow_images_are_read_as_files_are(tmp_path: Path) -> None:
    transparent = Image.new("RGBA", (8, 6), (255, 0, 0, 0))
    deep = Image.fromarray(np.full((6, 8), 32768, dtype=np.uint16))
    turned = Image.new("RGB", (8, 6), "blue")
    turned.getexif()[0x0112] = 6  # the camera was held upright
    for index, image in enumerate((transparent, deep, turned)):
        path = tmp_path / f"{index}.png"
        image.save(path, exif=image.getexif())
        assert torch.equal(image_tensor(image), image_tensor(path))
    assert image_tensor(turned).shape == (3, 8, 6)


def test_wrong_thresholds_and_stored_features_are_refused(detector: Detector) -> None:
    for threshold in ("LRP", "lrp"):  # unknown, and without a calibration
        with pytest.raises(ConfigError):
            detector.predict([], threshold=threshold)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="features"):
        detector(detector.features(torch.zeros(1, 3, 64, 64)))


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((3, 5, 4), dtype=np.uint8),
        np.zeros((5, 4, 3)),
        torch.zeros(1, 5, 4),
        torch.zeros(3, 5, 0),
        torch.full((3, 5, 4), 128.0),
        torch.full((3, 5, 4), float("nan")),
        torch.zeros(3, 5, 4, dtype=torch.int64),
        "no/such/image.jpg",
        object(),
    ],
)
def test_objects_that_are_not_images_are_refused(image: object) -> None:
    with pytest.raises(DataError):
        image_tensor(image)  # type: ignore[arg-type]


def test_a_damaged_pillow_image_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"half\.png: damaged image"):
        image_tensor(Image.open(path))


@pytest.mark.parametrize(("name", "searches"), [("retinanet-tiny", False), ("ssdlite", True)])
def test_cudnn_searches_algorithms_only_for_images_of_one_size(
    name: str, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with evaluation_mode(build_detector(name, class_names=["a"])):
        assert torch.backends.cudnn.benchmark == searches
    assert torch.backends.cudnn.benchmark
