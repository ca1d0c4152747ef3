"""tools/eval/groups.py and comparison.py: what may be compared, and what an interval decides."""

import math
import os
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eval_made import CATALOGUE, ROOT, needs_numpy, result  # noqa: E402

import claims  # noqa: E402
import comparison  # noqa: E402
import factors  # noqa: E402
import metrics  # noqa: E402
from claims import Claim  # noqa: E402
from comparison import CONFIRMED, CONTRADICTED, INCONCLUSIVE, Verdict, compare, decide  # noqa: E402
from errors import EvaluationError  # noqa: E402
from runs import Programs  # noqa: E402
from groups import Estimate, Group, NotComparable  # noqa: E402
from significance import Interval, McNemar  # noqa: E402

BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build" / "release"))
GOOD, BAD = [0.9, 0.8, 1.0, 0.95] * 6, [0.4, 0.5, 0.3, 0.45] * 6
ABOVE, BELOW = Interval(0.1, 0.2), Interval(-0.2, -0.1)


def group(*results, **options):
    return Group(list(results), **({"resamples": 500} | options))


class Decide(unittest.TestCase):
    """By the interval of a - b and by what both store."""

    def test_at_equal_bytes_the_interval_decides(self):
        for apart, word in ((ABOVE, CONFIRMED), (BELOW, CONTRADICTED), (Interval(-0.1, 0.1), INCONCLUSIVE)):
            self.assertEqual(decide(apart, 4.0, 4.0).word, word)

    def test_an_interval_that_touches_0_decides_nothing(self):
        for apart in (Interval(0.0, 0.2), Interval(-0.2, 0.0), Interval(0.0, 0.0)):
            self.assertEqual(decide(apart, 4.0, 4.0), Verdict(INCONCLUSIVE, "the interval contains 0"))

    def test_better_with_more_bytes_decides_nothing(self):
        self.assertEqual(decide(ABOVE, 4.2, 4.0), Verdict(INCONCLUSIVE, "the better one stores 5.0 % more bytes"))
        self.assertEqual(decide(BELOW, 4.0, 4.2), Verdict(INCONCLUSIVE, "the better one stores 5.0 % more bytes"))
        self.assertEqual(decide(ABOVE, 4.08, 4.0), Verdict(CONFIRMED))  # the tolerance, 2 %
        self.assertEqual(decide(ABOVE, 4.081, 4.0).word, INCONCLUSIVE)

    def test_better_with_fewer_bytes_is_better(self):
        self.assertEqual(decide(ABOVE, 3.0, 4.0), Verdict(CONFIRMED, "the better one stores 25.0 % fewer bytes"))
        self.assertEqual(decide(BELOW, 4.0, 3.0).word, CONTRADICTED)

    def test_what_was_not_measured_decides_nothing(self):
        self.assertEqual(decide(ABOVE, None, 4.0), Verdict(INCONCLUSIVE, "stored bits were not measured"))
        self.assertEqual(decide(None, 4.0, 4.0), Verdict(INCONCLUSIVE, "the score has no interval"))

    def test_comparable_is_within_the_margin(self):
        def about(low, high, bits=4.0):
            return comparison.decide_comparable(Interval(low, high), 0.02, bits, 4.0).word

        self.assertEqual(
            [about(-0.02, 0.02), about(-0.01, 0.03), about(0.03, 0.05), about(-0.05, -0.03)],
            [CONFIRMED, INCONCLUSIVE, CONTRADICTED, CONTRADICTED],
        )
        self.assertEqual(about(0.0, 0.0, bits=5.0), INCONCLUSIVE)

    def test_draws_have_to_agree(self):
        holds, fewer, other = (
            Verdict(CONFIRMED),
            Verdict(CONFIRMED, "with 9.0 % fewer bytes"),
            Verdict(INCONCLUSIVE, "the interval contains 0"),
        )
        self.assertEqual(comparison.judge([holds, fewer]), Verdict(CONFIRMED, "with 9.0 % fewer bytes"))
        self.assertEqual(
            comparison.judge([holds, other]),
            Verdict(INCONCLUSIVE, "against draw 0: confirmed; against draw 1: inconclusive: the interval contains 0"),
        )


