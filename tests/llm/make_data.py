#!/usr/bin/env python3
"""Makes tests/llm/data: tiny tokenizers trained here, and what the reference libraries give for them.

    python tests/llm/make_data.py

Needs tokenizers, sentencepiece and transformers. The released vocabularies are not redistributable,
so these are small stand-ins with the same pipelines: what is tested is the pipeline, not the words.
"""

import json
import pathlib
import random
import tempfile
import unicodedata

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as spm_proto
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

OUT = pathlib.Path(__file__).parent / "data"
SPACE = "\u2581"

CORPUS = """\
This is a test. I was born in 1992, and this is false. Hello there, how are you doing today?
USER: What is shown in this image? ASSISTANT: The image shows a red square and a blue circle.
A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful,
detailed, and polite answers to the user's questions. You are a helpful assistant.
Two small cats, one big dog; there is a green triangle in the upper left corner (see below).
    def main(args):\n        return [x for x in range(10) if x % 2 == 0]\n
Übergrößenträger naïve café señor garçon Čeština žluťoučký kůň falsé
Привет, как дела? Это проверка. Сегодня хорошая погода.
生活的真谛是 你好世界 这是一个测试。图片里有什么？
これはテストです。こんにちは世界。
안녕하세요 세계 이것은 시험입니다
مرحبا بالعالم هذا اختبار
नमस्ते दुनिया यह एक परीक्षण है
he said "it's", "they're", "we've", "I'm", "you'll", "he'd" and 'IT'S', 100 200 3000 45678
""".split("\n") * 4

TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "a",
    "Hello",
    " Hello",
    "  Hello",
    "Hello ",
    "Hello  ",
    "Hello this is a test",
    "This is a test \U0001f60a",
    "I was born in 92000, and this is falsé.",
    "生活的真谛是",
    "Hi  Hello",
    "Hi   Hello",
    "<s>",
    "hi<s>there",
    "hi <s> there",
    "</s>",
    "Hello <s>.",
    "<s> Hello</s>",
    "<unk>x<unk>",
    "The following string should be properly encoded: Hello.",
    "But ird and ปี   ird   ด",
    "Hey how are you doing",
    "USER: <image>\nWhat is shown in this image? ASSISTANT:",
    "<image><image>\n<image> x",
    "<image>",
    " <image> ",
    "<pad><image><pad>",
    "<ima<image>ge>",
    "<image",
    "image>",
    "<0x41>",
    "<0x0A>",
    "\u2581",
    "\u2581Hello",
    " \u2581 Hello\u2581\u2581world",
    "line one\nline two\r\nline three\rline four",
    "tabs\tand\t\tmore\n\n\nblank  \n  lines \n",
    "   \n   x",
    "x   \r\n\r\n   y",
    "it's they're we've I'm you'll he'd IT'S THEY'RE We'Ve 'tis '' 's'",
    "don't can't won\u2019t",
    "123456789 0 12 123 1234 ½ ² Ⅷ ٣٤٥ ๓",
    "a1b22c333d4444",
    "!!! ... --- ??? @#$%^&*() []{}|\\/~`",
    " !x ?\n\n!",
    "e\u0301 é E\u0301\u0323 \u1e69 s\u0323\u0307 s\u0307\u0323 \u212b \u2126",
    "\uac00 \u1100\u1161 \u1100\u1161\u11a8 한국어",
    "\u0958 \u0915\u093c \ufb1d",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "Привет, мир!",
    "これはテストです。",
    "Ünïcödé NAÏVE Straße",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "\U0001f60a\U0001f60a\U0001f60a",
    "\u00a0x\u2003y\u3000z\u200b\u2028w\u0085v",
    "\u180ex \u180e\u180e a\u180e\n",
    "\ufeffbom",
    "\x00\x01\x7f",
    "a\x00b",
    "\ud7ff\ue000\ufffd\uffff\U0010ffff",
    "a" * 300,
    " " * 257,
    "\n" * 130,
    "ab" * 200,
    "é" * 100,
    "=" * 64 + "\n" + "-" * 63,
    " x" * 90,
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>What?<|im_end|>\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>  <|im_end|>",
    "<|endoftext|",
    "<|begin_of_text|>Hello<|eot_id|>",
    "keep  <left>  text  <right>  text  <both>  text",
    "word one <word> two xwordy word. _word word1 wörd \u0301word",
    "Norm norm NORM caf\u00e9token cafe\u0301token x",
]
# The text of transformers' common test of tokenizers, line by line. Its ids belong to released
# vocabularies, which are not here; the text is still a good one.
TEXTS.append("\n".join([
    "This is a test \U0001f60a", "I was born in 92000, and this is falsé.", "生活的真谛是",
    "Hi  Hello", "Hi   Hello", "", " ", "  ", " Hello", "<s>", "hi<s>there",
    "The following string should be properly encoded: Hello.", "But ird and ปี   ird   ด",
    "Hey how are you doing"
]))

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


