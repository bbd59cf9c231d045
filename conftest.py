"""Doctests of ``src``: those of the Triton kernels only where Triton is installed, each in a temporary folder."""

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("triton") else ["src/aploss/losses/ranking/triton"]


@pytest.fixture(autouse=True)
def _run_doctests_in_a_temporary_folder(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