class Pairing(unittest.TestCase):
    """Which results are one group."""

    def refused(self, words, *results):
        with self.assertRaisesRegex(NotComparable, words):
            group(*results)

    def test_settings_do_not_mix(self):
        for name in ("model", "task", "split", "protocol"):
            with self.subTest(name):
                self.refused("other.*not one setting", result("f16", GOOD), result("int4", GOOD, **{name: "other"}))
        self.refused("no results")

    def test_the_first_record_that_differs_is_named(self):
        self.refused(
            "'r23' is a record of 'f16' and not of 'int4'.*pocket-llava / documents",
            result("f16", GOOD),
            result("int4", GOOD[:-1]),
        )
        self.refused("'r23' is a record of 'int4' and not of 'f16'", result("f16", GOOD[:-1]), result("int4", GOOD))

    def test_a_spec_is_there_once(self):
        self.refused(
            "'kivi,residual=32,bits=1' is there twice|'kivi,bits=1,residual=32' is there twice",
            result("kivi,bits=1,residual=32", GOOD),
            result("kivi,residual=32,bits=1", GOOD),
        )

    def test_clusters_are_the_same_and_complete(self):
        clusters = {f"r{i:02}": f"video {i // 6}" for i in range(24)}
        self.refused("other clusters", result("f16", GOOD, clusters=clusters), result("int4", GOOD))
        clusters.pop("r05")
        self.refused("'r05' is in no cluster", result("f16", GOOD, clusters=clusters))

    @needs_numpy
    def test_answers_of_another_program_have_no_spec(self):
        made = group(result("-", GOOD, bits=None), result("@policy.json", BAD, bits=None))
        self.assertEqual(made.find("-").spec, "-")
        self.assertIsNone(made.find("f16"))

    def test_it_is_one_sentence_for_main(self):
        self.assertTrue(issubclass(NotComparable, EvaluationError))