WORDS = """\
hello World teST café naïve Übergröße señor ÇELİK ſtraße ﬁnance ǅungla Ελληνικά ΣΊΣΥΦΟΣ Привет ЁЖИК Україна мир ქართული
Հայերեն שָׁלוֹם עִבְרִית مرحبا اَلْعَرَبِيَّة فارسی اردو हिन्दी नमस्ते বাংলা ગુજરાતી ਪੰਜਾਬੀ தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල ไทยสวัสดี ປະເທດລາວ
བོད་སྐད မြန်မာ ភាសាខ្មែរ አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ᐃᓄᒃᑎᑐᑦ 中文測試 生活的真谛 日本語テスト ひらがな カタカナ ｶﾀｶﾅ ㍿ 한국어 안녕하세요 한글 𠀀𠀁 𝒳𝟙𝟚 Ⅷ ½ ² ① ٣٤٥ १२३ ๑๒๓ １２３
😊 👍🏽 👩\u200d🚀 👨\u200d👩\u200d👧\u200d👦 🇫🇷🇯🇵 ❤\ufe0f 1\ufe0f\u20e3 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f ← ∑ ≠ ░▒▓ ♞ € ₹ ™ © … – — “quoted” «guillemets»
don't IT'S we'Ll they'RE I'd 'twas rock'n'roll x'y it’s 'S 's 'ſ 3.14159 1,000,000 2024-01-31 0x1F 1e-9 v2.10.3 12345678 007 $9.99 50%
foo_bar camelCase HTTPServer snake__case --flag a+b=c if(x){return;} //comment /*c*/ #include<io> <div class="a"> https://ex.ample/p?q=1&r=%20 me@ex.ample \\n C:\\dir""".split()
SPACES = [" ", " ", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\r", "\v", "\f", "\x85", "\u00a0",
          "\u1680", "\u2000", "\u2009", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff",
          "\u2060", "\u180e", ""]
MARKS = "\u0300\u0301\u0302\u0308\u030a\u0323\u0327\u0328\u0338\u0345\u05b0\u064e\u093c\u0e48\u20dd\u3099\u309a"
COMPOSED = ("\u212b\u2126\u1e9b\u0323\u0958\u09dc\u0fb2\u0f71\u0f80\u0344\u0374\u037e\u0387\u2000\ufb1d\ufb2a\u2adc"
            "\uf900\U0002f800\u1100\u1161\u11a8\uac00\u11a7\u11a8\u0041\u030a\u1e63\u0307\u1fed")
SPECIALS = ["<s>", "</s>", "<unk>", "<image>", "<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>",
            "<|vision_start|>", "<|begin_of_text|>", "<|eot_id|>", "<s", "s>", "<|im_", "|>", "<0x0A>", "\u2581", "\u0120"]


def strings(count=2000):
    """Texts in many scripts, with odd spaces, marks in every form, controls, specials and runs."""
    draw = random.Random(20)
    assigned = [chr(c) for c in range(0x20, 0x2fa20) if not 0xd800 <= c < 0xe000
                and unicodedata.category(chr(c)) not in ("Cn", "Co")]
    word = lambda: draw.choice(WORDS)
    space = lambda: draw.choice(SPACES)
    marked = lambda: draw.choice("aeoACzσи가カक") + "".join(draw.choices(MARKS, k=draw.randint(1, 3)))
    control = lambda: chr(draw.choice([*range(0x20), *range(0x7f, 0xa0), 0x200d, 0x202e, 0xfffd, 0xfffe, 0xe000]))
    run = lambda: draw.choice(["a", " ", "\n", "1", "!", "あ", "é", "'", "😊", "\t", "ab", " a", "=-", "\r\n"]) * draw.choice(
        [3, 7, 16, 17, 33, 64])
    pieces = [(word, 40), (space, 34), (marked, 5), (control, 2), (run, 2),
              (lambda: draw.choice(SPECIALS), 6), (lambda: draw.choice(COMPOSED), 4),
              (lambda: draw.choice(assigned), 5), (lambda: str(draw.randint(0, 10**draw.randint(1, 9))), 4)]
    makers, weights = zip(*pieces)
    texts = [""] + [c * n for c in ("a", " ", "\n", "生", "!", "7", "\u0301", "👩\u200d🚀", "<s>", "ab ") for n in (200, 400)]
    seen = set(texts)
    while len(texts) < count:
        text = "".join(make() for make in draw.choices(makers, weights, k=draw.randint(1, 9)))
        form = draw.choice(["NFC", "NFD", None, None])
        text = unicodedata.normalize(form, text) if form else text
        if text not in seen:
            seen.add(text)
            texts.append(text)
    return texts


