"""Headless Chromium, driven through a pipe with real mouse and key events; nothing but the standard library."""

import base64
import itertools
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs Chromium (Debian: apt install chromium): none is on the PATH"
SECONDS = 60
KEYS = {"Backspace": 8, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}


class Browser:
    """One page. `complaints`: errors and warnings of its console, and every address it asked for beyond itself."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer = read, write, b""
        self._ids, self._session = itertools.count(1), ""
        self._page = "about:blank"
        self.complaints: list[Any] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Load a file and wait until its scripts ran."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._page = path.as_uri()
        self.send("Page.navigate", url=self._page)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(self._page)}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} never came true"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element a selector finds, scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """One of KEYS, by its name."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def screenshot(self, path: Path) -> None:
        """What is in the window, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol, and its answer."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._notice(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _notice(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        asked = params.get("request", {}).get("url", self._page) if method == "Network.requestWillBeSent" else ""
        if method in ("Runtime.exceptionThrown", "Log.entryAdded") or (asked and asked != self._page):
            self.complaints.append(params)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], SECONDS)[0], "the browser says nothing"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, with a profile of its own."""
    assert PATH is not None
    (their_read, our_write), (our_read, their_write) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe"
    command = (
        f"exec {shlex.quote(PATH)} {flags} --user-data-dir={shlex.quote(str(profile))} 3<&{their_read} 4>&{their_write}"
    )
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(their_read, their_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        opened = Browser(our_read, our_write)
        yield opened
        opened._session = ""
        opened.send("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(our_read)
        os.close(our_write)
