"""The page of vlm-serve at /, in a headless Chromium. Standard library only."""

import json
import tempfile
import unittest
from pathlib import Path

import browser
from serve_case import CHAT, Server, ServeCase, question, scene

ORIGINS = {"http://127.0.0.1:PORT": 200, "http://localhost:PORT": 403, "http://127.0.0.1:1": 403, "https://127.0.0.1:PORT": 403,
           "http://127.0.0.1": 403, "http://evil.example": 403, "null": 403}  # fmt: skip


class Origins(ServeCase):
    """Which pages are answered, without a browser."""

    def test_only_its_own_page_is_answered(self):
        body = question(image=scene(1), max_tokens=1)
        for origin, status in ORIGINS.items():
            with self.subTest(origin):
                got = self.server.ask(body, headers={"Origin": origin.replace("PORT", str(self.server.port))})
                self.assertEqual(got[0], status, got[2])
        raw = json.dumps(body).encode()
        for name in ("evil.example", f"evil.example:{self.server.port}"):  # DNS rebinding
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {name}\r\nOrigin: http://{name}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            self.assertIn(b"wrong_host", self.server.send(head.encode() + raw))

    def test_it_needs_nothing_else(self):
        status, headers, content = self.server.ask(path="/")
        self.assertEqual((status, headers["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'none'", headers["content-security-policy"])
        self.assertNotIn(b"http://", content)
        self.assertNotIn(b"https://", content)


class OpenToOthers(unittest.TestCase):
    def test_a_name_may_have_been_made_up_unless_there_are_keys(self):
        for arguments, env, key in ((("--no-key",), {}, {}), ((), {"KVLM_API_KEY": "secret"}, {"Authorization": "Bearer secret"})):
            server = Server("--host", "0.0.0.0", *arguments, env=env)
            try:
                for host, status in ((f"127.0.0.1:{server.port}", 200), ("10.1.2.3", 200), ("machine.example", 200 if key else 403),
                                     (f"cafe.de:{server.port}", 200 if key else 403), ("[::1]", 200), ("1.2.3", 200 if key else 403)):
                    got = server.ask(question(image=scene(1), max_tokens=1), headers={"Host": host, "Origin": f"http://{host}"} | key)
                    self.assertEqual(got[0], status, (host, got[2]))
                self.assertEqual(server.ask(path="/")[0], 200)
                self.assertEqual(server.ask(path="/v1/models")[0], 401 if key else 200)
            finally:
                self.assertEqual(server.end(), 0)


@unittest.skipUnless(browser.CHROMIUM, "there is no Chromium (tools/setup.sh --browser)")
class Page(ServeCase):
    ARGUMENTS = ("--alias", "small=kivi,bits=1", "--max-answer", 400)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.browser.told.clear()
        self.browser.resize(1280, 800)
        self.browser.open(f"http://127.0.0.1:{self.server.port}/")
        self.browser.wait("document.querySelector('#kv').value")

    def set(self, selector, value):
        self.browser.value(f"document.querySelector({selector!r}).value = {json.dumps(value)}")

    def ask(self, kv, wait=True, **fields):
        self.set("#kv", kv)
        for name, value in fields.items():
            self.set(f"#{name}", value)
        self.browser.value("document.querySelector('#form').requestSubmit()")
        if wait:
            self.browser.wait("document.querySelector('#stop').disabled")

    def newest(self, part):
        return self.browser.value(f"document.querySelector('#answers article {part}').textContent")

    def test_an_image_is_asked_about_under_several_policies(self):
        self.browser.choose_files("#files", scene(3))
        self.browser.wait("document.querySelector('#images img')?.naturalWidth")
        for kv in ("f16", "kivi,bits=2"):
            for asked, body in (("", {}), ("How many objects are there?", {"text": "How many objects are there?"})):
                self.ask(kv, question=asked, tokens="40")
                content = [part for part in question(image=scene(3), **body)["messages"][0]["content"] if asked or part["type"] != "text"]
                answer = self.server.answer({"messages": [{"role": "user", "content": content}], "kv": kv, "max_tokens": 40})
                self.assertEqual(self.newest(".answer"), answer["choices"][0]["message"]["content"])
                self.assertEqual(self.newest("h2"), kv)
                share = 100 * answer["kvlm"]["cache_bytes"] / answer["kvlm"]["f16_bytes"]
                self.assertIn(f" {share:.1f} % of ", self.newest(".figures"))
        self.assertEqual(self.browser.value("document.querySelectorAll('#answers article').length"), 4)
        self.assertEqual(self.browser.value("document.querySelector('datalist').children[1].value"), "kivi,bits=1")
        self.assertEqual(self.browser.complaints(), [])

    def test_what_is_wrong_is_shown(self):
        with tempfile.NamedTemporaryFile(suffix=".pdf") as other:
            self.browser.choose_files("#files", other.name)
            self.browser.wait("document.querySelector('#hint').textContent.endsWith('.pdf is not an image')")
        self.ask("nothing", question="hello")
        self.assertIn('has no policy "nothing"', self.newest(".figures.error"))
        with tempfile.NamedTemporaryFile(suffix=".png") as broken:
            broken.write(b"no image")
            broken.flush()
            self.browser.choose_files("#files", broken.name)
            self.browser.wait("document.querySelector('#images img')")
            self.ask("f16")
        self.assertIn("image", self.newest(".figures.error"))

    def test_an_answer_is_stopped(self):
        self.browser.choose_files("#files", scene(4))
        self.browser.wait("document.querySelector('#images img')")
        before = self.server.metric("kvlm_cancelled_total")
        self.ask("f16", wait=False, question="Describe the image.", tokens="400")
        self.browser.value("document.querySelector('#stop').click()")
        self.browser.wait("document.querySelector('#answers .figures').textContent === 'stopped'")
        self.server.wait_until(lambda: self.server.metric("kvlm_cancelled_total") > before)
        self.server.wait_until(lambda: self.server.metric("kvlm_cache_reserved_bytes") == 0)

    def test_answers_are_no_html(self):
        self.ask("f16", question="<img src=x onerror=alert(1)>", tokens="2")
        self.assertEqual(self.newest(".asked"), "<img src=x onerror=alert(1)>")
        self.assertFalse(self.browser.value("document.querySelector('article img')"))

    def test_it_fits_phones_and_desktops(self):
        self.browser.choose_files("#files", scene(5))
        self.ask("prefixkv,keep=0.5 + kivi,bits=4,group=32,residual=128", question="How many objects are there in this picture of shapes?")
        for width, columns in ((360, 1), (390, 1), (768, 1), (1280, 2)):
            self.browser.resize(width, 800, mobile=width < 500, dark=width == 390)
            self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), width)
            self.assertEqual(self.browser.value("getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length"), columns)


