"""vlm-serve under load: mixed requests of 64 clients, some of whom go away or mean harm, with a cache that holds hardly more
than the largest request. None is lost, none is short, memory is flat. KVLM_TEST_REQUESTS says how many. Standard library only."""

import concurrent.futures
import json
import os
import random
import socket
import unittest

from serve_case import CHAT, ServeCase, question, scene

REQUESTS = int(os.environ.get("KVLM_TEST_REQUESTS", 1000))
CLIENTS = 64
SPECS = ("f16", "kivi", "h2o,keep=0.5", "calibquant,bits=2", "int4")


class Load(ServeCase):
    ARGUMENTS = ("--quiet", "--kv-memory", 0)

    @classmethod
    def setUpClass(cls):
        kinds = [question(image=scene(i % 5) if i % 4 == 0 else None, max_tokens=1 + i % 6, kv=SPECS[i % 5], seed=i, temperature=i % 2)
                 for i in range(40)]  # fmt: skip
        # What the largest of them needs: as the server says it.
        cls.ARGUMENTS = ("--quiet", "--kv-memory", 64)
        super().setUpClass()
        needs = []
        for body in kinds:
            needs.append(cls.server.ask(body)[2]["error"]["message"])
        cls.server.end()
        cls.kinds = kinds
        cls.largest = max(needs, key=lambda text: float(text.split(" needs ")[1].split()[0]) * (1000 if " MB of cache" in text else 1))
        size, unit = cls.largest.split(" needs ")[1].split()[:2]
        cls.ARGUMENTS = ("--quiet", "--kv-memory", int(float(size) * {"kB": 1e3, "MB": 1e6}[unit] * 1.005))
        super().setUpClass()

    def test_none_is_lost(self):
        server = self.server
        alone = [server.text(body) for body in self.kinds]
        draw = random.Random(7)
        plan = [(draw.randrange(len(self.kinds)), draw.random()) for _ in range(REQUESTS)]
        marks = {}

        def one(item):
            number, (kind, luck) = item
            if number in (REQUESTS // 10, REQUESTS - 1):
                marks[number] = (server.resident_bytes(), server.open_files(), server.threads())
            body = json.dumps(self.kinds[kind]).encode()
            if luck < 0.1:  # goes away
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                                       f"Content-Length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
                return None
            if luck < 0.15:
                return server.ask(body[: len(body) // 2])[0] == 400
            return server.text(self.kinds[kind]) == alone[kind]

        self.addCleanup(lambda: print(server.process.poll(), server.said()[-800:]))
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            outcomes = list(pool.map(one, enumerate(plan)))
        self.assertEqual(outcomes.count(False), 0)
        self.assertGreater(outcomes.count(True), 0.8 * REQUESTS)
        server.wait_until(lambda: server.metric("kvlm_running") + server.metric("kvlm_waiting") == 0)
        self.assertEqual(server.metric("kvlm_cache_reserved_bytes"), 0)
        self.assertLessEqual(server.metric("kvlm_cache_reserved_bytes_max"), server.metric("kvlm_cache_capacity_bytes"))
        (before, files, threads), (after, files_after, threads_after) = (marks[key] for key in sorted(marks))
        self.assertLess(after, 1.05 * before + (4 << 20))
        self.assertLessEqual(files_after, files + CLIENTS)
        self.assertLessEqual(threads_after, threads + CLIENTS)
        print(f"{REQUESTS} requests: resident {before >> 20} MiB after a tenth, {after >> 20} MiB at the end")


if __name__ == "__main__":
    unittest.main()
