"""vlm-serve: OpenAI's chat completions, policies by request, streams, cancellation, drain. Standard library only."""

import concurrent.futures
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from serve_case import BUILD, CHAT, HELDOUT, QUESTION, ROOT, SERVE, Server, ServeCase, image_part, question, scene, vlm_run


class Chat(ServeCase):
    ARGUMENTS = ("--alias", "small=kivi", "--alias", "tiny=calibquant,bits=2", "--max-answer", 64)

    def test_health_and_models(self):
        status, _, health = self.server.ask(path="/health")
        self.assertEqual((status, health["status"], health["model"], health["device"]), (200, "ok", "pocket", "cpu"))
        _, _, listed = self.server.ask(path="/v1/models")
        self.assertEqual([(row["id"], row["kv"], row["object"]) for row in listed["data"]],
                         [("pocket", "f16", "model"), ("small", "kivi", "model"), ("tiny", "calibquant,bits=2", "model")])
        self.assertEqual(self.server.ask(path="/v1/models/small")[2], listed["data"][1])
        self.assert_refused(self.server.ask(path="/v1/models/none"), 404, "model_not_found", "none")

    def test_an_answer_is_vlm_run_s(self):
        for kv in ("f16", "kivi", "h2o,keep=0.5 + int4"):
            own = vlm_run("--image", scene(3), "-p", QUESTION, "-n", 48, "--kv", kv)
            answer = self.server.answer(question(image=scene(3), max_tokens=48, kv=kv))
            choice, usage, more = answer["choices"][0], answer["usage"], answer["kvlm"]
            self.assertEqual(choice["message"], {"role": "assistant", "content": own["text"]})
            self.assertEqual(choice["finish_reason"], own["finish_reason"])
            self.assertEqual((usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
                             (own["prompt_tokens"], own["generated_tokens"], own["prompt_tokens"] + own["generated_tokens"]))
            self.assertEqual((more["kv"], more["cache_bytes"], more["stored_bits"], more["visual_tokens"]),
                             (own["kv"]["spec"], own["kv"]["bytes"], own["kv"]["stored_bits"], own["visual_tokens"]))
            self.assertEqual((answer["object"], answer["model"], more["max_tokens"]), ("chat.completion", "pocket", 48))

    def test_an_alias_is_its_policy(self):
        body = question(image=scene(4), max_tokens=32)
        for alias, spec in (("small", "kivi"), ("tiny", "calibquant,bits=2")):
            named = self.server.answer(body | {"model": alias})
            self.assertEqual((named["model"], named["kvlm"]["kv"]), (alias, spec))
            self.assertEqual(named["choices"], self.server.answer(body | {"kv": spec})["choices"])

    def test_a_stream_is_the_answer(self):
        body = question(image=scene(5), max_tokens=40)
        whole = self.server.answer(body)
        events, done = self.server.events(body | {"stream_options": {"include_usage": True}})
        self.assertTrue(done)
        self.assertEqual(len({(event["id"], event["object"], event["model"]) for event in events}), 1)
        self.assertEqual(events[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        self.assertEqual(text, whole["choices"][0]["message"]["content"])
        self.assertGreater(len(events), 10)
        self.assertEqual([event["choices"][0]["finish_reason"] for event in events[-3:-1]], [None, "length"])
        self.assertEqual((events[-1]["choices"], events[-1]["usage"]), ([], whole["usage"]))
        self.assertTrue(all(event["usage"] is None for event in events[:-1]))
        events, done = self.server.events(body)
        self.assertTrue(done and all("usage" not in event for event in events))

    def test_turns_systems_and_several_images(self):
        first = question(image=scene(0), max_tokens=20)
        turns = first["messages"] + [{"role": "assistant", "content": self.server.text(first)},
                                     {"role": "user", "content": "Describe the image."}]  # fmt: skip
        self.assertTrue(self.server.text({"messages": turns, "max_tokens": 12}))
        two = question(image=scene(1), max_tokens=8)
        two["messages"][0]["content"].insert(1, image_part(scene(2).read_bytes()))
        self.assertEqual(self.server.answer(two)["kvlm"]["visual_tokens"], 2 * 576)
        own = vlm_run("--image", scene(1), "--image", scene(2), "-p", QUESTION, "-n", 8)
        self.assertEqual(self.server.text(two), own["text"])
        text_first = question(image=scene(1), max_tokens=4)
        text_first["messages"][0]["content"].reverse()
        self.server.answer(text_first)
        self.server.answer({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})

    def test_explain_is_vlm_kv_s(self):
        """And counts what admission sets aside."""
        body = {"kv": "kivi,bits=2", "tokens": 624, "visual": 576, "max_tokens": 32}
        status, _, found = self.server.ask(body, path="/v1/kv/explain")
        self.assertEqual(status, 200, found)
        printed = json.loads(subprocess.run([BUILD / "tools/vlm-kv", "explain", "kivi,bits=2", "--tokens", "624", "--visual", "576", "--json"],
                                            capture_output=True, check=True).stdout)  # fmt: skip
        same = printed.keys() - {"model", "version"}
        self.assertEqual({key: found[key] for key in same}, {key: printed[key] for key in same})
        self.assertGreater(found["reserved_bytes"], found["bytes"])
        self.assertGreater(found["at_once"], 1)
        asked = question(image=scene(1), max_tokens=9, kv="int4")
        counted = self.server.ask(asked, path="/v1/kv/explain")[2]
        answered = self.server.ask(asked)[2]
        self.assertEqual((counted["tokens"], counted["max_tokens"]), (answered["usage"]["prompt_tokens"], 9))
        self.assertEqual(counted["visual"], answered["kvlm"]["visual_tokens"])
        for wrong, key in (({}, "tokens"), ({"tokens": 0}, "tokens"), ({"tokens": 5, "visual": 6}, "visual"),
                           ({"tokens": 5, "kv": "nope"}, "kv"), ({"tokens": 5, "layers": 1}, "layers"),
                           (asked | {"tokens": 5}, "messages")):  # fmt: skip
            status, _, found = self.server.ask(wrong, path="/v1/kv/explain")
            self.assertEqual((status, found["error"]["param"]), (400, key), found)

    def test_limits_are_clamped_and_told(self):
        answer = self.server.answer(question(image=scene(6), max_tokens=32768))
        self.assertEqual(answer["kvlm"]["max_tokens"], 64)
        self.assertEqual(self.server.answer(question(image=scene(6), max_tokens=9, max_completion_tokens=5))["kvlm"]["max_tokens"], 5)

    def test_messages_name_keys_of_the_request(self):
        for kv in ("nothing", "kivi,bits=9", "int4 + kivi"):
            self.assert_refused(self.server.ask(question(kv=kv)), 400, "invalid_kv", "kv ")
            self.assertNotIn("--", self.server.ask(question(kv=kv))[2]["error"]["message"])

    def test_stop_texts_and_seeds(self):
        body = question(image=scene(7), max_tokens=48)
        whole = self.server.text(body)
        answer = self.server.answer(body | {"stop": ["nowhere", whole[20:26]]})
        self.assertEqual((answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]),
                         (whole[: whole.index(whole[20:26])], "stop"))
        drawn = body | {"temperature": 1.5, "seed": 7}
        self.assertEqual(self.server.text(drawn), self.server.text(drawn))
        own = vlm_run("--image", scene(7), "-p", QUESTION, "-n", 48, "--temp", 1.5, "--seed", 7)
        self.assertEqual(self.server.text(drawn), own["text"])
        unseeded = self.server.answer(body | {"temperature": 1.5})
        again = self.server.answer(body | {"temperature": 1.5, "seed": unseeded["kvlm"]["seed"]})
        self.assertEqual(unseeded["choices"], again["choices"])

    def test_logprobs(self):
        body = question(image=scene(2), max_tokens=40, logprobs=True, top_logprobs=3)
        for more in ({}, {"stop": ["objects: a"]}, {"temperature": 1, "seed": 3}, {"repetition_penalty": 1.5}):
            answer = self.server.answer(body | more)["choices"][0]
            entries = answer["logprobs"]["content"]
            text = answer["message"]["content"]
            joined = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
            self.assertTrue(joined == text or ("stop" in more and joined.startswith(text)), (joined, text))
            for entry in entries:
                top = entry["top_logprobs"]
                self.assertEqual(len(top), 3)
                self.assertEqual([row["logprob"] for row in top], sorted((row["logprob"] for row in top), reverse=True))
                self.assertLessEqual(sum(math.exp(row["logprob"]) for row in top), 1 + 1e-5)
                self.assertLessEqual(entry["logprob"], top[0]["logprob"])
                if not more:  # greedy: the likeliest
                    self.assertEqual(entry["logprob"], top[0]["logprob"])
            events, _ = self.server.events(body | more)
            streamed = [entry for event in events if (of := event["choices"][0]["logprobs"]) for entry in of["content"]]
            self.assertEqual(streamed, entries)
        self.assertEqual(self.server.answer(body | {"logprobs": False, "top_logprobs": 0})["choices"][0]["logprobs"], None)
        plain = self.server.answer(body | {"top_logprobs": 0})["choices"][0]["logprobs"]["content"]
        self.assertTrue(plain and all(entry["top_logprobs"] == [] for entry in plain))

    def test_what_is_not_followed_is_told(self):
        body = question(image=scene(8), max_tokens=4, user="me", seed=None, chat_template_kwargs={"a": 1}, foo=2)
        body["messages"][0]["content"][0]["image_url"]["min_pixels"] = 9
        self.assertEqual(sorted(self.server.answer(body)["kvlm"]["ignored"]), ["chat_template_kwargs", "foo", "image_url.min_pixels"])
        text = self.server.ask(path="/metrics")[2].decode()
        self.assertIn('kvlm_ignored_total{key="foo"}', text)

    def test_company_changes_no_token(self):
        specs = ("f16", "kivi", "h2o,keep=0.5")
        bodies = [question(image=scene(i % 10), max_tokens=8 + i % 17, kv=specs[i % 3], temperature=i % 2, seed=i) for i in range(48)]
        alone = [self.server.text(body) for body in bodies]
        for clients in (8, 48):
            with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                self.assertEqual(list(pool.map(self.server.text, bodies)), alone)

    def test_a_client_that_goes_away_frees_its_place(self):
        body = json.dumps(question(image=scene(9), max_tokens=64)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        before = self.server.metric("kvlm_cancelled_total")
        sockets = [socket.create_connection(("127.0.0.1", self.server.port)) for _ in range(12)]
        for each in sockets:
            each.sendall(head.encode() + body)
        for each in sockets:
            each.close()
        self.server.wait_until(lambda: self.server.metric("kvlm_running") + self.server.metric("kvlm_waiting") == 0)
        self.server.wait_until(lambda: self.server.metric("kvlm_cache_reserved_bytes") == 0)
        self.assertGreater(self.server.metric("kvlm_cancelled_total"), before)
        self.server.text(question(image=scene(9), max_tokens=2))


class Devices(ServeCase):
    """Two engines on one port."""

    ARGUMENTS = ("--device", "cpu,cpu", "--kv-memory", "100MB", "--max-batch", 1)

    def test_both_answer(self):
        self.assertIn("1 at once on each of cpu, cpu", self.server.said())
        bodies = [question(image=scene(number % 4), max_tokens=24, kv=("f16", "kivi")[number % 2]) for number in range(16)]
        alone = [self.server.text(body) for body in bodies[:4]]
        seen = []
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(self.server.text, body, timeout=300) for body in bodies]
            while not all(answer.done() for answer in answers):
                seen.append(self.server.ask(path="/health")[2])
            self.assertEqual([answer.result() for answer in answers], 4 * alone)
        self.assertEqual({health["device"] for health in seen}, {"cpu, cpu"})
        self.assertEqual(max(health["running"] for health in seen), 2)
        self.assertEqual(self.server.metric("kvlm_cache_capacity_bytes"), 200e6)
        self.server.wait_until(lambda: self.server.metric("kvlm_cache_reserved_bytes") == 0)


class Page(ServeCase):
    """docs/serve.md: the commands that it shows, to this server's port."""

    ARGUMENTS = ("--alias", "small=kivi")

    def test_curl_commands(self):
        text = (ROOT / "docs/serve.md").read_text()
        commands = re.findall(r"^    ((?:curl|printf) (?:[^\n]|\n      )*)", text, re.MULTILINE)
        self.assertEqual(len(commands), 3)
        answers = []
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(scene(1), Path(folder, "a.png"))
            for command in commands:
                done = subprocess.run(["bash", "-c", command.replace(":8080", f":{self.server.port}")], capture_output=True, text=True, cwd=folder)
                self.assertEqual(done.returncode, 0, done.stderr)
                if done.stdout:
                    answers.append(json.loads(done.stdout))
                    self.assertNotIn("error", answers[-1], done.stdout)
        self.assertEqual(answers[1]["choices"][0]["message"]["content"], vlm_run("--image", scene(1), "--kv", "kivi")["text"])

    def test_an_image_without_a_question_is_captioned(self):
        caption = self.server.text(question(image=scene(1)))
        part = image_part(scene(1).read_bytes())
        for content in ([part], [part, {"type": "text", "text": ""}]):
            self.assertEqual(self.server.text({"messages": [{"role": "user", "content": content}]}), caption)
        for content in ("", []):
            status, _, found = self.server.ask({"messages": [{"role": "user", "content": content}]})
            self.assertEqual(status, 400, found)

    def test_codes_are_those_of_the_page(self):
        page = (ROOT / "docs/serve.md").read_text().split("## Errors")[1].split("## ")[0]
        sources = "".join(path.read_text() for path in (ROOT / "tools/serve").glob("*.cpp"))
        codes = set(re.findall(r"\b[45]\d\d,\s*\"([a-z_]+)\"", sources)) | {"device_lost", "draining"}
        self.assertEqual(codes - set(re.findall(r"`([a-z_]+)`", page)), set())


class Files(ServeCase):
    ARGUMENTS = ("--media-root", HELDOUT, "--request-kv", "aliases", "--quiet")

    def by_url(self, url):
        part = {"type": "image_url", "image_url": {"url": url}}
        return self.server.ask({"messages": [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}], "max_tokens": 6})

    def test_files_below_the_root_alone(self):
        status, _, answer = self.by_url(f"file://{scene(0)}")
        self.assertEqual((status, answer["choices"][0]["message"]["content"]),
                         (200, self.server.text(question(image=scene(0), max_tokens=6))))
        self.assertEqual(self.by_url(f"file://{HELDOUT}/scenes/scene%5f000.png")[0], 200)
        for url in ("/etc/passwd", f"{HELDOUT}/../../../README.md", f"{HELDOUT}/%2e%2e/README.md", f"{HELDOUT}/none.png",
                    f"{HELDOUT}/scenes", "/proc/self/environ"):
            self.assert_refused(self.by_url(f"file://{url}"), 404, "media_not_found")

    def test_policies_of_requests_can_be_forbidden(self):
        self.assert_refused(self.server.ask(question(kv="kivi")), 400, "invalid_kv", "leave out kv")

    def test_quiet_logs_no_requests(self):
        self.server.text(question(max_tokens=1))
        self.assertEqual(len(self.server.said().splitlines()), 1, self.server.said())


class Keys(ServeCase):
    @classmethod
    def setUpClass(cls):
        import tempfile

        with tempfile.NamedTemporaryFile("w", suffix=".txt") as keys:
            keys.write("# who\nann secret-a\nbob secret-b\n")
            keys.flush()
            cls.ARGUMENTS = ("--api-key-file", keys.name, "--host", "0.0.0.0")
            super().setUpClass()

    def test_no_answer_without_a_key(self):
        body = question(max_tokens=1)
        for headers in ({}, {"Authorization": "Bearer none"}, {"Authorization": "secret-a"}, {"Authorization": "Bearer secret-"}):
            self.assert_refused(self.server.ask(body, headers=headers), 401, "invalid_api_key")
            self.assertEqual(self.server.ask(path="/v1/models", headers=headers)[0], 401)
        for key in ("secret-a", "secret-b"):
            self.server.answer(body, headers={"Authorization": f"Bearer {key}"})
        self.assertEqual(self.server.ask(path="/health")[0], 200)
        self.assertIn("client=ann", self.server.said())
        self.assertNotIn("secret", self.server.said())


class Start(unittest.TestCase):
    def setUp(self):
        if not SERVE.is_file():
            self.skipTest(f"{BUILD} has no vlm-serve")

    def refused(self, *arguments):
        done = subprocess.run([SERVE, *map(str, arguments)], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stderr

    def test_arguments_that_cannot_be(self):
        for arguments, words in (
            (("--host", "0.0.0.0"), "0.0.0.0 is open to others; give --api-key-file, or --no-key"),
            (("--alias", "a"), "expected NAME=SPEC"), (("--alias", "a=int5"), "int5"), (("--alias", "pocket=f16"), "another --name"),
            (("--alias", "a,b=f16"), "letters"), (("--port", 70000), "--port"), (("--kv", "nothing"), "nothing"),
            (("--media-root", "/none"), "--media-root is /none"), (("--prot", 1), "--port"), (("--kv-memory", "1X"), "--kv-memory"),
            (("--api-key-file", "/dev/null"), "no key"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.assertIn(words, self.refused(*arguments))

    def test_lists_of_devices_are_checked(self):
        for words, said in ((("--device", "cpu,"), "between commas"), (("--device", "cpu", "--gpus", "2"), "drop --device"),
                            (("--gpus", "none"), "expected 1 or more, or all")):  # fmt: skip
            done = subprocess.run([SERVE, *words], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(said, done.stderr)

    def test_a_port_has_one_server(self):
        first = Server()
        try:
            self.assertIn(f"127.0.0.1:{first.port} cannot be listened on", self.refused("--port", first.port))
            self.assertEqual(first.ask(path="/health")[0], 200)
        finally:
            self.assertEqual(first.end(), 0)


class Drain(unittest.TestCase):
    def setUp(self):
        if not SERVE.is_file():
            self.skipTest(f"{BUILD} has no vlm-serve")

    def many(self, server, count, **keys):
        pool = concurrent.futures.ThreadPoolExecutor(count)
        self.addCleanup(pool.shutdown)
        return [pool.submit(server.ask, question(image=scene(i % 10), max_tokens=60, **keys)) for i in range(count)]

    def test_what_was_taken_is_answered(self):
        server = Server("--max-batch", 4)
        waiting = self.many(server, 30)
        server.wait_until(lambda: server.metric("kvlm_waiting") > 5)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.ask(path="/health")[0] == 503)
        self.assertEqual(server.ask(path="/health")[2]["status"], "draining")
        status, headers, content = server.ask(question())
        self.assertEqual((status, content["error"]["code"], headers["retry-after"]), (503, "draining", "5"))
        answers = [each.result() for each in waiting]
        self.assertEqual({status for status, _, _ in answers}, {200})
        self.assertEqual(server.end(), 0)

    def test_idle_connections_do_not_delay_the_end(self):
        for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
            server = Server()
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
            server.ask(path="/health")
            start = time.monotonic()
            self.assertEqual(server.end(number), status)
            self.assertLess(time.monotonic() - start, 5)
            for each in idle:
                each.close()

    def test_a_drain_ends(self):
        for arguments, second in ((("--drain", 0), False), ((), True)):
            server = Server("--max-batch", 2, "--max-answer", 1400, *arguments)
            pool = concurrent.futures.ThreadPoolExecutor(8)
            self.addCleanup(pool.shutdown)
            # Answers that end by themselves are short; a seed and heat make them long.
            body = question(image=scene(0), max_tokens=1400, temperature=2, seed=1)
            waiting = [pool.submit(server.ask, body) for _ in range(8)]
            streamed = pool.submit(server.events, body)
            server.wait_until(lambda: server.metric("kvlm_running") > 0)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            if second:
                time.sleep(0.3)
                server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(20), 0)
            self.assertLess(time.monotonic() - start, 10)
            self.assertLessEqual({each.result()[0] for each in waiting}, {200, 503})
            try:
                self.assertFalse(streamed.result()[1])
            except AssertionError:
                pass  # refused before its first token


if __name__ == "__main__":
    unittest.main()
