"""A headless Chromium over its debugging pipe. Standard library only."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page, which starts empty."""

    def __init__(self, *arguments):
        self.profile = tempfile.TemporaryDirectory(prefix="kvlm-browser-", ignore_cleanup_errors=True)
        to_browser, self.commands = os.pipe()
        self.events, from_browser = os.pipe()
        # Away from 3 and 4, which the browser reads and writes.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser))

        def place_pipes():
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
             f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe", *arguments, "about:blank"],
            close_fds=False, preexec_fn=place_pipes, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (to_browser, from_browser, read, write):
            os.close(end)
        self.numbers = itertools.count(1)
        self.pending = b""
        self.told = []  # events that nobody has asked for yet
        self.session = None
        end = time.monotonic() + 30
        while not (pages := [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]):
            if time.monotonic() > end:
                raise TimeoutError("no page")
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _next(self):
        while b"\0" not in self.pending:
            piece = os.read(self.events, 1 << 16)
            if not piece:
                raise EOFError("the browser has ended")
            self.pending += piece
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != number:
            self.told.append(found)
        if "error" in found:
            raise AssertionError(f"{method}: {found['error']['message']}")
        return found["result"]

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.value(f"!!({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} is {self.value(expression)}; the page: {self.value('document.body.innerText')}")
            time.sleep(0.02)

    def choose_files(self, selector, *paths):
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def resize(self, width, height, mobile=False, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self):
        """Errors and exceptions of the page so far."""
        self.call("Runtime.evaluate", expression="0")
        levels = [event["params"]["entry"]["text"] for event in self.told if event.get("method") == "Log.entryAdded"
                  and event["params"]["entry"]["level"] == "error"]  # fmt: skip
        return levels + [event["params"]["exceptionDetails"]["text"] for event in self.told if event.get("method") == "Runtime.exceptionThrown"]

    def close(self):
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        for end in (self.commands, self.events):
            os.close(end)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()