STRINGS = strings()


def dump_strings(name, encode):
    """Ids of every string: a line each, so that a difference is seen."""
    lines = ",\n".join(json.dumps(encode(text), separators=(",", ":")) for text in STRINGS)
    (OUT / f"{name}.strings.json").write_text("[\n" + lines + "\n]\n", encoding="utf-8")


def dump(name, value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (OUT / name).write_text(text + "\n", encoding="utf-8")


def string_merges(tokenizer):
    """The pipeline as JSON, with merges in the older spelling."""
    value = json.loads(tokenizer.to_str())
    value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
    return value


def cases_of(tokenizer):
    """What the tokenizers library gives."""
    cases = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({
            "text": text, "ids": ids, "plain": plain,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            "skipped": tokenizer.decode(ids, skip_special_tokens=True),
        })
    return cases


def decodes_of(decode, size):
    """Ids in orders no encoder makes: broken byte runs, out of range, specials anywhere."""
    state = 12345
    cases = []
    for length in list(range(0, 12)) * 3 + [40, 80]:
        ids = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            pick = state >> 8
            ids.append(pick % size if pick % 3 else pick % 300)
        cases.append({"ids": ids, "decoded": decode(ids, False), "skipped": decode(ids, True)})
    return cases


def save(name, tokenizer, value=None, reference=None):
    """Writes the pipeline and its goldens; with `reference`, a class of transformers that is built
    from the pipeline, also the ids of the 2,000 strings."""
    value = value or json.loads(tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps(value))
    dump(f"{name}.tokenizer.json", value)
    if reference is not None:
        library = reference(tokenizer)
        for text in STRINGS:
            assert library(text)["input_ids"] == tokenizer.encode(text).ids, text
        dump_strings(name, lambda text: tokenizer.encode(text).ids)
    size = tokenizer.get_vocab_size()
    dump(f"{name}.golden.json", {
        "cases": cases_of(tokenizer),
        "decodes": decodes_of(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip),
                              size + 5),
    })


def train_sentencepiece(add_dummy_prefix=True):
    with tempfile.TemporaryDirectory() as folder:
        corpus = pathlib.Path(folder) / "corpus.txt"
        corpus.write_text("\n".join(CORPUS), encoding="utf-8")
        spm.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=f"{folder}/llama", model_type="bpe", vocab_size=700,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            split_digits=True, allow_whitespace_only_pieces=True, character_coverage=0.98,
            add_dummy_prefix=add_dummy_prefix, minloglevel=2, num_threads=1)
        proto = spm_proto.ModelProto.FromString((pathlib.Path(folder) / "llama.model").read_bytes())
    proto.trainer_spec.input[:] = []
    proto.trainer_spec.model_prefix = ""
    return proto


def merges_of(proto):
    """Every split of every piece into two pieces, by the piece's rank, as transformers makes merges of a
    sentencepiece model."""
    pieces = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = []
    for piece, rank in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces and proto.pieces[rank].type == 1:
                merges.append((-proto.pieces[rank].score, cut, left, right))
    return pieces, [(left, right) for _, _, left, right in sorted(merges)]


def llama_json(proto, metaspace):
    pieces, merges = merges_of(proto)
    tokenizer = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True)
                                  for t in ("<unk>", "<s>", "</s>", "<image>", "<pad>")])
    return tokenizer


