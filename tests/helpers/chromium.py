"""A real browser for tests of pages, where there is one."""

import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
FAULTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """Chromium driven through its debugging pipe: one JSON message after the other."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:
            # The browser reads commands from descriptor 3 and writes to 4. Copies first: one of
            # ours may already have such a number.
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
            for number, end in enumerate(ends, start=3):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def _read(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], seconds)
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path | str, width: int, height: int, *, dark: bool = False) -> None:
        """Loads a file or address as a phone or desktop of that size would."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Addresses of everything the page asked for, without what it holds itself."""
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        addresses = [one["params"]["request"]["url"] for one in sent]
        return [address for address in addresses if not address.startswith("data:")]

    def faults(self) -> list[dict[str, Any]]:
        """Errors and messages on the console."""
        return [event for event in self.events if event["method"] in FAULTS]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser, from APLOSS_BROWSER or the system's Chromium; skips without one."""
    names = (os.environ.get("APLOSS_BROWSER", ""), "chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if name and (path := shutil.which(name))), None)
    if program is None or os.name != "posix":
        pytest.skip("no Chromium on this machine; name one in APLOSS_BROWSER")
    one = Browser(program, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()
