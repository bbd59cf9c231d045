"""Importing the loss library is quick and needs nothing but torch and numpy; numba makes it fast."""

import subprocess
import sys

import pytest

import aploss

EXTRAS = ("torchvision", "matplotlib", "sklearn", "PIL", "gradio", "yaml", "onnx", "lightning")

SCRIPT = """
import os, sys, time, warnings
import torch
sys.modules.update(dict.fromkeys({absent}))  # None: an import of it fails
start = time.perf_counter()
from aploss import APLoss
print(time.perf_counter() - start, flush=True)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    del sys.modules["numba"]  # as for most who use a loss
import aploss
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        aploss.ap_loss(scores, torch.tensor([0, 1, 0]), delta=0).backward()
        assert scores.grad.tolist() == [0.5, -0.5, 0.0]
assert ["pip install numba" in str(one.message) for one in caught] == ([] if child else [True]), caught
"""


def test_import_leaves_numba_and_the_extras_for_later_and_a_loss_needs_no_extra_nor_numba():
    script = SCRIPT.format(absent=(*EXTRAS, "numba"))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 10  # seconds: nothing was compiled


def test_a_module_of_the_data_package_imports_torch_only_if_it_needs_it():
    script = "import sys, aploss.data.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FocalLos'"):
        aploss.FocalLos  # noqa: B018
    assert "ap_loss" in dir(aploss)