@needs_numpy
class Scores(unittest.TestCase):
    def test_interval_and_difference_are_of_the_same_records(self):
        made = group(result("f16", GOOD), result("int4", [x - 0.25 for x in GOOD]))
        a, b = made.plain, made.find("int4")
        apart = made.difference(a, b, "ANLS")
        self.assertAlmostEqual(apart.value, 0.25)
        self.assertAlmostEqual(apart.interval.low, 0.25)
        self.assertAlmostEqual(apart.interval.high, 0.25)
        alone = made.estimate(a, "ANLS")
        self.assertTrue(alone.interval.low < alone.value < alone.interval.high)

    def test_clusters_change_the_interval(self):
        values = ([1.0] * 6 + [0.0] * 6) * 6

        def width(clusters):
            found = group(result("f16", values, clusters=clusters), resamples=2000)
            ends = found.estimate(found.plain, "ANLS").interval
            return ends.high - ends.low

        self.assertGreater(width({f"r{i:02}": f"video {i // 6}" for i in range(72)}), 1.8 * width(None))

    def test_a_few_records_or_clusters_have_no_interval(self):
        made = group(result("f16", GOOD[:9]))
        self.assertEqual(made.estimate(made.plain, "ANLS").interval, None)
        made = group(result("f16", GOOD, clusters={f"r{i:02}": f"video {i // 3}" for i in range(24)}))
        self.assertEqual(made.estimate(made.plain, "ANLS").interval, None)
        made = group(result("f16", GOOD[:10]))
        self.assertIsNotNone(made.estimate(made.plain, "ANLS").interval)

    def test_a_score_that_is_no_mean_has_no_interval(self):
        made = result("f16", GOOD)
        made.scores["BLEU-4"] = 0.31
        for item in made.items.values():
            item["BLEU-4"] = 0.5
        made = group(made)
        self.assertEqual(made.estimate(made.plain, "BLEU-4"), Estimate(0.31, None))
        self.assertFalse(made.has_interval("BLEU-4"))
        self.assertTrue(made.has_interval("ANLS"))

    def test_perplexity_is_of_all_tokens_and_less_is_better(self):
        def forced(spec, nll):
            made = result(spec, [1.0] * 10, metric="nll")
            for i, item in enumerate(made.items.values()):
                item |= {"tokens": 10.0 + i, "nll": nll * (10.0 + i)}
            made.scores = {"perplexity": math.exp(nll)}
            return made

        made = group(forced("f16", 0.5), forced("int4", 0.75))
        found = made.estimate(made.plain, "perplexity")
        self.assertAlmostEqual(found.interval.low, math.exp(0.5))
        apart = made.difference(made.plain, made.find("int4"), "perplexity")
        self.assertAlmostEqual(apart.value, math.exp(0.75) - math.exp(0.5))
        self.assertGreater(apart.interval.low, 0)

    def test_forced_text_has_intervals_over_its_own_records_and_decides_nothing(self):
        def forced(spec, values, kl):
            made = result(spec, values, metric="facts")
            some = list(made.items.values())[:12]  # of 24
            for i, item in enumerate(some):
                item |= {"KL": kl * (1 + i % 3), "top1": 1 - kl, "nll": (1 + kl) * (10 + i), "tokens": 10 + i}
            tokens = sum(item["tokens"] for item in some)
            made.kl = sum(item["KL"] * item["tokens"] for item in some) / tokens
            made.top1 = 1 - kl
            return made

        # The better answers come with the worse forced text.
        made = group(forced("f16", GOOD, 0.4), forced("int4", BAD, 0.1))
        found = made.forced(made.plain)
        self.assertEqual(set(found), {"KL", "top1", "perplexity"})
        self.assertEqual((found["KL"].value, found["top1"].value), (made.plain.kl, 0.6))
        self.assertTrue(0.4 <= found["KL"].interval.low < made.plain.kl < found["KL"].interval.high <= 1.2)
        self.assertAlmostEqual(found["perplexity"].value, math.exp(1.4))
        self.assertAlmostEqual(found["perplexity"].interval.low, math.exp(1.4))
        self.assertEqual(made.scores, ["facts"])
        for x in made.results:  # fidelity.py tells perplexity among the scores
            x.scores["perplexity"] = made.forced(x)["perplexity"].value
        made = group(*made.results)
        self.assertEqual((made.primary, made.has_interval("perplexity")), ("facts", True))
        weighed = compare(made, made.plain, made.find("int4"), CATALOGUE)
        self.assertEqual((weighed.verdict, weighed.others), (Verdict(CONFIRMED), {}))
        self.assertIsNone(metrics.primary(["perplexity"]))

    def test_forced_text_of_too_few_records_has_no_interval(self):
        made = result("f16", GOOD)
        for item in list(made.items.values())[:9]:
            item |= {"KL": 0.5, "top1": 1.0, "nll": 20.0, "tokens": 10}
        made.kl, made.top1 = 0.5, 1.0
        found = group(made).forced(made)
        self.assertEqual([found[name].interval for name in ("KL", "top1", "perplexity")], [None] * 3)

    def test_a_result_without_forced_records_keeps_its_figures(self):
        found = group(result("f16", GOOD, kl=0.25, top1=0.5))
        self.assertEqual(found.forced(found.plain), {"KL": Estimate(0.25, None), "top1": Estimate(0.5, None)})

    def test_scores_that_some_lack_are_left_out(self):
        self.assertEqual(group(result("f16", GOOD, exact=[1] * 24), result("int4", BAD)).scores, ["ANLS"])

    def test_what_decides_is_chosen_beforehand(self):
        self.assertEqual(metrics.primary(["BLEU-4", "ROUGE_L", "CIDEr"]), "CIDEr")
        self.assertEqual(metrics.primary(["exact", "CIDEr", "slots"]), "slots")
        self.assertIsNone(metrics.primary(["BLEU-1", "BLEU-4"]))
        self.assertEqual(metrics.primary(["BLEU-1"]), "BLEU-1")
        made = group(result("f16", GOOD, exact=[1] * 24), metrics_wanted=("exact",))
        self.assertEqual(made.primary, "exact")

    def test_some_of_the_records(self):
        made = group(result("f16", GOOD), result("int4", BAD))
        found = made.estimates("ANLS", ["r00", "r04"])
        self.assertEqual(found["f16"], Estimate(0.9, None))
        found = made.estimates("ANLS", made.ids[:11])
        self.assertAlmostEqual(found["f16"].value, sum(GOOD[:11]) / 11)
        self.assertTrue(found["f16"].interval.low < found["f16"].value < found["f16"].interval.high)
        self.assertEqual(set(found), {"f16", "int4"})


