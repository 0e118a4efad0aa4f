"""A headless Chromium, driven through its debugging protocol over a pair of pipes: no port, no library."""

import base64
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0


class Browser:
    """One page. `complaints` are errors of scripts, and what the page's policy refused."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]
        # The browser reads commands from descriptor 3 and answers on 4.
        command = f'exec chromium "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._answers = os.fdopen(self._read, "rb")
        self._number = 0
        self.complaints: list[str] = []
        self._session: str | None = None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")
        self.size(width, height)
        self.prefer(scheme="dark" if dark else "light")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        os.close(self._write)

    def do(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        number = self._number
        call = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        while True:
            told = json.loads(self._message())
            if told.get("id") == number:
                assert "error" not in told, told["error"]
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(told["params"]))

    def open(self, address: str) -> None:
        """Go to a page."""
        self.do("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition}: {self.complaints}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Into what has the focus, as from a keyboard."""
        self.do("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key."""
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 * shift}
        self.do("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", **event)

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        box = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({_found(selector)}.getBoundingClientRect())")
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def prefer(self, *, scheme: str = "light", reduced_motion: bool = False) -> None:
        """What the person prefers."""
        motion = "reduce" if reduced_motion else "no-preference"
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.do(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    def size(self, width: int, height: int) -> None:
        """The window."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        """Write a screenshot."""
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot")["data"]))

    def _message(self) -> bytes:
        content = bytearray()
        while byte := self._answers.read(1):
            if byte == b"\0":
                return bytes(content)
            content += byte
        raise AssertionError("the browser has ended")


def _found(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"
