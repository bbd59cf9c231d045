"""Tries two machines on one: two network namespaces with a veth pair between them, each a node of its own.

Runs a two-node training under torchrun, the exact ranking over both nodes, and a comparison on a two-node Ray cluster;
in the middle of each it kills a node or cuts the link, and reports what happens. Nothing outside the two namespaces is
touched, and both are removed at the end.

    sudo python tools/two_nodes.py [training] [ranking] [ray]

Needs Linux, root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2; says so and exits with 0 where they are missing.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NODES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PREFIX, DEVICE = "aploss-node-", "net0"
PORTS = {"training": 29400, "ranking": 29401, "ray": 6399}
PATIENCE_S = 900.0
RANKING = """
import datetime, sys, time, torch, torch.distributed as dist
from aploss.losses import ap_loss

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
scores = torch.randn(40_000, generator=generator, dtype=torch.float64)
targets = (torch.rand(40_000, generator=generator) < 0.005).float()
whole = scores.clone().requires_grad_()
ap_loss(whole, targets).backward()
part = slice(rank * 20_000, (rank + 1) * 20_000)
for step in range(100_000):
    mine = scores[part].clone().requires_grad_()
    loss = ap_loss(mine, targets[part], process_group=dist.group.WORLD)
    loss.backward()
    if step == 0:
        worst = (mine.grad / 2 - whole.grad[part]).abs().max().item()
        print(f"rank {rank}: loss {loss.item():.6f}, largest difference of a gradient {worst:.1e}", flush=True)
    if step % 20 == 0:
        print(f"rank {rank}: {step} rankings", flush=True)
    time.sleep(0.01)
"""

started = time.monotonic()


def say(line: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)


def ip(*words: str, check: bool = True) -> str:
    """Calls ``ip`` of iproute2 and returns its output."""
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


def missing() -> str:
    """What this machine lacks, or an empty string."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "Linux with iproute2 (the command ip) is needed"
    try:
        ip("netns", "add", f"{PREFIX}try")
        ip("netns", "delete", f"{PREFIX}try")
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()}"
    return ""