@unittest.skipUnless(browser.CHROMIUM, "there is no Chromium (tools/setup.sh --browser)")
class Aliases(unittest.TestCase):
    def test_policies_of_models_are_asked_for_by_name(self):
        server = Server("--alias", "small=kivi,bits=2", "--request-kv", "aliases")
        page = browser.Browser()
        try:
            page.open(f"http://127.0.0.1:{server.port}/")
            page.wait("document.querySelector('#kv').value === 'f16'")
            for kv, said in (("f16", "of cache"), ("kivi,bits=2", "of cache"), ("int4", "leave out kv")):
                page.value(f"document.querySelector('#question').value = 'hello'; document.querySelector('#tokens').value = 2;"
                           f"document.querySelector('#kv').value = '{kv}'; document.querySelector('#form').requestSubmit()")
                page.wait("document.querySelector('#stop').disabled")
                self.assertIn(said, page.value("document.querySelector('#answers .figures').textContent"))
        finally:
            page.close()
            self.assertEqual(server.end(), 0)


@unittest.skipUnless(browser.CHROMIUM, "there is no Chromium (tools/setup.sh --browser)")
class Keys(unittest.TestCase):
    def test_a_key_is_asked_for(self):
        server = Server(env={"KVLM_API_KEY": "secret"})
        page = browser.Browser()
        try:
            page.open(f"http://127.0.0.1:{server.port}/")
            page.wait("!document.querySelector('#keys').hidden")
            page.value("document.querySelector('#key').value = 'secret'; document.querySelector('#key').dispatchEvent(new Event('change'))")
            page.wait("document.querySelector('#kv').value === 'f16'")
        finally:
            page.close()
            self.assertEqual(server.end(), 0)


if __name__ == "__main__":
    unittest.main()
