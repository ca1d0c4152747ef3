"""tools/eval/factors.py: in what two specs differ, with the catalogue that the program prints."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build" / "release"))
sys.path.insert(0, str(ROOT / "tools" / "eval"))
import factors  # noqa: E402
from errors import EvaluationError  # noqa: E402
from runs import Programs  # noqa: E402


class Parse(unittest.TestCase):
    def test_order_and_shorthand_do_not_matter(self):
        self.assertTrue(factors.same("pyramidkv,keep=0.2,evict=score", "pyramidkv,evict=score,keep=0.2"))
        self.assertTrue(
            factors.same("visual=calibquant text=kivi,bits=4", "calibquant,scope=visual + kivi,bits=4,scope=text")
        )
        self.assertFalse(factors.same("kivi", "kivi,residual=32"))
        self.assertEqual(
            [str(part) for part in factors.parse("int4 + share=codes,from=0:16")], ["int4", "share=codes,from=0:16"]
        )

    def test_what_is_no_spec_is_refused(self):
        for text, words in (
            ("@file.json", "'@file.json' is no policy's name"),
            ("", "is empty"),
            (" + ", "is empty"),
            ("kivi,bits", "'bits' is no KEY=VALUE"),
            ("kivi,bits=2,bits=4", "'bits=4' is no KEY=VALUE"),
        ):
            with self.subTest(text), self.assertRaisesRegex(ValueError, words):
                factors.parse(text)


class Differences(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.catalogue = factors.Catalogue.from_json(Programs(BUILD).policies())

    def apart(self, a, b):
        return [str(factor) for factor in self.catalogue.differences(a, b)]

    def test_an_option_written_as_its_default_is_none(self):
        self.assertEqual(self.apart("kivi", "kivi,bits=2,residual=128"), [])
        self.assertEqual(self.apart("snapkv", "snapkv,keep=0.50"), [])
        self.assertEqual(self.apart("f16", "f16"), [])

    def test_one_option(self):
        self.assertEqual(self.apart("kivi,bits=1", "kivi"), ["bits: 1 or 2"])
        self.assertEqual(
            self.apart("calibquant,shrink=none", "calibquant,shrink=none,tau=0:0"), ["tau: left open or 0:0"]
        )
        # 0.2 is the default at 1 bit alone.
        self.assertEqual(
            self.apart("head_quantile,bits=8", "head_quantile,alpha=0.2,bits=8"), ["alpha: left open or 0.2"]
        )

    def test_what_may_have_been_fitted_apart_is_a_factor_too(self):
        self.assertEqual(
            self.apart("head_quantile,group_axes=channel", "head_quantile"),
            ["group_axes: channel or head", "alpha: left open or left open"],
        )
        self.assertEqual(
            self.apart("head_quantile,alpha=0.2,group_axes=channel", "head_quantile,alpha=0.2"), ["group_axes: channel or head"]
        )
        self.assertEqual(
            self.apart("xquant", "xquant,eta1=0,eta2=0"), ["eta1: left open or 0", "eta2: left open or 0"]
        )

    def test_one_part(self):
        self.assertEqual(self.apart("prefixkv,keep=0.2", "uniform,keep=0.2"), ["retention: prefixkv or uniform"])
        self.assertEqual(
            self.apart("kivi,residual=32", "vidkv,key_bits=2,residual=32,value_bits=2"), ["quantizer: kivi or vidkv"]
        )
        self.assertEqual(self.apart("int4 + share=codes", "int4"), ["sharing: share=codes or none"])
        self.assertEqual(self.apart("f16", "kivi"), ["quantizer: none or kivi"])

    def test_a_window_or_scope_that_comes_with_another_part_is_a_factor_too(self):
        self.assertEqual(
            self.apart("kivi", "vidkv,key_bits=2,residual=32,value_bits=2"),
            ["quantizer: kivi or vidkv", "residual: 128 or 32"],
        )
        self.assertEqual(
            self.apart("calibquant,bits=2", "kivi"), ["quantizer: calibquant or kivi", "scope: visual or all"]
        )
        self.assertEqual(self.apart("calibquant,bits=2", "kivi,scope=visual"), ["quantizer: calibquant or kivi"])
        self.assertEqual(self.apart("snapkv", "random"), ["retention: snapkv or random", "evict: none or score"])

    def test_two_options_are_two(self):
        self.assertEqual(
            self.apart("kivi,key_bits=8,value_bits=1", "kivi,key_bits=1,value_bits=8"),
            ["key_bits: 8 or 1", "value_bits: 1 or 8"],
        )
        self.assertEqual(
            self.apart("prefixkv,keep=0.2", "pyramidkv,keep=0.2,no_floor=on,evict=score"),
            ["retention: prefixkv or pyramidkv", "no_floor of pyramidkv: - or on"],
        )

    def test_auto_stands_for_what_its_help_says(self):
        self.assertEqual(
            self.apart("prefixkv", "prefixkv + int4"), ["evict: score or window", "quantizer: none or int4"]
        )
        self.assertEqual(self.apart("prefixkv", "prefixkv,evict=score"), [])

    def test_profiles_are_values(self):
        self.assertEqual(
            self.apart("calibquant", "calibquant,profile=paper"),
            ["guard: clamp0 or none", "shrink: eta or none", "tau: left open or 0:3"],
        )

    def test_a_draw_of_chance_is_no_factor(self):
        self.assertEqual(self.apart("random,keep=0.5", "random,keep=0.5,seed=7"), [])
        self.assertEqual(self.apart("snapkv", "random,evict=none,seed=1"), ["retention: snapkv or random"])

    def test_layers_pair_with_their_like(self):
        self.assertEqual(self.apart("kivi,bits=4,layers=0 + kivi", "kivi,bits=8,layers=0 + kivi"), ["bits: 4 or 8"])

    def test_what_the_program_does_not_know_is_refused(self):
        with self.assertRaisesRegex(ValueError, "names 'nokv'"):
            self.apart("nokv", "f16")
        with self.assertRaisesRegex(ValueError, "kivi has no option 'keep'"):
            self.apart("kivi,keep=1", "f16")

    def test_curves_are_of_families(self):
        self.assertEqual(self.catalogue.family("calibquant,bits=2,tau=0:0"), "calibquant,tau=0:0")
        self.assertEqual(self.catalogue.family("prefixkv,keep=0.5 + kivi,bits=4"), "prefixkv + kivi")
        self.assertEqual(
            [self.catalogue.kind(spec) for spec in ("f16", "kivi", "h2o", "h2o + int4", "int4 + share=codes")],
            ["quantizer", "quantizer", "retention", "both", "quantizer"],
        )

    def test_a_program_that_is_not_there(self):
        with self.assertRaisesRegex(EvaluationError, "nowhere/tools/vlm-kv is not built; .* or name another build folder with --build"):
            Programs(Path("nowhere")).policies()

    def test_policies_in_python_have_whole_names(self):
        made = [{"name": "python:mine", "kind": "retention", "plain": False, "options": []},
                {"name": "python:simulated:signs", "kind": "simulated quantizer", "plain": False, "options": []}]  # fmt: skip
        catalogue = factors.Catalogue.from_json({"policies": Programs(BUILD).policies()["policies"] + made})
        self.assertEqual(catalogue.written("visual=int4 mine,keep=0.5"), "int4,scope=visual + python:mine,keep=0.5")
        self.assertEqual(catalogue.written("python:mine,keep=0.5 + signs"), "python:mine,keep=0.5 + python:simulated:signs")
        self.assertEqual(catalogue.written("knorm+int4"), "knorm+int4")
        self.assertEqual(catalogue.written("@file.json"), "@file.json")
        self.assertEqual(str(catalogue.differences("python:mine", "knorm")[0]), "retention: python:mine or knorm")
        self.assertEqual(catalogue.kind("python:mine + python:simulated:signs"), "both")

    def test_every_option_with_auto_is_understood(self):
        """Or is a number that the policy finds by itself: named here, so that a new one is looked at."""
        listed = json.loads(
            subprocess.run([BUILD / "tools" / "vlm-kv", "list", "--json"], capture_output=True, text=True).stdout
        )
        unknown = {
            (policy["name"], option["key"])
            for policy in listed["policies"]
            for option in policy["options"]
            if option["default"] == "auto"
            and not factors.AUTO_BESIDE.search(option["help"])
            and not (
                (match := factors.AUTO_OF_KEY.search(option["help"]))
                and match[1] in {other["key"] for other in policy["options"]}
            )
        }
        self.assertEqual(
            unknown,
            {
                ("asymkv", "key_layers"),
                ("xquant", "km"),
                ("xquant", "kq"),
                ("xquant", "vm"),
                ("xquant", "vq"),
                ("prefixkv", "mode"),
                ("turboquant", "rotate"),
            },
        )


if __name__ == "__main__":
    unittest.main()
