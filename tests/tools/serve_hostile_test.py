"""Bodies, headers and clients that mean harm to vlm-serve, or nothing: each gets its status and one sentence, quickly, and the
server serves on. Standard library only."""

import gzip
import json
import os
import socket
import struct
import tempfile
import threading
import time
import unittest
import zlib
from pathlib import Path

from serve_case import CHAT, HELDOUT, ServeCase, data_url, image_part, question, scene

JSON = "Content-Type: application/json\r\n"


def head(length, *more):
    lines = "".join(f"{line}\r\n" for line in more)
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {length}\r\n{lines}\r\n".encode()


def messages(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def png_header(width, height):
    """A PNG that says it is this large, and has no pixels."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))


class Hostile(ServeCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix="kvlm-media-")
        cls.addClassCleanup(scratch.cleanup)
        root = Path(scratch.name)
        (root / "a.png").write_bytes(scene(0).read_bytes())
        (root / "out").symlink_to("/etc")
        (root / "passwd").symlink_to("/etc/passwd")
        os.mkfifo(root / "fifo")
        cls.root = root
        cls.ARGUMENTS = ("--media-root", root, "--max-body", "8MB", "--max-images", 3)
        super().setUpClass()
        cls.server.text(question(image=scene(0), max_tokens=2))

    def setUp(self):
        self.resident = self.server.resident_bytes()

    def tearDown(self):
        self.assertEqual(self.server.text(question(image=scene(0), max_tokens=2)), "There are")
        self.assertLess(self.server.resident_bytes() - self.resident, 64 << 20)

    def refused(self, body, status, code, *words):
        start = time.monotonic()
        answer = self.server.ask(body)
        self.assertLess(time.monotonic() - start, 10)
        self.assert_refused(answer, status, code, *words)

    def refused_raw(self, raw, status, code):
        answer = self.server.send(raw)
        first, _, rest = answer.partition(b"\r\n")
        self.assertEqual(first.split()[1:2], [str(status).encode()], answer[:300])
        body = json.loads(rest.partition(b"\r\n\r\n")[2])
        self.assertEqual(body["error"]["code"], code)

    def test_bodies_that_are_no_request(self):
        text = "x" * (1 << 20)
        for body in (b"", b"[]", b"null", b"3", b'"a"', b'{"messages": [', b"[" * 1_000_000, b'{"a":' * 100_000,
                     b'{"messages": [], "messages": []}', b'{"temperature": NaN}', b'{"temperature": 1e999}',
                     b'{"user": "\\ud800"}', b'{"user": "\xff"}', b"\x00" * 100, text.encode()):  # fmt: skip
            with self.subTest(body[:30]):
                status, _, content = self.server.ask(body, method="POST")
                self.assertEqual(status, 400, content)
                self.assertIn(content["error"]["code"], ("invalid_json", "invalid_value"))
                self.assertLess(len(content["error"]["message"]), 400)

    def test_keys_of_other_kinds(self):
        for key, value in (
            ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("temperature", -1), ("temperature", 2.1),
            ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", "a"), ("seed", "a"), ("seed", 2**70), ("stop", [""]),
            ("stop", ["a"] * 17), ("stop", "a" * 257), ("stop", 3), ("stream", 1), ("stream_options", []), ("model", 5),
            ("media_io_kwargs", 3), ("top_logprobs", 5),
        ):  # fmt: skip
            with self.subTest(f"{key}={value}"):
                body = question(max_tokens=2)
                self.refused(body | {key: value}, 400, "invalid_value", key.split("_")[0])
        for key, value in (("n", 2), ("tools", [{}]), ("functions", [{}]), ("presence_penalty", 0.5), ("logit_bias", {"1": 1}),
                           ("response_format", {"type": "json_object"}), ("guided_json", {"a": 1}), ("best_of", 2), ("min_p", 0.1),
                           ("modalities", ["audio"])):  # fmt: skip
            with self.subTest(key):
                code = "invalid_value" if key == "response_format_" else "unsupported"
                self.refused(question(max_tokens=2) | {key: value}, 400, code, key)
        for body in ({"messages": "hello"}, {"messages": [3]}, {"messages": [{"role": "robot", "content": "x"}]},
                     {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 3}]},
                     {"messages": [{"role": "assistant", "content": "x"}]}, messages([{"type": "sound"}]), messages([3]),
                     messages([{"type": "text"}]), messages([{"type": "image_url", "image_url": 3}]),
                     {"messages": [{"role": "user", "content": "x"}] * 1025}, {}):  # fmt: skip
            with self.subTest(str(body)[:60]):
                self.refused(body, 400, "invalid_value")
        # Beyond any context: clamped.
        self.assertEqual(self.server.ask(question(max_tokens=2**63, stop="e"))[0], 200)

    def test_texts(self):
        self.assertIn(self.server.ask(messages("a\0b"))[0], (200, 400))
        self.refused(messages("<image> and <image>"), 400, "invalid_value", "<image>")
        self.refused(messages("word " * 1_000_000), 413, "body_too_large")
        self.refused(messages("word " * 100_000), 400, "context_length_exceeded", "context")

    def test_policies(self):
        for kv, words in (("int5", "int4"), ("@/etc/passwd", "file"), ("f16+f16", ""), ("", ""), ("kivi,bits=99", "bits")):
            with self.subTest(kv):
                self.refused(question(kv=kv), 400, "invalid_kv", words)
        self.refused(question(kv="a" * 5000), 400, "invalid_value", "kv")
        self.refused(question(model="poket"), 404, "model_not_found", "pocket")

    def test_pictures(self):
        whole = scene(0).read_bytes()
        for content, words in ((whole[:200], "image 1"), (b"<html>", "image 1"), (b"x", "image 1"), (png_header(65535, 65535), "image 1"), (png_header(0, 7), "image 1")):  # fmt: skip
            with self.subTest(content[:10]):
                self.refused(messages([image_part(content)]), 400, "invalid_image", words)
        for content in (b"<svg></svg>", b"%PDF-1.4"):
            self.refused(messages([image_part(content)]), 400, "unsupported", "image 1 is a")
        for url in (data_url(whole)[:-1], data_url(whole).replace("base64,", "base64, "), "data:image/png;base64,", "data:image/png,abc",
                    "data:image/png;base64,abc=", "data:image/png;base64,ab=c", "http://127.0.0.1/a.png", "gopher://x", "", "a.png",
                    "data:image/png;base64,/+_-"):  # fmt: skip
            with self.subTest(url[-20:]):
                self.refused(messages([{"type": "image_url", "image_url": {"url": url}}]), 400, "invalid_image", "image 1")
        self.refused(messages([image_part(png_header(8193, 8193))]), 413, "image_too_large", "8193 x 8193")
        self.refused(messages([image_part(png_header(8000, 8000))] * 3), 413, "image_too_large", "image 3")
        self.refused(messages([image_part(whole)] * 4), 413, "too_many_images", "3")
        self.refused(messages([{"type": "video_url", "video_url": {"url": data_url(b"x", "video/mp4")}}]), 400, "unsupported")

    def test_files(self):
        for name in ("out/passwd", "passwd", "../x", "%2e%2e/x", "fifo", "none", "", "a.png/b", "a.png%00.png"):
            with self.subTest(name):
                part = {"type": "image_url", "image_url": {"url": f"file://{self.root}/{name}"}}
                self.refused(messages([part]), 404, "media_not_found")
        part = {"type": "image_url", "image_url": {"url": f"file://{self.root}/a.png"}}
        self.assertEqual(self.server.ask(messages([part]))[0], 200)

    def test_sizes(self):
        self.refused_raw(head(9_000_000), 413, "body_too_large")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        chunked = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
        self.refused_raw(chunked + chunk * 200, 413, "body_too_large")
        self.refused_raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000 + b"\r\n", 431, "headers_too_large")
        self.refused_raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n", 431, "headers_too_large")

    def test_heads(self):
        body = json.dumps(question(max_tokens=2)).encode()
        zipped = gzip.compress(b"x" * 10_000_000)
        self.refused_raw(head(len(zipped), "Content-Encoding: gzip") + zipped, 415, "content_encoding")
        self.refused_raw(head(len(body), "Content-Length: 5") + body, 400, "invalid_json")
        self.refused_raw(head(len(body), "Transfer-Encoding: chunked") + body, 400, "invalid_json")
        self.refused_raw(head("-5") + body, 400, "invalid_json")
        self.refused_raw(head(10**30) + body, 400, "invalid_json")
        self.assert_refused(self.server.ask(body, headers={"Content-Type": "text/plain"}), 415, "wrong_content_type")
        self.assert_refused(self.server.ask(body, headers={"Origin": "http://evil.example"}), 403, "wrong_origin")
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            self.assert_refused(self.server.ask(body, headers={"Host": host}), 403, "wrong_host")
        for host in ("127.0.0.1:8080", "localhost", "[::1]:80"):
            self.assertEqual(self.server.ask(body, headers={"Host": host})[0], 200)
        self.assert_refused(self.server.ask(path="/v1/completions"), 404, "unknown_url", "/v1/models/MODEL")
        self.assert_refused(self.server.ask(path=CHAT), 405, "wrong_method", "send it by POST")
        self.assertIn(b"400", self.server.send(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")[:20])

    def test_one_request_a_connection(self):
        twice = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
        self.assertEqual(self.server.send(twice).count(b"HTTP/1.1"), 1)

    def test_slow_clients_hold_nobody_up(self):
        stop = threading.Event()

        def drip(raw):
            with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
                for byte in raw * 100:
                    if stop.wait(0.2):
                        return
                    try:
                        connection.sendall(bytes([byte]))
                    except OSError:
                        return

        threads = [threading.Thread(target=drip, args=(raw,)) for raw in (b"GET /health HTTP/1.1\r\nX: ", head(5000)) * 20]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        for _ in range(5):
            self.server.text(question(image=scene(1), max_tokens=4))
        self.assertLess(time.monotonic() - start, 20)
        # One that sends too slowly is told so, in some seconds.
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            self.assertIn(b" 408 ", connection.recv(65536))
        stop.set()
        for thread in threads:
            thread.join()

    def test_a_client_that_never_reads(self):
        body = json.dumps(question(image=scene(1), max_tokens=200, stream=True)).encode()
        idle = socket.create_connection(("127.0.0.1", self.server.port))
        idle.sendall(head(len(body)) + body)
        for _ in range(5):
            self.server.text(question(image=scene(1), max_tokens=4))
        idle.close()
        self.server.wait_until(lambda: self.server.metric("kvlm_running") == 0)


class FewConnections(ServeCase):
    ARGUMENTS = ("--connections", 4)

    def test_idle_connections_end(self):
        """Others are refused meanwhile. Those that say nothing lose their places after the time for headers."""
        idle = [socket.create_connection(("127.0.0.1", self.server.port)) for _ in range(4)]
        time.sleep(0.3)
        self.assert_refused(self.server.ask(path="/health"), 503, "too_many_connections", "4 connections")
        self.server.wait_until(lambda: self.server.ask(path="/health")[0] == 200, 40)
        for each in idle:
            each.close()


class SmallCache(ServeCase):
    ARGUMENTS = ("--kv-memory", "3MB", "--max-queue", 3, "--max-batch", 1)

    def test_a_request_too_large_for_the_cache(self):
        self.assert_refused(self.server.ask(question(image=scene(0), max_tokens=1400)), 400, "kv_too_large", "of cache", "ask for fewer")
        self.server.text(question(image=scene(0), max_tokens=20))
        self.assert_refused(self.server.ask(question(image=scene(0), max_tokens=300)), 400, "kv_too_large")
        self.server.text(question(image=scene(0), max_tokens=300, kv="int4"))

    def test_a_full_queue(self):
        answers = []
        body = question(image=scene(0), max_tokens=60)
        threads = [threading.Thread(target=lambda: answers.append(self.server.ask(body))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if answer[0] != 200]
        self.assertTrue(refused and len(refused) < 16)
        for answer in refused:
            self.assert_refused(answer, 429, "queue_full", "requests are waiting")
            self.assertEqual(answer[1]["retry-after"], "1")


if __name__ == "__main__":
    unittest.main()