def sentencepiece_goldens(proto, legacy, name):
    """The slow LlamaTokenizer, on top of the library's sentencepiece backend."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.model"
        path.write_bytes(proto.SerializeToString())
        slow = SentencePieceBackend(
            vocab_file=str(path), legacy=legacy, unk_token="<unk>", bos_token="<s>",
            eos_token="</s>",
            extra_special_tokens=[AddedToken("<image>", special=True, normalized=False),
                                  AddedToken("<pad>", special=True, normalized=False)])
    specials = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
    assert [slow.convert_tokens_to_ids(t) for t in specials] == [0, 1, 2, 700, 701]

    def encode(text):
        if legacy or not text:
            tokens = slow.tokenize(text)
        else:
            tokens = slow.tokenize(SPACE + text.replace(SPACE, " "))
            if len(tokens) > 1 and tokens[0] == SPACE and tokens[1] in specials:
                tokens = tokens[1:]
        return slow.convert_tokens_to_ids(tokens)

    def decode(ids, skip):
        text, run, first = "", [], True

        def flush():
            nonlocal text, run, first
            if not run:
                return
            pieces = [slow.sp_model.IdToPiece(i) for i in run]
            part = slow.sp_model.decode_pieces(pieces)
            # The slow class cuts the piece, not the text; a cut piece that is no piece then shows
            # its U+2581, which nobody can want.
            text += part[1:] if first and not legacy and pieces[0].startswith(SPACE) else part
            run, first = [], False

        for i in ids:
            if not 0 <= i < 702:
                continue
            token = slow.convert_ids_to_tokens(i)
            if token in specials:
                if skip:
                    continue
                flush()
                text += token
                first = False
            else:
                run.append(i)
        flush()
        return text

    cases = []
    for text in TEXTS:
        plain = encode(text)
        ids = [1] + plain
        cases.append({"text": text, "ids": ids, "plain": plain, "decoded": decode(ids, False),
                      "skipped": decode(ids, True)})
    dump_strings(name, lambda text: [1] + encode(text))
    dump(f"{name}.golden.json", {"cases": cases, "decodes": decodes_of(decode, 705)})


def byte_level(regex, nfc, ignore_merges, specials, bos=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=700, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    byte_processor = processors.ByteLevel(trim_offsets=False)
    if bos is None:
        tokenizer.post_processor = byte_processor
    else:
        tokenizer.post_processor = processors.Sequence([byte_processor, processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    return tokenizer


def with_digits(individual):
    """SmolLM2 and StarCoder2: numbers are cut off before GPT-2's expression."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=individual),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def odd_corners(proto):
    """What no released file has all at once: every flag of an added token, Metaspace that splits,
    the default byte-level expression, no decoder."""
    pieces, merges = merges_of(proto)
    tokenizer = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\t", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=True)
    tokenizer.decoder = decoders.Metaspace(SPACE, "always", split=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.add_tokens([
        AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("word", single_word=True, normalized=False),
        AddedToken("<im", normalized=False), AddedToken("<image>", normalized=False),
        AddedToken("caf\u00e9token", normalized=True), AddedToken("norm", normalized=True)])
    save("odd", tokenizer)

    gpt2 = Tokenizer(models.BPE())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    gpt2.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=400, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    save("no_decoder", gpt2, string_merges(gpt2))


def main():
    OUT.mkdir(exist_ok=True)
    proto = train_sentencepiece()
    (OUT / "llama.tokenizer.model").write_bytes(proto.SerializeToString())
    dump("strings.json", STRINGS)
    sentencepiece_goldens(proto, True, "sentencepiece_legacy")
    sentencepiece_goldens(proto, False, "sentencepiece")
    # InternLM2: cut at special tokens like the legacy one, and nothing put before a piece.
    internlm2 = train_sentencepiece(add_dummy_prefix=False)
    (OUT / "internlm2.tokenizer.model").write_bytes(internlm2.SerializeToString())
    sentencepiece_goldens(internlm2, True, "internlm2")
    fast = lambda tokenizer: PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    legacy = llama_json(proto, metaspace=False)
    save("llama_legacy", legacy, string_merges(legacy), fast)
    same = OUT / "sentencepiece_legacy.strings.json"  # the test reads llama_legacy's instead
    assert same.read_bytes() == (OUT / "llama_legacy.strings.json").read_bytes()
    same.unlink()
    save("llama_metaspace", llama_json(proto, metaspace=True), None, fast)
    save("qwen2", byte_level(QWEN2, True, False, [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
        "<|image_pad|>"]), None, fast)
    save("llama3", byte_level(LLAMA3, False, True, ["<|begin_of_text|>", "<|eot_id|>", "<image>"],
                              bos="<|begin_of_text|>"), None, fast)
    save("digits", with_digits(True), None, fast)
    save("numbers", with_digits(False))
    odd_corners(proto)
    print(sum(f.stat().st_size for f in OUT.iterdir()), "bytes")


if __name__ == "__main__":
    main()