class Cluster:
    """Two namespaces ``a`` and ``b`` with a link, and the processes started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ip("link", "add", "aploss-a", "type", "veth", "peer", "name", "aploss-b")
        for node, address in NODES.items():
            name = PREFIX + node
            ip("netns", "add", name)
            ip("link", "set", f"aploss-{node}", "netns", name)
            ip("-n", name, "link", "set", f"aploss-{node}", "name", DEVICE)
            ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                ip("-n", name, "link", "set", device, "up")

    def start(self, node: str, log: str, *words: str) -> "subprocess.Popen[bytes]":
        """Starts a command on a node; its output goes to ``FOLDER/LOG.txt``."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "PYTHONWARNINGS": "ignore"}
        with (self.folder / f"{log}.txt").open("ab") as file:
            command = ["ip", "netns", "exec", PREFIX + node, *words]
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=self.folder)

    def link(self, state: str) -> None:
        """Sets the link ``"up"`` or ``"down"``."""
        ip("-n", f"{PREFIX}b", "link", "set", DEVICE, state)

    def kill(self, node: str) -> None:
        """Kills every process of a node."""
        for process in ip("netns", "pids", PREFIX + node, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def log(self, log: str) -> str:
        """The output of a command so far."""
        file = self.folder / f"{log}.txt"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def close(self) -> None:
        """Ends all processes and removes the namespaces, and with them the link."""
        for node in NODES:
            self.kill(node)
            ip("netns", "delete", PREFIX + node, check=False)


def wait(what: str, is_there: Callable[[], bool]) -> None:
    """Waits until something has happened."""
    end = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > end:
            raise SystemExit(f"gave up after {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.2)


def show(cluster: Cluster, log: str, pattern: str, most: int = 4) -> None:
    """Prints the lines of a log that match."""
    found = [line.strip() for line in cluster.log(log).splitlines() if re.search(pattern, line)]
    for line in found[-most:]:
        say(f"  {log}: {line[:150]}")


def torchrun(cluster: Cluster, kind: str, node: str, *words: str) -> "subprocess.Popen[bytes]":
    """Starts one of two nodes of torchrun."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"{NODES['a']}:{PORTS[kind]}", "--rdzv-id", kind, "--local-addr", NODES[node]]
    options += [
        "--rdzv-conf",
        f"is_host={int(node == 'a')},join_timeout=60",
    ]  # both namespaces have the host name of the machine
    return cluster.start(node, f"{kind}-{node}", sys.executable, "-m", "torch.distributed.run", *options, *words)


def small_run(data: Path) -> list[str]:
    """The options of a training of a minute."""
    return ["--recipe", "demo", "--data", str(data), "--image-size", "64", "--batches.size", "4", "--device", "cpu",
            "--batches.workers", "0", "--steps", "40"]  # fmt: skip


def try_training(cluster: Cluster, data: Path) -> None:
    """Kills node b in the middle of a training, and starts both nodes again."""
    words = ["-m", "aploss", "train", *small_run(data), "--criterion.rank_over_processes", "true"]
    words += ["--checkpoint_steps", "5", "--out", "run"]
    say("training: torchrun --nnodes 2 -m aploss train on both nodes")
    nodes = {node: torchrun(cluster, "training", node, *words) for node in NODES}
    last = cluster.folder / "run" / "checkpoints" / "last.pt"
    wait("the first checkpoint", last.is_file)
    say("training: the first checkpoint is written; killing node b")
    cluster.kill("b")
    wait("rank 0 notices", lambda: "has died" in cluster.log("training-a"))
    say("training: rank 0 has noticed; waiting for its torchrun, which cannot continue with one node")
    wait("torchrun gives up", lambda: nodes["a"].poll() is not None)
    say(f"training: it gave up, exit code {nodes['a'].returncode}; starting both nodes as sbatch --requeue does")
    os.environ["SLURM_RESTART_COUNT"] = "1"
    nodes = {node: torchrun(cluster, "training", node, *words) for node in NODES}
    del os.environ["SLURM_RESTART_COUNT"]
    wait("the run finishes", lambda: nodes["a"].poll() is not None)
    show(cluster, "training-a", "has died|restarted after|finished:|^ *test: ")
    is_written = (cluster.folder / "run" / "summary.json").exists()
    say(f"training: exit code {nodes['a'].returncode}, summary written: {is_written}")


def try_ranking(cluster: Cluster, data: Path) -> None:
    """Cuts the link in the middle of exact rankings over both nodes."""
    program = cluster.folder / "ranking.py"
    program.write_text(RANKING)
    say("ranking: exact ranking of 40,000 scores over both nodes, in a loop")
    nodes = {node: torchrun(cluster, "ranking", node, "--max-restarts", "0", str(program)) for node in NODES}
    wait("rankings", lambda: " 20 rankings" in cluster.log("ranking-a"))
    show(cluster, "ranking-a", "gradient")
    show(cluster, "ranking-b", "gradient")
    say("ranking: cutting the link for 5 s")
    cluster.link("down")
    time.sleep(5)
    cluster.link("up")
    before = cluster.log("ranking-a").count("rankings")
    wait("rankings after a short cut", lambda: cluster.log("ranking-a").count("rankings") > before + 1)
    say("ranking: continues after the short cut; cutting the link for good (collectives time out after 20 s)")
    cluster.link("down")
    wait("both ranks end", lambda: all("Timed out waiting" in cluster.log(f"ranking-{node}") for node in nodes))
    for node in nodes:
        show(cluster, f"ranking-{node}", "RuntimeError", 1)
    say("ranking: both ranks have ended with an error")


def try_ray(cluster: Cluster, data: Path) -> None:
    """Cuts the link in the middle of a comparison on two nodes of Ray."""
    ray = str(Path(sys.executable).with_name("ray"))
    address, options = f"{NODES['a']}:{PORTS['ray']}", ["--num-cpus", "1", "--disable-usage-stats", "--block"]
    head = [
        "--head",
        "--port",
        str(PORTS["ray"]),
        "--include-dashboard",
        "false",
        "--temp-dir",
        str(cluster.folder / "r"),
    ]
    say(f"ray: ray start --head on node a, ray start --address {address} on node b, 1 CPU each")
    cluster.start("a", "ray-a", ray, "start", *head, "--node-ip-address", NODES["a"], *options)
    wait("the head", lambda: "Ray runtime started" in cluster.log("ray-a"))
    cluster.start("b", "ray-b", ray, "start", "--address", address, "--node-ip-address", NODES["b"], *options)
    wait("node b", lambda: "Ray runtime started" in cluster.log("ray-b"))
    words = ["compare", "ap", "focal", "--seeds", "2", "--no-tune", *small_run(data), "--ray", address, "--out", "page"]
    compare = cluster.start("a", "compare", sys.executable, "-m", "aploss", *words, "--cache", "cache")
    cache = cluster.folder / "cache"
    wait("two runs", lambda: len(list(cache.glob("*/metrics.jsonl"))) >= 2)
    say("ray: two runs are training, one on each node; cutting the link")
    cluster.link("down")
    wait("the comparison ends", lambda: compare.poll() is not None)
    show(cluster, "compare", r"^finished|failed  |retr|against|report:", 12)
    say(f"ray: exit code {compare.returncode}")
    cluster.link("up")


def main() -> int:
    """Runs the parts named on the command line, or all."""
    lack = missing()
    if lack:
        print(f"skipped: {lack}")
        return 0
    from aploss.data.builtin import builtin_folder

    parts = {"training": try_training, "ranking": try_ranking, "ray": try_ray}
    folder = Path(tempfile.mkdtemp(prefix="two-nodes-"))
    data = builtin_folder(cache=folder / "data", image_size=64, counts=(24, 8, 8))
    for name in sys.argv[1:] or parts:
        cluster = Cluster(folder)
        try:
            parts[name](cluster, data)
        finally:
            cluster.close()
    say(f"logs: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
