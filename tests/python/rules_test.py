"""Retention rules in Python: a rule's answers are those of the built-in policy that it spells out; what it may do wrong is said."""

import gc
import subprocess
import sys
import threading
import traceback
import unittest

from module_case import ROOT, scene

import kvlm
import numpy as np

calls = []


@kvlm.retention("norm_of_keys", needs=("keys",))
def norm_of_keys(layer, *, power: float = 1.0):
    """the rows of the shortest keys"""
    calls.append((layer.index, threading.get_ident()))
    return -(np.linalg.norm(np.asarray(layer.keys, dtype=np.float64), axis=-1) ** power)


@kvlm.retention("wrong", needs=("keys", "values", "queries"))
def wrong(layer, *, how=kvlm.Choice("right", "raises", "nan", "one_nan", "shape", "text", "asks", "keeps")):
    keys, values, queries = map(np.asarray, (layer.keys, layer.values, layer.queries))
    scores = np.linalg.norm(values, axis=-1)
    if how == "raises":
        raise ZeroDivisionError("in the rule")
    if how == "nan":
        return scores * np.nan
    if how == "one_nan":
        scores[:, 3] = np.nan
    if how == "shape":
        return scores[:, 1:]
    if how == "text":
        return "scores"
    if how == "asks":
        Rules.model.generate(scene(0), max_tokens=1)
    if how == "keeps":
        Rules.kept.append((layer, keys, keys.copy(), queries, queries.copy()))
    return scores


seen = []


@kvlm.quantizer("unchanged", bits=16)
def unchanged(rows, *, side, layer):
    """rows as they are"""
    seen.append((side, layer, rows.shape, threading.get_ident()))
    return rows


