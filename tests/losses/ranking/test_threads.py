"""Jobs on several threads: torch's own, or a pool."""

import sys
import threading
import time

import pytest
import torch

from aploss.losses.ranking import threads
from aploss.losses.ranking.threads import run_together


@pytest.fixture(params=["torch's threads", "own threads"])
def kind(request, monkeypatch):
    if request.param == "own threads":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("torch has no threads of GNU's OpenMP here")
    yield request.param
    torch.set_num_threads(1)


def where() -> int:
    time.sleep(0.02)  # long enough for every thread to get a job
    return threading.get_ident()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_threads_run_than_torch_uses(kind, count):
    torch.set_num_threads(count)
    used = run_together([where] * 12)
    assert threading.get_ident() in used
    assert len(set(used)) == count


def test_results_keep_the_order_of_the_jobs(kind):
    torch.set_num_threads(2)
    assert run_together([lambda k=k: k for k in range(50)]) == list(range(50))


def test_a_failure_is_raised_and_the_next_call_works(kind):
    def fail():
        raise ValueError("a job that fails")

    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="a job that fails"):
        run_together([fail, fail, fail])
    assert run_together([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are GNU's on Linux alone")
def test_on_linux_torchs_threads_are_found():
    assert threads._openmp() is not None
