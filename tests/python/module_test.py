"""import kvlm: answers, streams and batches are vlm-run's, whatever form an image has and whoever else asks."""

import concurrent.futures
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

from module_case import KV, ROOT, RUN, scene

import kvlm
import numpy as np
from PIL import Image

SPECS = ("f16", "kivi", "prefixkv,keep=0.5 + kivi", "calibquant,bits=2", "h2o,keep=0.5", "xquant", "snapkv,keep=0.3", "int4")
MODELS = ("pocket", "pocket-internvl", "pocket-qwen")


def bundled(model):
    return model if model == "pocket" else ROOT / "tools/pocket" / model


def by_program(model, spec, images):
    """The tokens that `vlm-run --batch` gives."""
    records = "".join(json.dumps({"id": i, "image": str(image)}) + "\n" for i, image in enumerate(images))
    out = ROOT / f"build/python-test-{os.getpid()}.jsonl"
    listed = out.with_suffix(".in.jsonl")
    listed.write_text(records)
    try:
        subprocess.run([RUN, "-q", "-m", bundled(model), "--kv", spec, "--device", "cpu", "--batch", listed, "--out", out], check=True)
        answers = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda answer: answer["id"])
        return [answer["tokens"] for answer in answers]
    finally:
        for file in (out, listed, out.with_suffix(".run.json")):
            file.unlink(missing_ok=True)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = kvlm.Model("pocket", device="cpu", threads=2)

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def test_answers_are_vlm_run_s(self):
        """Alone, streamed and in a batch, for every family."""
        images = [scene(i) for i in range(6)]
        for name in MODELS:
            with kvlm.Model(bundled(name), device="cpu", threads=2) as model:
                for spec in SPECS:
                    with self.subTest(model=name, kv=spec):
                        expected = by_program(name, spec, images)
                        together = dict(model.batch(({"image": image} for image in images), kv=spec, batch_size=4))
                        self.assertEqual([together[i].tokens for i in range(len(images))], expected)
                        self.assertEqual(model.generate(images[1], kv=spec).tokens, expected[1])
                        *_, last = model.stream(images[2], kv=spec)
                        self.assertEqual(last.result.tokens, expected[2])

    def test_an_image_has_many_forms(self):
        path = scene(3)
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        expected = self.model.generate(path).tokens
        for form in (str(path), path.read_bytes(), bytearray(path.read_bytes()), pixels, np.asarray(pixels), memoryview(np.asarray(pixels)),
                     [path], (np.asarray(pixels),)):  # fmt: skip
            self.assertEqual(self.model.generate(form).tokens, expected, type(form))
        turned = np.asarray(pixels)[::-1, ::-1]  # of negative strides
        self.assertEqual(self.model.generate(turned).tokens, self.model.generate(np.ascontiguousarray(turned)).tokens)
        for wrong in (3, np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), {"a": 1}):
            with self.assertRaises(TypeError):
                self.model.generate(wrong)

    def test_a_stream_is_its_answer(self):
        pieces = list(self.model.stream(scene(4), "Describe the image.", logprobs=3))
        result = pieces[-1].result
        self.assertEqual("".join(piece.text for piece in pieces), result.text)
        self.assertEqual([token for piece in pieces for token in piece.tokens], result.tokens)
        self.assertEqual([each for piece in pieces for each in piece.logprobs], result.logprobs)
        self.assertGreater(len(pieces), 5)
        for entry in result.logprobs:
            self.assertEqual(len(entry.top), 3)
            self.assertEqual((entry.token, entry.logprob), entry.top[0])  # greedy
        joined = b"".join(map(self.model.token_bytes, result.tokens[:-1])).decode()
        self.assertEqual(joined.strip(), result.text.strip())

    def test_messages_hold_their_images(self):
        alone = self.model.generate(scene(5), "What is in the image?")
        parts = [{"type": "image", "image": scene(5)}, {"type": "text", "text": "What is in the image?"}]
        self.assertEqual(self.model.generate(messages=[{"role": "user", "content": parts}]).tokens, alone.tokens)
        with self.assertRaises(TypeError):
            self.model.generate(scene(5), messages=[{"role": "user", "content": "why?"}])

    def test_sampling_options_are_followed(self):
        drawn = [self.model.generate(scene(6), temperature=1.5, seed=seed, max_tokens=12).tokens for seed in (1, 1, 2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])
        self.assertEqual(self.model.generate(scene(6), max_tokens=3).finish_reason, "length")
        whole = self.model.generate(scene(6)).text
        self.assertEqual(self.model.generate(scene(6), stop=" objects").text, whole.split(" objects")[0])

    def test_what_a_prompt_leaves_in_the_cache(self):
        """Of plain rows, packed ones, and those that a rule keeps; in the order of the tokens."""
        images = [scene(7), scene(8)]
        whole = self.model.prefill(images, "Compare.")
        n = len(whole.tokens)
        result = self.model.generate(images, "Compare.", logprobs=1)
        self.assertEqual(n, result.prompt_tokens)
        self.assertEqual(int((whole.modality >= 0).sum()), result.visual_tokens)
        self.assertEqual(set(whole.modality.tolist()), {-1, 0, 1})
        self.assertEqual(int(whole.logits.argmax()), result.tokens[0])
        logits = whole.logits.astype(np.float64)
        self.assertAlmostEqual(logits.max() - np.log(np.exp(logits).sum()), result.logprobs[0].logprob, places=4)
        heads, dim = self.model.info["kv_heads"], self.model.info["head_dim"]
        for spec, near in (("f16", 0), ("int8", 0.05), ("calibquant,bits=8", 0.1), ("knorm,keep=0.3", 0), ("snapkv,keep=0.5 + calibquant,bits=8", 0.1)):
            held = self.model.prefill(images, "Compare.", kv=spec)
            self.assertEqual((held.layers, held.cache.spec), (self.model.info["layers"], kvlm.canonical(spec)))
            for layer in range(held.layers):
                with self.subTest(kv=spec, layer=layer):
                    kept = held.kept(layer)
                    keys, values = held.keys(layer), held.values(layer)
                    self.assertEqual((keys.shape, values.shape, keys.dtype), ((heads, kept.shape[1], dim),) * 2 + (np.float32,))
                    self.assertFalse(keys.flags.writeable)
                    self.assertTrue((np.diff(kept, axis=1) > 0).all())
                    np.testing.assert_array_equal(held.tags(layer), whole.modality[kept])
                    scale = np.abs(whole.keys(layer)).max()
                    for found, full in ((keys, whole.keys(layer)), (values, whole.values(layer))):
                        np.testing.assert_allclose(found, np.take_along_axis(full, kept[:, :, None], 1), rtol=0, atol=near * scale)
                    text = whole.modality[kept] == -1
                    if "calibquant" in spec:  # packs visual tokens alone
                        np.testing.assert_array_equal(keys[text], np.take_along_axis(whole.keys(layer), kept[:, :, None], 1)[text])
            self.assertAlmostEqual(np.mean([held.kept(layer).shape[1] for layer in range(held.layers)]), held.cache.slots)
        lengths = np.linalg.norm(whole.keys(0).astype(np.float64), axis=-1)
        lengths[:, -1] = 0  # always stays
        kept = self.model.prefill(images, "Compare.", kv="knorm,keep=0.3,sinks=0,last=1").kept(0)
        np.testing.assert_array_equal(kept, np.sort(np.argsort(lengths, axis=1, kind="stable")[:, : kept.shape[1]], axis=1))
        keys = held.keys(0)
        copy = keys.copy()
        del held, whole
        gc.collect()
        for _ in range(5):
            self.model.prefill(images, "Compare.", kv="int4")
        np.testing.assert_array_equal(keys, copy)
        for wrong in (-1, self.model.info["layers"]):
            with self.assertRaises(IndexError):
                self.model.prefill(images).keys(wrong)
        with self.assertRaises(TypeError):
            self.model.prefill(images, max_tokens=4)

    def test_errors_are_exceptions_with_a_code(self):
        for wrong, code in (({"kv": "kiwi"}, "invalid_argument"), ({"images": "gone.png"}, "corrupt_file"), ({"images": b"no image"}, "corrupt_file"),
                            ({"temperature": -1.0}, "invalid_argument"), ({"max_tokens": 0}, "invalid_argument"), ({"top_p": 0.0}, "invalid_argument"),
                            ({"videos": scene(0)}, "corrupt_file"), ({"videos": "gone.mp4"}, "corrupt_file")):  # fmt: skip
            with self.subTest(wrong), self.assertRaises(kvlm.Error) as caught:
                self.model.generate(**({"images": scene(0)} | wrong))
            self.assertEqual(caught.exception.code, code, caught.exception)
        found = dict(self.model.batch([{"image": scene(0)}, {"image": "gone.png"}, {"image": scene(1)}], max_tokens=2))
        self.assertEqual([type(found[i]).__name__ for i in range(3)], ["Result", "Error", "Result"])
        with self.assertRaises(kvlm.Error):
            kvlm.Model("no-such-model")
        with self.assertRaises(kvlm.Error) as caught:
            kvlm.Model("pocket", device="cpu", cache_memory=1000).generate(scene(0))
        self.assertEqual(caught.exception.code, "out_of_memory")

    def test_wrong_arguments_are_named(self):
        for wrong, words in (({"kv": 4}, "kv is 4; expected text"), ({"max_token": 4}, "did you mean max_tokens"), ({"max_tokens": "4"}, "max_tokens is '4'"),
                             ({"prompt": 5}, "prompt is 5"), ({"seed": -1}, "seed is -1"), ({"temperature": "hot"}, "expected a number"),
                             ({"images": None}, "nothing to answer"), ({"images": None, "messages": []}, "messages is empty")):  # fmt: skip
            with self.subTest(wrong), self.assertRaises(TypeError) as caught:
                self.model.generate(**({"images": scene(0)} | wrong))
            self.assertIn(words, str(caught.exception))
        for messages in ([{"role": "assistant", "content": "so"}], [{"role": "user", "content": ""}]):
            with self.assertRaises(kvlm.Error):
                self.model.generate(messages=messages)
        asked = [{"role": "user", "content": [{"type": "image", "image": scene(0)}]}]
        self.assertEqual(self.model.generate(messages=asked).tokens, self.model.generate(scene(0)).tokens)
        found = dict(self.model.batch([scene(0), {"image": scene(0), "promt": "x"}, 5, scene(0)], max_tokens=2))
        self.assertEqual([type(found[i]).__name__ for i in range(4)], ["Result", "Error", "Error", "Result"])
        with kvlm.Model("pocket", device="cpu", weights=8 * 2, cache_memory="20MB") as model:
            self.assertEqual(model.info["cache_bytes"], 20e6)
            self.assertIn("pocket", repr(model))

    def test_many_threads_ask_one_model(self):
        alone = {(i, kv): self.model.generate(scene(i), kv=kv, max_tokens=16).tokens for i in range(4) for kv in SPECS[:3]}
        keys = list(alone) * 8
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for key, tokens in zip(keys, pool.map(lambda key: self.model.generate(scene(key[0]), kv=key[1], max_tokens=16).tokens, keys), strict=True):
                self.assertEqual(tokens, alone[key])

    def test_a_stream_that_is_dropped_ends(self):
        stream = self.model.stream(scene(0), max_tokens=500)
        next(stream)
        del stream
        gc.collect()
        started = time.monotonic()
        self.model.generate(scene(0), max_tokens=1)
        self.assertLess(time.monotonic() - started, 5)

    def test_loading_tells_its_progress_and_can_be_ended(self):
        told = []
        kvlm.Model("pocket", device="cpu", progress=lambda *each: told.append(each)).close()
        self.assertEqual((told[-1][0], told[-1][1]), ("loading", told[-1][2]))

        def refuse(*_):
            raise ZeroDivisionError("enough")

        with self.assertRaises(ZeroDivisionError):
            kvlm.Model("pocket", device="cpu", progress=refuse)

    def test_a_child_of_a_fork_is_refused(self):
        child = os.fork()
        if child == 0:
            try:
                self.model.generate(scene(0))
            except kvlm.Error as error:
                os._exit(0 if "fork" in str(error) else 3)
            os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_ctrl_c_ends_an_answer(self):
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            for number in range(10**6):
                self.model.generate(scene(number % 5))
        self.assertLess(time.monotonic() - started, 1.5)
        self.assertTrue(self.model.generate(scene(0)).text)

    def test_a_call_that_is_interrupted_ends_its_request(self):
        """Also while somebody keeps the exception, as an interactive Python does."""
        rows = []

        @kvlm.retention("slowly", needs=())
        def slowly(layer):
            rows.append(layer.index)
            time.sleep(0.05)
            return np.zeros((2, layer.rows))

        def broken():
            yield scene(0)
            raise OSError("the disk is gone")

        def interrupt(ask):
            rows.clear()
            timer = threading.Timer(0.12, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            try:
                ask()
            except (KeyboardInterrupt, OSError) as error:
                timer.cancel()
                return error
            finally:
                timer.join()
            return None

        kv = "slowly,keep=0.5"
        for name, ask in (("generate", lambda: self.model.generate(scene(0), kv=kv)), ("stream", lambda: list(self.model.stream(scene(0), kv=kv))),
                          ("prefill", lambda: self.model.prefill(scene(0), kv=kv)), ("batch", lambda: list(self.model.batch([scene(0)] * 3, kv=kv))),
                          ("records", lambda: list(self.model.batch(broken(), kv=kv)))):  # fmt: skip
            with self.subTest(name):
                kept = interrupt(ask)
                self.assertIsNotNone(kept)
                time.sleep(0.1)
                done = len(rows)
                time.sleep(0.3)
                self.assertEqual(len(rows), done)
                self.assertLess(done, self.model.info["layers"])
                del kept

    def test_a_model_can_be_closed_at_any_time(self):
        """While others ask it, which then get an Error; not by a rule that it waits for."""
        for _ in range(8):
            model = kvlm.Model("pocket", device="cpu", threads=1)
            failures = []

            def asks(model=model, failures=failures):
                try:
                    while True:
                        model.generate(scene(0), max_tokens=2)
                except kvlm.Error as error:
                    failures.append((error.code, "closed" in str(error)))

            threads = [threading.Thread(target=asks) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.03)
            model.close()
            for thread in threads:
                thread.join()
            self.assertEqual(len(failures), 4)
            self.assertLessEqual(set(failures), {("cancelled", True), ("invalid_argument", True)})

        @kvlm.retention("closes", needs=())
        def closes(layer):
            self.model.close()

        with self.assertRaises(kvlm.Error) as caught:
            self.model.generate(scene(0), kv="closes,keep=0.5")
        self.assertIn("a rule closes the model", str(caught.exception))
        self.assertTrue(self.model.generate(scene(0), max_tokens=1).text)

    def test_a_model_may_be_collected_within_its_rule(self):
        script = f"""if True:
            import gc, threading, kvlm, numpy
            gc.disable()
            started, go, over = threading.Event(), threading.Event(), threading.Event()
            @kvlm.retention("collects", needs=())
            def collects(layer):
                started.set(); go.wait(5); gc.collect(); over.set()
                return numpy.zeros((2, layer.rows))
            class Cycle:
                def __init__(self):
                    self.model = kvlm.Model("pocket", device="cpu", threads=1)
                    self.me, self.stream = self, self.model.stream({str(scene(0))!r}, kv="collects,keep=0.5")
            cycle = Cycle(); started.wait(5); del cycle; go.set()
            assert over.wait(5)
        """
        self.assertEqual(subprocess.run([sys.executable, "-c", script], timeout=60).returncode, 0)

    def test_a_process_ends_whatever_its_threads_and_children_do(self):
        daemons = f"""if True:
            import threading, time, kvlm
            model = kvlm.Model("pocket", device="cpu", threads=1)
            def ask():
                while True:
                    try:
                        model.generate({str(scene(0))!r}, max_tokens=3)
                    except kvlm.Error:
                        pass
            for _ in range(4):
                threading.Thread(target=ask, daemon=True).start()
            time.sleep(0.2)
        """
        child = """if True:
            import os, sys, kvlm
            model = kvlm.Model("pocket", device="cpu", threads=2)
            child = os.fork()
            if child == 0:
                del model
                model = kvlm.Model("pocket", device="cpu", threads=2)
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
        for script in (daemons, child):
            self.assertEqual(subprocess.run([sys.executable, "-c", script], timeout=60).returncode, 0)

    def test_a_batch_goes_on_after_bad_records(self):
        with Image.open(scene(0)) as closed:
            pass

        @kvlm.retention("fails", needs=())
        def fails(layer):
            raise ZeroDivisionError("in the rule")

        bad = [closed, {"messages": [{"content": "why?"}]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
               {"image": scene(0), "kv": "fails,keep=0.5"}, {"image": scene(0), "seed": None}, {"image": scene(0), "stop": [3]}]  # fmt: skip
        found = dict(self.model.batch([scene(1), *bad, scene(1)], max_tokens=3))
        self.assertEqual([type(found[i]).__name__ for i in range(8)], ["Result"] + 6 * ["Error"] + ["Result"])
        self.assertIsInstance(found[4].__cause__, ZeroDivisionError)
        self.assertIn("a message has no role", str(found[2]))
        for fps in (-1.0, float("nan"), float("inf")):
            with self.assertRaises(kvlm.Error):
                kvlm.Clip([scene(0)], fps)

    def test_messages_name_keywords(self):
        for options, said in (({"kv": "nothing"}, "kv has no policy"), ({"device": "gpu"}, 'device is "gpu"'), ({"dtype": "f8"}, "dtype")):
            with self.subTest(options), self.assertRaises(kvlm.Error) as raised:
                kvlm.Model("pocket", **{"device": "cpu"} | options)
            self.assertIn(said, str(raised.exception))
            self.assertNotIn("--", str(raised.exception))

    def test_it_takes_what_vlm_run_takes(self):
        """A system turn before placeholders, file names of any bytes, and numbers of numpy."""
        plain = self.model.generate(scene(1), "What is in the image?", system="Be brief.").tokens
        self.assertEqual(self.model.generate(scene(1), "<image>\nWhat is in the image?", system="Be brief.").tokens, plain)
        self.assertTrue(self.model.generate(scene(1), system="Be brief.").text)
        with tempfile.TemporaryDirectory() as folder:
            odd = os.fsdecode(os.path.join(os.fsencode(folder), b"\xff.png"))
            shutil.copy(scene(1), odd)
            self.assertEqual(self.model.generate(odd).tokens, self.model.generate(scene(1)).tokens)
        self.assertEqual(len(self.model.generate(scene(1), max_tokens=np.int64(3), temperature=np.float32(0)).tokens), 3)


class Module(unittest.TestCase):
    def test_explain_is_vlm_kv_s(self):
        printed = json.loads(subprocess.run([KV, "explain", "kivi,bits=2", "--tokens", "624", "--visual", "576", "--json"], capture_output=True, check=True).stdout)
        found = kvlm.explain("kivi,bits=2", tokens=624, visual=576)
        same = printed.keys() - {"model", "version"}
        self.assertEqual({key: found[key] for key in same}, {key: printed[key] for key in same})

    def test_policies_are_vlm_kv_s(self):
        printed = json.loads(subprocess.run([KV, "list", "--json"], capture_output=True, check=True).stdout)["policies"]
        self.assertEqual([policy.name for policy in kvlm.list_policies() if policy.source != "Python"], [policy["name"] for policy in printed])
        self.assertEqual(kvlm.canonical("visual=kivi text=f16"), kvlm.canonical(kvlm.canonical("visual=kivi text=f16")))
        with self.assertRaises(kvlm.Error):
            kvlm.list_policies("kiwi")

    def test_it_brings_nothing_else_with_it(self):
        code = "import sys, kvlm; print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip(), "[]")

    def test_an_unfinished_stream_does_not_delay_the_exit(self):
        code = f"import kvlm; m = kvlm.Model('pocket', device='cpu'); s = m.stream({str(scene(0))!r}, max_tokens=1000); next(s)"
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        self.assertLess(time.monotonic() - started, 10)

    def test_types_are_complete(self):
        done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "-p", "kvlm"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)
        stub = (Path(kvlm.__file__).parent / "_core.pyi").read_text()
        self.assertNotIn("std::", stub)

    def test_public_names_are_documented(self):
        for name in kvlm.__all__:
            self.assertTrue(getattr(kvlm, name).__doc__, name)
        for name, member in vars(kvlm.Model).items():
            if callable(member) and not name.startswith("_"):
                self.assertTrue(member.__doc__, name)

    def test_models_can_be_made_often(self):
        for _ in range(30):
            with kvlm.Model("pocket", device="cpu", threads=1) as model:
                self.assertTrue(model.info["layers"])


if __name__ == "__main__":
    unittest.main()
