"""Debian's headless Chromium, driven over its DevTools protocol. Every wait has a deadline."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium")
START = 60.0
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # tests run as root; all pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


class Chromium:
    """A separate browser process with its profile in ``folder``."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self._tab: Tab | None = None
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._port = self._listening(folder / "profile" / "DevToolsActivePort", folder / "chromium.log")
        except BaseException:
            self.close()
            raise

    def _listening(self, file: Path, log: Path) -> int:
        end = time.monotonic() + START
        while time.monotonic() < end:
            assert self._process.poll() is None, f"chromium ended:\n{log.read_text(errors='replace')}"
            with contextlib.suppress(OSError, IndexError, ValueError):
                return int(file.read_text().splitlines()[0])
            time.sleep(0.05)
        raise AssertionError(f"no DevTools port in {START} s:\n{log.read_text(errors='replace')}")

    def tab(self, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """An empty page of this size in CSS pixels, a phone's if the width is below 600. It replaces the last one."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=20) as answer:
            tab = Tab(json.load(answer)["webSocketDebuggerUrl"])
        if self._tab is not None:
            self._tab.close()
        self._tab = tab
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        scheme = "dark" if dark else "light"
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        return tab

    def close(self) -> None:
        """End the browser and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


class Tab:
    """One page. ``errors`` holds the errors of its console and its security policy."""

    def __init__(self, url: str) -> None:
        self._socket: ClientConnection = connect(url, open_timeout=20, max_size=2**26, proxy=None)
        self._number = 0
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        end = time.monotonic() + 30
        while True:
            message = json.loads(self._socket.recv(timeout=max(0.1, end - time.monotonic())))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.errors.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {found['message']}")
            self._socket.send(
                json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 15.0) -> Any:
        """Wait until the expression is true; its value."""
        end = time.monotonic() + seconds
        while True:
            value = self.ask(expression)
            if value:
                return value
            text = self.ask("document.body?.innerText")  # none before the page is loaded
            assert time.monotonic() < end, (
                f"not within {seconds} s: {expression}; errors {self.errors}; the page:\n{text}"
            )
            time.sleep(0.1)

    def click(self, selector: str) -> None:
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, file: Path, whole: bool = False) -> None:
        """A screenshot of the visible part, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.call("Page.close")
        self._socket.close()