@needs_numpy
class Compared(unittest.TestCase):
    def test_one_factor_or_marked(self):
        made = group(result("kivi", GOOD), result("kivi,bits=1", BAD), result("kivi,bits=4,residual=32", BAD))
        one = compare(made, made.find("kivi"), made.find("kivi,bits=1"), CATALOGUE)
        self.assertTrue(one.one_factor)
        two = compare(made, made.find("kivi"), made.find("kivi,bits=4,residual=32"), CATALOGUE)
        self.assertEqual([str(x) for x in two.factors], ["bits: 2 or 4", "residual: 128 or 32"])
        self.assertFalse(two.one_factor)

    def test_what_came_out_the_same_is_said_to_be(self):
        made = group(result("f16", GOOD), result("kivi", GOOD), result("kivi,bits=1", GOOD), result("int4", BAD))
        same = compare(made, made.find("kivi"), made.find("kivi,bits=1"), CATALOGUE)
        self.assertEqual((same.verdict.word, same.verdict.reason), ("inconclusive", "no record differs"))
        self.assertEqual(compare(made, made.find("kivi"), made.find("int4"), CATALOGUE).verdict.reason, "")

    def test_budgets_that_match_bytes_are_no_factor(self):
        made = group(
            result("prefixkv,keep=0.5", GOOD), result("uniform,keep=0.55", BAD), result("prefixkv,keep=0.9", BAD)
        )
        one = compare(made, made.find("prefixkv,keep=0.5"), made.find("uniform,keep=0.55"), CATALOGUE)
        self.assertEqual([str(x) for x in one.factors], ["retention: prefixkv or uniform"])
        self.assertEqual([str(x) for x in one.matched], ["keep: 0.5 or 0.55"])
        alone = compare(made, made.find("prefixkv,keep=0.5"), made.find("prefixkv,keep=0.9"), CATALOGUE)
        self.assertEqual([str(x) for x in alone.factors], ["keep: 0.5 or 0.9"])

    def test_what_makes_two_alike_is_no_factor(self):
        made = group(result("snapkv", GOOD), result("random,evict=none,head_shared=on", BAD))
        a, b = made.find("snapkv"), made.find("random,evict=none,head_shared=on")
        self.assertFalse(compare(made, a, b, CATALOGUE).one_factor)
        self.assertTrue(compare(made, a, b, CATALOGUE, alike=("head_shared",)).one_factor)

    def test_specs_that_cannot_be_read_are_marked(self):
        made = group(result("-", GOOD), result("f16", BAD))
        found = compare(made, made.find("-"), made.plain, CATALOGUE)
        self.assertIsNone(found.factors)
        self.assertFalse(found.one_factor)

    def test_another_score_the_other_way_decides_nothing(self):
        # ANLS for the first; exact: 0 against 24 of 24.
        made = group(result("kivi", GOOD, exact=[0] * 24), result("kivi,bits=1", BAD, exact=[1] * 24))
        found = compare(made, made.find("kivi"), made.find("kivi,bits=1"), CATALOGUE)
        self.assertEqual(found.verdict, Verdict(INCONCLUSIVE, "ANLS for it, exact the other way"))
        self.assertEqual(found.exact["exact"], McNemar(0, 24))

    def test_exactness_is_confirmed_by_its_own_test(self):
        # 5 of 24 only the first: the bootstrap's interval leaves out 0, McNemar's p is 2 / 2^5.
        made = group(
            result("kivi", [1] * 5 + [0] * 19, metric="exact"), result("kivi,bits=1", [0] * 24, metric="exact")
        )
        found = compare(made, made.find("kivi"), made.find("kivi,bits=1"), CATALOGUE)
        self.assertEqual(found.difference.interval.side, 1)
        self.assertEqual(found.verdict, Verdict(INCONCLUSIVE, "McNemar's p is 0.062"))

    def test_nothing_decides(self):
        made = group(result("kivi", GOOD, metric="BLEU-1", exact=None), result("f16", GOOD, metric="BLEU-1"))
        made.primary = None
        with self.assertRaisesRegex(NotComparable, "none of BLEU-1 decides 'documents'"):
            compare(made, made.plain, made.find("kivi"), CATALOGUE)


