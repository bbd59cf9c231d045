"""Builds wheel and sdist and proves both in clean environments: the loss alone, and each extra with a tiny command.

``make dist`` runs it. uv links packages out of its cache, so an environment takes seconds and next to no disk; each is
deleted before the next one is made. ``UV_TORCH_BACKEND=cpu make dist`` takes torch without CUDA.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = Path(sys.executable).parent  # the environment this runs in; nothing of it may help the clean ones
UV = str(OURS / "uv")
BUILD = ROOT / "build"
WITHOUT_EXTRAS = """
import sys, torch, aploss
scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
aploss.APLoss(delta=0)(scores, torch.tensor([0, 1, 0])).backward()
assert scores.grad.tolist() == [0.5, -0.5, 0.0]
assert "site-packages" in aploss.__file__, aploss.__file__
"""
USE_HUGGING_FACE = """
import torch, transformers as tf
from aploss import APLoss
from aploss.integrations import use_loss
backbone = tf.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
                                 out_features=["stage2", "stage3", "stage4"])
model = tf.RTDetrForObjectDetection(tf.RTDetrConfig(
    backbone_config=backbone, encoder_in_channels=[8, 8, 8], encoder_hidden_dim=16, d_model=16, num_queries=10,
    encoder_ffn_dim=16, decoder_ffn_dim=16, decoder_in_channels=[16, 16, 16], decoder_attention_heads=2,
    encoder_attention_heads=2, decoder_layers=1, num_labels=2, num_denoising=2))
use_loss(model, APLoss())
label = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])}
loss = model(pixel_values=torch.rand(1, 3, 64, 64), labels=[label]).loss
loss.backward()
assert loss.isfinite()
"""
TRAIN = (
    "aploss train --recipe demo --data builtin --out run --steps 2 "
    "--batch-size 2 --batches.workers 0 --validation.every 2"
)
# extras → what is run with them, one after the other
PROOFS = {
    "": ["python -c WITHOUT_EXTRAS"],
    "detect": ["aploss data check builtin", TRAIN, "aploss eval run --data builtin --split val"],
    "detect,export": [TRAIN, "aploss export run --out detector.onnx"],
    "detect,research": ["aploss theory consistency", "aploss compare --help", "python -c 'import tensorboard'"],
    "detect,hf": ["python -c USE_HUGGING_FACE"],
    "docs": ["mkdocs --version", "python -c 'import material, mkdocstrings'"],
}


def main() -> None:
    only = sys.argv[1:]
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(UV, "build", "--quiet", "--out-dir", str(ROOT / "dist"), str(ROOT))
    wheel, sdist = next((ROOT / "dist").glob("*.whl")), next((ROOT / "dist").glob("*.tar.gz"))
    check_description(wheel)
    for archive in (wheel, sdist):
        print(f"{archive.name}: {archive.stat().st_size / 1e6:.2f} MB", flush=True)
        for extras, commands in PROOFS.items():
            if not only or extras in only:
                prove(archive, extras, commands)
    print(f"proved; in {wheel.parent.relative_to(ROOT)}: {wheel.name}, {sdist.name}")


def check_description(wheel: Path) -> None:
    """The page on a package index shows neither pictures and links of the repository nor commands that need it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(name).decode().partition("\n\n")[2]
    assert "## Use the loss" in description
    unwanted = re.findall(r"<img|\]\((?!https?:)|\bmake (?:demo|test|docs)\b|pip install '?\.|Photographs", description)
    assert not unwanted, unwanted


def prove(archive: Path, extras: str, commands: list[str]) -> None:
    start = time.perf_counter()
    with clean_environment() as (environment, folder):
        run(UV, "pip", "install", "--quiet", f"aploss[{extras}] @ {archive.as_uri()}", env=environment)
        listing = run(UV, "pip", "list", "--format", "json", env=environment)
        packages = {one["name"] for one in json.loads(listing)}
        if not extras:
            refuse_extras(packages, environment, folder)
        for command in commands:
            run(*words_of(command), env=environment, cwd=folder)
    print(f"  {f'[{extras}]':18} {len(packages):3} packages, {time.perf_counter() - start:4.0f} s", flush=True)


@contextmanager
def clean_environment() -> Iterator[tuple[dict[str, str], Path]]:
    """Variables of a new environment, and an empty folder to work in; both vanish."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        venv, folder = Path(name, "venv"), Path(name, "work")
        folder.mkdir()
        run(UV, "venv", "--quiet", "--python", sys.executable, str(venv))
        scripts = venv / ("Scripts" if os.name == "nt" else "bin")
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        others = [place for place in os.environ["PATH"].split(os.pathsep) if Path(place) != OURS]
        environment |= {
            "VIRTUAL_ENV": str(venv),
            "PATH": os.pathsep.join([str(scripts), *others]),
            "APLOSS_CACHE": str(folder / "cache"),
        }
        yield environment, folder


def refuse_extras(packages: set[str], environment: dict[str, str], folder: Path) -> None:
    """Without extras nothing of them is installed, and a command says in one line what is missing."""
    unwanted = packages & {"torchvision", "pillow", "matplotlib", "scipy", "scikit-learn", "gradio", "onnx"}
    assert not unwanted, unwanted
    done = subprocess.run(
        ["aploss", "train", "--data", "builtin"], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 2, done
    assert re.fullmatch(r"aploss train: .*pip install 'aploss\[detect\]'\n", done.stderr), done.stderr


def words_of(command: str) -> list[str]:
    program, *words = command.split(maxsplit=2) if command.startswith("python -c") else command.split()
    if program == "python":
        words[1] = globals().get(words[1], words[1].strip("'"))
    return [program, *words]


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    program = shutil.which(command[0], path=(env or os.environ)["PATH"]) or command[0]
    done = subprocess.run([program, *command[1:]], env=env, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)[:200]}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
