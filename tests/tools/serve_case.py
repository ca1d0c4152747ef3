"""What the tests of vlm-serve share: a server on a port of its own, and requests to it. Standard library only."""

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve()
SERVE, RUN = BUILD / "tools/vlm-serve", BUILD / "tools/vlm-run"
HELDOUT = ROOT / "tools/pocket/heldout"
QUESTION = "Describe the image."
CHAT = "/v1/chat/completions"


def scene(number):
    return HELDOUT / f"scenes/scene_{number:03}.png"


def data_url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(content, kind="image/png"):
    return {"type": "image_url", "image_url": {"url": data_url(content, kind)}}


def question(text=QUESTION, image=None, **keys):
    """A body; `image` is a path, or bytes."""
    content = [{"type": "text", "text": text}]
    if image is not None:
        content.insert(0, image_part(image if isinstance(image, bytes) else Path(image).read_bytes()))
    return {"messages": [{"role": "user", "content": content}]} | keys


class Server:
    """A running vlm-serve."""

    def __init__(self, *arguments, env=None):
        self.log = tempfile.NamedTemporaryFile(prefix="kvlm-serve-", suffix=".log")
        self.process = subprocess.Popen(
            [SERVE, "--port", "0", *(() if "--device" in arguments else ("--device", "cpu")), "--threads", "2", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.log, env=os.environ | (env or {}),
        )  # fmt: skip
        end = time.monotonic() + 60
        self.port = None
        while self.port is None:
            for line in self.said().splitlines():
                if line.startswith("http://"):
                    self.port = int(line.split("/v1")[0].rsplit(":", 1)[1])
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"vlm-serve has not started: {self.said()}")
            time.sleep(0.02)

    def said(self):
        return Path(self.log.name).read_text()

    def connection(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, body=None, path=CHAT, method=None, headers=None, timeout=60):
        """Status, headers and body, JSON decoded where it is that."""
        connection = self.connection(timeout)
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, raw,
                               {"Content-Type": "application/json"} | (headers or {}))  # fmt: skip
            response = connection.getresponse()
            content = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            if "json" in found.get("content-type", ""):
                content = json.loads(content)
            return response.status, found, content
        finally:
            connection.close()

    def answer(self, body, **options):
        status, _, content = self.ask(body, **options)
        if status != 200:
            raise AssertionError(f"{status}: {content}")
        return content

    def text(self, body, **options):
        return self.answer(body, **options)["choices"][0]["message"]["content"]

    def events(self, body, timeout=60):
        """The JSON of a stream's events, and whether it ended with [DONE]."""
        status, headers, content = self.ask(body | {"stream": True}, timeout=timeout)
        assert status == 200 and headers["content-type"] == "text/event-stream", (status, content)
        lines = [line for line in content.decode().split("\n\n") if line.startswith("data: ")]
        done = lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[: -1 if done else None]], done

    def send(self, raw, timeout=20):
        """What comes back for these bytes on a socket."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    answer += piece
            return answer

    def metric(self, name):
        """The sum of a metric over its labels."""
        text = self.ask(path="/metrics")[2].decode()
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(values)

    def resident_bytes(self):
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def open_files(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self):
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def wait_until(self, condition, seconds=20):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(self.said()[-2000:])
            time.sleep(0.02)

    def end(self, number=signal.SIGTERM, timeout=60):
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


class ServeCase(unittest.TestCase):
    maxDiff = None
    ARGUMENTS = ()

    @classmethod
    def setUpClass(cls):
        if not SERVE.is_file():
            raise unittest.SkipTest(f"{BUILD} has no vlm-serve")
        cls.server = Server(*cls.ARGUMENTS)
        cls.addClassCleanup(cls.server.log.close)
        cls.addClassCleanup(lambda: cls.server.process.kill() if cls.server.process.poll() is None else None)

    def assert_refused(self, answer, status, code, *words):
        """One sentence with these words, in OpenAI's form."""
        got, _, content = answer
        self.assertEqual((got, content["error"]["code"]), (status, code), content)
        message = content["error"]["message"]
        self.assertNotIn("\n", message)
        for word in words:
            self.assertIn(word, message)


def vlm_run(*arguments):
    """The JSON of an answer."""
    done = subprocess.run([RUN, "--device", "cpu", "--threads", "2", "--json", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