@needs_numpy
class Weighed(unittest.TestCase):
    CHANCE = Claim("uniform is above the random baseline", "paper", "uniform,keep=0.5", "random,keep=0.5", draws=2)

    def test_chance_is_asked_twice(self):
        made = group(
            result("uniform,keep=0.5", GOOD), result("random,keep=0.5", BAD), result("random,keep=0.5,seed=1", GOOD)
        )
        found = comparison.weigh(made, self.CHANCE, CATALOGUE)
        self.assertEqual([x.verdict.word for x in found.comparisons], [CONFIRMED, INCONCLUSIVE])
        self.assertEqual(found.verdict.word, INCONCLUSIVE)

    def test_a_claim_without_its_specs_is_left_out(self):
        made = group(result("uniform,keep=0.5", GOOD), result("random,keep=0.5", BAD))
        self.assertIsNone(comparison.weigh(made, self.CHANCE, CATALOGUE))

    def test_comparable_is_by_the_score_of_f16(self):
        claim = Claim(
            "offline is comparable", "paper", "prefixkv,mode=profile", "prefixkv,mode=online", comparable=0.02
        )
        made = [result("prefixkv,mode=profile", GOOD), result("prefixkv,mode=online", [x + 0.001 for x in GOOD])]
        self.assertIsNone(comparison.weigh(group(*made), claim, CATALOGUE))  # no f16 to take a share of
        found = comparison.weigh(group(*made, result("f16", GOOD, bits=16.0)), claim, CATALOGUE)
        self.assertEqual(found.verdict, Verdict(CONFIRMED, "within 0.0182"))

    def test_sets_of_equal_bytes(self):
        made = group(
            result("f16", GOOD, bits=16.0),
            result("kivi", GOOD, bits=4.0),
            result("kivi,bits=1", GOOD, bits=4.08),
            result("int4", GOOD, bits=4.1),
            result("kivi,bits=3", GOOD, bits=None),
        )
        self.assertEqual([[x.spec for x in found] for found in comparison.equal_bytes(made)], [["kivi", "kivi,bits=1"]])

    def test_the_frontier_is_what_nothing_beats_with_no_more_bytes(self):
        made = group(
            result("f16", GOOD, bits=16.0),
            result("kivi", BAD, bits=6.0),
            result("int4", [0.7] * 24, bits=4.5),
            result("kivi,bits=1", [0.2] * 24, bits=3.0),
            result("uniform", GOOD, bits=None),
        )
        self.assertEqual([x.spec for x in comparison.frontier(made, "ANLS")], ["kivi,bits=1", "int4", "f16"])


class Claims(unittest.TestCase):
    """The data."""

    def test_the_program_takes_every_spec(self):
        """But for budgets that only a profile has."""
        model = ROOT / "tools" / "pocket" / "pocket-llava"
        for spec in claims.specs():
            command = [BUILD / "tools" / "vlm-kv", "explain", spec, "-m", model, "--tokens", "624", "--visual", "576"]
            done = subprocess.run(command, capture_output=True, text=True)
            with self.subTest(spec):
                self.assertEqual(done.returncode, int("mode=profile" in spec), done.stderr)

    def test_one_factor_where_it_can_be_had(self):
        """A new claim that differs in more is looked at before it is named here; the report marks its row."""
        catalogue = factors.Catalogue.from_json(Programs(BUILD).policies())
        several = set()
        for claim in claims.CLAIMS:
            apart = [str(x) for x in comparison.factors_apart(claim.better, claim.worse, catalogue, claim.alike)[0]]
            self.assertTrue(apart, claim)
            if len(apart) > 1:
                several.add(claim.text)
        self.assertEqual(
            several,
            {
                claims.KEYS,
                claims.PACK,
                "CalibQuant is above KIVI on visual tokens",
                "moved end levels help (eta)",
                # The calibrated etas of both sides are those of one profile.
                "the first layer of a pair makes the codes best",
                "pairs of layers beat larger groups",
                "XQuant is above PyramidInfer",
                "a codebook for normal numbers beats equal steps on rotated keys",
                "PrefixKV is above StreamingLLM (Local)",
                "more tokens at 4 bits beat fewer at 16",
            },
        )

    def test_specs_are_written_in_one_way_and_once(self):
        for spec in claims.specs():
            self.assertEqual(spec, factors.normal(spec))
        pairs = [(claim.better, claim.worse) for claim in claims.CLAIMS]
        self.assertEqual(len(pairs), len(set(pairs)))

    def test_what_has_to_be_asked_is(self):
        texts = [claim.text for claim in claims.CLAIMS]
        self.assertEqual(texts.count("PrefixKV is above uniform budgets"), 9)
        rules = {
            "uniform",
            "PrefixKV",
            "Elastic Cache",
            "VL-Cache",
            "StreamingLLM",
            "H2O (of the prompt)",
            "SnapKV",
            "PyramidKV",
            "TOVA (of the prompt)",
            "MixKV",
            "TGV-KV",
        }
        RANDOM = " is above the random baseline"
        self.assertEqual(
            {text.removesuffix(RANDOM) for text in texts if text.endswith(RANDOM)}, rules
        )
        self.assertTrue(all(claim.draws == 2 for claim in claims.CLAIMS if claim.worse.startswith("random")))


if __name__ == "__main__":
    unittest.main()