@kvlm.quantizer("simulated_kivi", bits=lambda bits, group: bits + 32 / group)
def simulated_kivi(rows, *, side, layer, bits: int = 2, group: int = 32, how=kvlm.Choice("right", "raises", "nan", "shape", "text", "asks")):
    """KIVI's codes (arXiv 2402.02750, section 3): keys by channel over groups of tokens, values by token over groups of channels"""
    if how == "raises":
        raise ZeroDivisionError("in the quantizer")
    if how == "nan":
        return rows * np.nan
    if how == "shape":
        return rows[:, 1:]
    if how == "text":
        return "rows"
    if how == "asks":
        Quantizers.model.generate(scene(0), max_tokens=1)
    heads, n, dim = rows.shape
    whole = n // group * group if side == "keys" else n
    grouped = rows[:, :whole].reshape((heads, whole // group, group, dim) if side == "keys" else (heads, n, dim // group, group))
    axis = 2 if side == "keys" else 3
    low, high = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
    step = (high - low) / np.float32(2**bits - 1)
    codes = np.clip(np.rint((grouped - low) / step), 0, 2**bits - 1)
    given_back = codes * np.float16(step).astype(np.float32) + np.float16(low).astype(np.float32)
    return np.concatenate([given_back.reshape(heads, whole, dim), rows[:, whole:]], axis=1)


class Rules(unittest.TestCase):
    kept = []

    @classmethod
    def setUpClass(cls):
        cls.model = kvlm.Model("pocket", device="cpu", threads=2)

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def answer(self, kv, number=1, **options):
        result = self.model.generate(scene(number), kv=kv, max_tokens=24, logprobs=5, **options)
        return result.tokens, result.logprobs, result.cache.bytes, result.cache.slots

    def test_a_rule_is_the_built_in_one_that_it_spells_out(self):
        """Every logit to the last bit, so that no other rows can have stayed."""
        for rest in (",keep=0.5", ",keep=0.2", ",keep=0.3,head_shared=on", ",keep=0.4 + kivi", ",keep=0.3 + int4", ",keep=0.25,sinks=0,last=4"):
            for number in range(3):
                with self.subTest(rest=rest, number=number):
                    self.assertEqual(self.answer("norm_of_keys" + rest, number), self.answer("knorm" + rest, number))
        other = self.answer("norm_of_keys,keep=0.3,power=-1")  # the longest keys
        self.assertNotEqual(other[1], self.answer("norm_of_keys,keep=0.3")[1])

    def test_a_batch_of_rules(self):
        alone = [self.answer("norm_of_keys,keep=0.3 + kivi", i)[0] for i in range(6)]
        records = [{"image": scene(i)} for i in range(6)]
        found = dict(self.model.batch(records, kv="norm_of_keys,keep=0.3 + kivi", max_tokens=24, batch_size=6))
        self.assertEqual([found[i].tokens for i in range(6)], alone)

    def test_it_is_called_once_a_layer_in_order(self):
        calls.clear()
        self.model.generate(scene(2), kv="norm_of_keys,keep=0.5", max_tokens=6)
        self.assertEqual([index for index, _ in calls], list(range(self.model.info["layers"])))
        self.assertNotIn(threading.get_ident(), {thread for _, thread in calls})

    def test_what_a_rule_sees(self):
        Rules.kept.clear()
        result = self.model.generate(scene(2), kv="wrong,keep=0.5,how=keeps", max_tokens=2)
        info = self.model.info
        for i in range(20):
            self.model.generate(scene(i % 5), kv="int4", max_tokens=1)
        gc.collect()
        for number, (layer, keys, keys_then, queries, queries_then) in enumerate(Rules.kept):
            self.assertEqual((layer.index, layer.layers, layer.rows), (number, info["layers"], result.prompt_tokens))
            self.assertEqual(keys.shape, (info["kv_heads"], result.prompt_tokens, info["head_dim"]))
            self.assertEqual(queries.shape, (result.prompt_tokens, info["q_heads"], info["head_dim"]))
            np.testing.assert_array_equal(keys, keys_then)
            np.testing.assert_array_equal(queries, queries_then)
            tags, visual = np.asarray(layer.tags), np.asarray(layer.visual)
            self.assertEqual(int(visual.sum()), result.visual_tokens)
            np.testing.assert_array_equal(tags >= 0, visual == 1)
            self.assertFalse(keys.flags.writeable)

    def test_what_a_rule_does_wrong_is_said(self):
        for how, kind, words in (("raises", ZeroDivisionError, "in the rule"), ("nan", kvlm.Error, "all are NaN"), ("shape", kvlm.Error, "expected an array of shape"),
                                 ("text", kvlm.Error, "returned a str"), ("asks", kvlm.Error, "waiting for it")):  # fmt: skip
            with self.subTest(how), self.assertRaises(kind) as caught:
                self.answer(f"wrong,keep=0.5,how={how}")
            self.assertIn(words, str(caught.exception))
            self.assertEqual(len(self.answer("wrong,keep=0.5,how=one_nan")[0]), len(self.answer("f16")[0]))
        try:
            self.answer("wrong,keep=0.5,how=raises")
        except ZeroDivisionError as error:
            self.assertIn("in wrong", "".join(traceback.format_exception(error)))
        found = dict(self.model.batch([{"image": scene(i), "kv": f"wrong,keep=0.5,how={how}"} for i, how in enumerate(("right", "nan", "right"))]))
        self.assertEqual([type(found[i]).__name__ for i in range(3)], ["Result", "Error", "Result"])

    def test_names_are_words(self):
        for name in ("a:b", "simulated:a", "A", "", "a b"):
            for make in (kvlm.retention, lambda given: kvlm.quantizer(given, bits=4)):
                with self.subTest(name), self.assertRaisesRegex(ValueError, "cannot name a policy"):
                    make(name)

    def test_a_rule_is_a_policy(self):
        self.assertEqual(kvlm.canonical("norm_of_keys,power=1,keep=0.3"), "python:norm_of_keys,keep=0.3,power=1")
        listed = kvlm.list_policies("norm_of_keys")[0]
        self.assertEqual((listed.kind, listed.source, listed.stores), ("retention", "Python", "the rows of the shortest keys"))
        self.assertIn("power", [option.key for option in listed.options])
        self.assertEqual(kvlm.explain("norm_of_keys,keep=0.5", tokens=600, visual=576)["bytes"], kvlm.explain("knorm,keep=0.5", tokens=600, visual=576)["bytes"])
        with self.assertRaisesRegex(kvlm.Error, "power"):
            kvlm.canonical("norm_of_keys,power=much")
        with self.assertRaisesRegex(kvlm.Error, "how"):
            kvlm.canonical("wrong,how=sideways")

    def test_a_rule_can_be_made_again(self):
        def scored(value):
            @kvlm.retention("again", needs=())
            def again(layer, *, shift: int = 0):
                return np.full((self.model.info["kv_heads"], layer.rows), value) + np.arange(layer.rows) * value

        scored(1.0)
        newest = self.answer("again,keep=0.3")
        scored(-1.0)
        self.assertNotEqual(self.answer("again,keep=0.3"), newest)
        scored(1.0)
        self.assertEqual(self.answer("again,keep=0.3"), newest)
        with self.assertRaisesRegex(ValueError, "another name"):
            kvlm.retention("again", needs=("keys",))(lambda layer: None)

    def test_what_is_no_rule_is_refused(self):
        for name in ("knorm", "f16"):
            with self.assertRaises(kvlm.Error):
                kvlm.retention(name)(lambda layer: None)
        with self.assertRaises(ValueError):
            kvlm.retention("fine", needs=("weights",))
        for function in (lambda layer, *, option="text": None, lambda layer, power=2: None):
            with self.assertRaises(TypeError):
                kvlm.retention("fine")(function)
        with self.assertRaisesRegex(TypeError, "write @kvlm.retention"):
            kvlm.retention(lambda layer: None)

    def test_arrays_are_numpy_s(self):
        seen = []

        @kvlm.retention("norm_of_values", needs="values")
        def norm_of_values(layer):
            seen.append(layer.values.shape)
            return (layer.values[:, :, :] ** 2).sum(-1)

        self.assertEqual(len(self.answer("norm_of_values,keep=0.5")[0]), 21)
        self.assertEqual(len(seen), self.model.info["layers"])

    def test_the_interpreter_ends_while_a_rule_works(self):
        code = f"""
import kvlm, time
@kvlm.retention("slow", needs=())
def slow(layer):
    time.sleep(0.2)
    return [[0.0] * layer.rows] * 2
m = kvlm.Model("pocket", device="cpu")
s = m.stream({str(scene(0))!r}, kv="slow,keep=0.5")
time.sleep(0.1)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=ROOT)


    def test_a_prompt_ends_with_the_rule_that_it_began_with(self):
        seen = []

        def made(number):
            def rule(layer):
                seen.append(number)
                if layer.index == 3:
                    kvlm.retention("changes", needs="keys")(made(number + 1))
                return np.zeros(layer.keys.shape[:2])

            return rule

        kvlm.retention("changes", needs="keys")(made(0))
        layers = self.model.info["layers"]
        for _ in range(2):
            self.model.generate(scene(0), kv="changes,keep=0.5", max_tokens=1)
        self.assertEqual(seen, [0] * layers + [1] * layers)


class Quantizers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = kvlm.Model("pocket", device="cpu", threads=2)

    @classmethod
    def tearDownClass(cls):
        cls.model.close()

    def test_unchanged_rows_are_plain_ones(self):
        """Every logit to the last bit, and the same bytes, with and without a rule."""
        layers = self.model.info["layers"]
        for rest in ("", "knorm,keep=0.4", "h2o,keep=0.5", "pyramidinfer,keep=0.4"):
            seen.clear()
            kv = f"{rest} + unchanged" if rest else "unchanged"
            with self.subTest(kv=kv):
                found = self.model.generate(scene(1), kv=kv, max_tokens=24, logprobs=5)
                plain = self.model.generate(scene(1), kv=rest or "f16", max_tokens=24, logprobs=5)
                self.assertEqual((found.tokens, found.logprobs), (plain.tokens, plain.logprobs))
                self.assertEqual((found.cache.bytes, found.cache.stored_bits), (plain.cache.bytes, plain.cache.stored_bits))
                self.assertEqual([(layer, side) for side, layer, _, _ in seen], [(layer, side) for layer in range(layers) for side in ("keys", "values")])
                self.assertNotIn(threading.get_ident(), {thread for _, _, _, thread in seen})
                self.assertEqual((found.cache.simulated, found.cache.claimed_bits, found.json["kv"]["simulated"]), (True, 16, True))
                self.assertIn("(simulated)", str(found.cache))
                self.assertFalse(plain.cache.simulated)
        seen.clear()
        self.model.generate(scene(1), kv="unchanged,hold=40", max_tokens=1)
        self.assertEqual({shape[1] for _, _, shape, _ in seen}, {plain.prompt_tokens - 40})
        seen.clear()
        self.model.generate(scene(1), kv="unchanged,hold=4000", max_tokens=1)
        self.assertEqual(seen, [])

    def test_it_gives_back_what_codes_do(self):
        """KIVI's formula in numpy and its packed rows, where both are quantized."""
        plain = self.model.prefill(scene(2))
        n = len(plain.tokens)
        for bits in (2, 4):
            packed = self.model.prefill(scene(2), kv=f"kivi,bits={bits},group=16,residual=32")
            for side in ("keys", "values"):
                rows, whole = getattr(packed, side), getattr(plain, side)
                changed = np.flatnonzero((rows(0) != whole(0)).any(axis=(0, 2)))
                hold = n - 1 - changed.max()
                self.assertLess(hold, n - 32)
                simulated = self.model.prefill(scene(2), kv=f"simulated_kivi,bits={bits},group=16,hold={hold}")
                self.assertAlmostEqual(simulated.cache.claimed_bits, bits + 2)
                for layer in range(plain.layers):
                    with self.subTest(bits=bits, side=side, layer=layer):
                        np.testing.assert_allclose(getattr(simulated, side)(layer), rows(layer), rtol=2e-3, atol=2e-3)

    def test_its_answers_differ_from_plain_ones(self):
        ones = self.model.generate(scene(3), kv="simulated_kivi,bits=1,group=16,hold=16", logprobs=1)
        plain = self.model.generate(scene(3), logprobs=1)
        self.assertNotEqual(ones.logprobs[1:], plain.logprobs[1:])
        self.assertEqual(ones.logprobs[0], plain.logprobs[0])  # the prompt is read exactly

    def test_a_quantizer_that_goes_wrong(self):
        for how, kind, words in (("raises", ZeroDivisionError, "in the quantizer"), ("nan", kvlm.Error, "not finite"), ("shape", kvlm.Error, "of shape"),
                                 ("text", kvlm.Error, "returned a str"), ("asks", kvlm.Error, "a rule asks the model")):  # fmt: skip
            with self.subTest(how), self.assertRaises(kind) as caught:
                self.model.generate(scene(0), kv=f"simulated_kivi,group=16,how={how}")
            self.assertIn(words, str(caught.exception))
            self.assertEqual(self.model.generate(scene(0), kv="unchanged", max_tokens=8).tokens, self.model.generate(scene(0), max_tokens=8).tokens)

    def test_what_it_does_not_go_with(self):
        for kv, words in (("unchanged + kivi", "the quantizer kivi"), ("unchanged + xquant", "the quantizer xquant"),
                          ("simulated_kivi + unchanged", "two simulated quantizers"), ("unchanged + share=codes", "shares codes"),
                          ("unchanged,layers=0-1", "no option layers"), ("unchanged,hold=-1", "hold=-1")):  # fmt: skip
            with self.subTest(kv), self.assertRaises(kvlm.Error) as caught:
                self.model.generate(scene(0), kv=kv)
            self.assertIn(words, str(caught.exception))
        for name, wrong in (("int4", unchanged), ("norm_of_keys", unchanged)):
            with self.subTest(name), self.assertRaises((kvlm.Error, ValueError)):
                kvlm.quantizer(name, bits=4)(wrong)
        with self.assertRaises(TypeError):
            kvlm.quantizer(unchanged)
        for bits in (-4, 0, float("nan"), 65):
            with self.subTest(bits), self.assertRaisesRegex(ValueError, "above 0"):
                kvlm.quantizer("of_no_bits", bits=bits)

    def test_it_is_listed_and_explained_as_simulated(self):
        (listed,) = kvlm.list_policies("simulated_kivi")
        self.assertEqual((listed.kind, listed.source), ("simulated quantizer", "Python, simulated"))
        self.assertEqual([option.key for option in listed.options][:3], ["hold", "bits", "group"])
        self.assertEqual(kvlm.canonical("simulated_kivi + knorm,keep=0.5").split(" + ")[0].split(",")[0], "knorm")
        found, plain = (kvlm.explain(kv, tokens=100, visual=64) for kv in ("unchanged", "f16"))
        self.assertTrue(found["simulated"])
        self.assertEqual(found["bytes"], plain["bytes"])


if __name__ == "__main__":
    unittest.main()
