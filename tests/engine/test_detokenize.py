"""Streamed text against `Tokenizer.decode` of all ids, for tokenizers of each kind, random ids and random splits."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from loramux.engine.checkpoint import Checkpoint
from loramux.engine.detokenize import TextStream

TEXTS = [
    "Hello, world! How are you?",
    "naïve café — “quotes” … 10 €",
    "日本語のテキスト、한국어 и русский",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin",
    "e\u0301 combining, \ufffd itself, tab\t newline\n  two spaces",
    "ภาษาไทย नमस्ते",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Llama 2's: words with ▁, bytes as <0xNN>, one leading space taken off."""
    words = ["▁", "▁the", "the", "▁▁", "a", "b", "ing", "é", "日", "\N{REPLACEMENT CHARACTER}", "x y"]
    vocab = {token: id for id, token in enumerate(["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("▁▁", -2.0), ("a", -2.0), ("▁é", -3.0), ("日本", -3.0), ("👍", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>"])
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({word: id for id, word in enumerate(["one", "two", "three", "é"])}, unk_token="one"))


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-fallback": byte_fallback(),
    "byte-fallback, no strip": byte_fallback(strip=False),
    "metaspace": metaspace(),
    "none": no_decoder(),
}


def stream(
    tokenizer: Tokenizer, ids: list[int], rng: random.Random, stop: tuple[str, ...] = (), **options: object
) -> tuple[list[str], str | None]:
    """The pieces of a random split, and the stop string."""
    text, pieces, rest = TextStream(tokenizer, stop, **options), [], list(ids)
    while rest and not text.stop_string:
        size = rng.choice([1, 1, 1, 2, 5, 40])
        pieces.append(text.push(rest[:size]).text)
        rest = rest[size:]
    return [*pieces, text.finish()], text.stop_string


def random_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Ids at random, with short runs of byte tokens among others, valid characters and not."""
    size = tokenizer.get_vocab_size()
    ids: list[int] = []
    while len(ids) < length:
        if rng.random() < 0.4:
            ids += tokenizer.encode(rng.choice(TEXTS)[rng.randrange(20) :], add_special_tokens=False).ids[:12]
        else:
            ids += [rng.randrange(size) for _ in range(rng.randrange(1, 12))]
        ids.append(size - 1)
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_the_decoded_text(name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[name]
    ids = random_ids(tokenizer, rng, rng.choice([3, 30, 200]))
    pieces, _ = stream(tokenizer, ids, rng)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_hold_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, _ = stream(tokenizer, ids, random.Random(1))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_demo_tokenizer(demo_checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint.files_dir / "tokenizer.json"))
    rng = random.Random(3)
    for _ in range(50):
        ids = random_ids(tokenizer, rng, 60)
        assert "".join(stream(tokenizer, ids, rng)[0]) == tokenizer.decode(ids)


def test_special_tokens_give_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    end = tokenizer.token_to_id("<|end|>")
    text = TextStream(tokenizer)
    assert text.push([end]).text == ""
    assert text.push([tokenizer.token_to_id("<tool call>"), end]).text == "<tool call>"
    assert text.finish() == ""


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    single = {byte: tokenizer.token_to_id(token) for byte, token in zip(b"a\xe2\x82\xac", "aâĤ¬", strict=True)}
    text = TextStream(tokenizer)
    assert [text.push([single[byte]]).text for byte in b"a\xe2\x82\xaca"] == ["a", "", "", "€", "a"]


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_invalid_bytes_neither_stall_nor_cost_more(name: str) -> None:
    """Continuation bytes for ever: text keeps coming, and the last thousand tokens cost what the first did."""
    tokenizer = TOKENIZERS[name]
    byte = tokenizer.token_to_id("Ĥ" if name == "byte-level" else "<0x82>")
    text = TextStream(tokenizer)
    num_given, costs = 0, []
    for count in range(1, 4001):
        start = time.perf_counter()
        num_given += len(text.push([byte]).text)
        costs.append(time.perf_counter() - start)
        assert count - num_given <= 32
    assert num_given + len(text.finish()) == 4000
    assert sorted(costs[-1000:])[500] < 4 * sorted(costs[:1000])[500]


def test_a_long_run_of_byte_tokens_is_given_by_character() -> None:
    """Valid text in byte tokens only, as for a script outside the vocabulary, then a word with its space."""
    tokenizer = TOKENIZERS["byte-fallback"]
    expected = "ภาษาไทย " * 20
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in expected.encode()] + [tokenizer.token_to_id("▁the")]
    for seed in range(5):
        pieces, _ = stream(tokenizer, ids, random.Random(seed))
        assert "".join(pieces) == expected + " the" == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)
    text = TextStream(tokenizer)
    pieces = [text.push([id]).text for id in ids[:-1]]
    assert "".join(pieces) == expected
    assert max(len(piece) for piece in pieces[33:]) == 1


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


def continued(tokenizer: Tokenizer, prompt: list[int], ids: list[int], seed: int = 0, **options: object) -> str:
    """The text of a completion, which no split changes."""
    texts = {"".join(stream(tokenizer, ids, random.Random(seed + each), prompt_token_ids=prompt, **options)[0]) for each in range(4)}
    (text,) = texts
    return text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(40))
def test_a_completion_is_what_it_adds_to_the_decoded_prompt(name: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[name]
    whole = random_ids(tokenizer, rng, rng.choice([3, 30, 200]))
    text = tokenizer.decode(whole)
    run_bytes = set(ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in range(256)))) - {None}
    clean = [num for num, id in enumerate(whole, start=1) if id not in run_bytes and text.startswith(tokenizer.decode(whole[:num]))]
    num_prompt = rng.choice(clean)
    assert continued(tokenizer, whole[:num_prompt], whole[num_prompt:]) == text[len(tokenizer.decode(whole[:num_prompt])) :]


def test_the_space_before_a_word_that_continues_a_prompt_is_kept() -> None:
    for name in ("byte-fallback", "byte-fallback, no strip", "metaspace"):
        tokenizer = TOKENIZERS[name]
        prompt, completion = ids_of(tokenizer, "▁the"), ids_of(tokenizer, "▁the", "a")
        assert continued(tokenizer, prompt, completion) == " thea"
        assert continued(tokenizer, prompt, ids_of(tokenizer, "a", "▁the")) == "a the"
    tokenizer = TOKENIZERS["byte-fallback"]
    start, word = ids_of(tokenizer, "<s>"), ids_of(tokenizer, "▁the")
    assert continued(tokenizer, [*word, *ids_of(tokenizer, "</s>")], word) == " the"
    assert continued(tokenizer, start, word) == "the"
    assert continued(tokenizer, start, word, whole_start=True) == " the"


def test_an_echoed_prompt_and_its_completion_join() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    prompt, completion = ids_of(tokenizer, "▁the", "a"), ids_of(tokenizer, "▁the")
    assert "thea" + continued(tokenizer, prompt, completion) == "thea the"
    assert tokenizer.decode(prompt, skip_special_tokens=False) + continued(tokenizer, prompt, completion) == "thea the"


@pytest.mark.parametrize("whole_start", [True, False])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "byte-fallback, no strip"])
def test_a_character_that_the_prompt_left_unfinished(name: str, whole_start: bool) -> None:
    """Given whole where the completion finishes it, else not at all."""
    tokenizer = TOKENIZERS[name]
    letters = dict(zip(b"\xc3\xa9\xe2\x82\xac\xf0\x9f\x91\x8d", "Ã©âĤ¬ðŁĳį", strict=True))

    def of(*parts: str | bytes) -> list[int]:
        ids = []
        for part in parts:
            tokens = [part] if isinstance(part, str) else [letters[byte] if name == "byte-level" else f"<0x{byte:02X}>" for byte in part]
            ids += ids_of(tokenizer, *tokens)
        return ids

    for prompt, completion, expected in (
        (("a", b"\xe2\x82"), (b"\xac", "a"), "€a"),
        (("a", b"\xe2\x82"), ("a",), "a"),
        (("a", b"\xe2\x82"), (), ""),
        (("a", b"\xe2"), (b"\xc3\xa9", "a"), "éa"),
        (("a", b"\xf0"), (b"\x9f\x91\x8d",), "👍"),
        (("a", b"\xc3\xa9\xf0\x9f"), (b"\x91\x8d\xc3\xa9",), "👍é"),
        (("a", b"\xc3\xa9"), (b"\xc3\xa9",), "é"),
        (("a", b"\x82"), (b"\xc3\xa9",), "é"),
        ((b"\xe2\x82" + b"\xac\xc3\xa9" * 20,), (b"\xc3\xa9", "a"), "éa"),
        ((b"\xe2\x82",), (b"\xac",), "€"),
        (("a", b"\xe2\x82"), (b"\xac" + b"\xc3\xa9" * 40,), "€" + "é" * 40),
        (("a", b"\xe2\x82"), (b"\xc3\xa9" * 40,), "é" * 40),
    ):
        assert continued(tokenizer, of(*prompt), of(*completion), whole_start=whole_start) == expected, (prompt, completion)


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_that_a_grammar_matched_is_in_the_text(seed: int) -> None:
    """To a grammar a token is its bytes, ▁ a space: `whole_start` gives just those after any prompt."""
    rng = random.Random(seed)
    tokenizer = TOKENIZERS["byte-fallback"]
    words = ["▁", "▁the", "the", "▁▁", "a", "é", "日"]
    prompt = rng.choice([[], ["<s>"], ["<s>", "▁the"], ["a", "▁"], ["▁"], ["</s>", "日", "</s>"]])
    tokens = rng.choices(words, k=rng.randrange(1, 40))
    text = continued(tokenizer, ids_of(tokenizer, *prompt), ids_of(tokenizer, *tokens), whole_start=True)
    assert text == "".join(tokens).replace("▁", " ")


def test_a_stop_string_within_the_first_tokens_is_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = TextStream(tokenizer, ("ab", "c"), min_tokens=4)
    assert [text.push([id]) for id in ids_of(tokenizer, *"abcaba")] == [
        ("", None),
        ("ab", None),
        ("c", None),
        ("", None),
        ("", "ab"),
        ("", "ab"),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_count_from_min_tokens_on(seed: int) -> None:
    """One letter a token."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokenizer = TOKENIZERS["byte-level"]
    text = "".join(rng.choices("ab", k=rng.randrange(30)))
    stop = tuple("".join(rng.choices("ab", k=rng.choice([1, 2, 3, 4]))) for _ in range(rng.randrange(1, 4)))
    min_tokens = rng.randrange(1, 12)
    pieces, found = stream(tokenizer, ids_of(tokenizer, *text), rng, stop, min_tokens=min_tokens)
    assert ("".join(pieces), found) == first_stop(text, stop, min_tokens)


def test_finish_completes_no_stop_string_of_the_first_tokens() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    for min_tokens, expected in ((3, ("AB", None)), (2, ("", "AB"))):
        text = TextStream(tokenizer, ("AB",), min_tokens=min_tokens)
        assert text.push(ids_of(tokenizer, "a", "<0x41>", "<0x42>")) == ("a", None)
        assert (text.finish(), text.stop_string) == expected


def first_stop(text: str, stop: tuple[str, ...], num_early: int = 0) -> tuple[str, str | None]:
    """From the definition: the least end behind the early characters, then the longest."""
    for end in range(num_early + 1, len(text) + 1):
        done = [each for each in stop if text[:end].endswith(each)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokenizer = TOKENIZERS["byte-level"]
    text = "".join(rng.choices("aab€ \n", k=rng.randrange(60)))
    stop = tuple("".join(rng.choices("aab€ ", k=rng.choice([1, 2, 3, 5, 9]))) for _ in range(rng.randrange(1, 5)))
    pieces, found = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids, rng, stop)
    assert ("".join(pieces), found) == first_stop(text, stop)


def test_only_a_possible_start_of_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    id_of = {character: tokenizer.token_to_id(character) for character in "abc"}
    text = TextStream(tokenizer, ("aab", "cc"))
    assert [text.push([id_of[each]]) for each in "baacaa"] == [("b", None), ("", None), ("", None), ("aa", None), ("c", None), ("", None)]
    assert text.push([id_of["a"]]) == ("a", None)
    assert text.push([id_of["b"], id_of["c"]]) == ("", "aab")
    assert text.push([id_of["c"]]) == ("", "aab")
    assert text.finish() == ""


def test_finish_gives_what_was_held_back() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = TextStream(tokenizer, ("aab",))
    assert text.push([tokenizer.token_to_id("a"), tokenizer.token_to_id("â")]) == ("", None)
    assert text.finish() == "a\ufffd"
    assert text.stop_string is None


def test_finish_may_complete_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    text = TextStream(tokenizer, ("AB",))
    assert text.push([tokenizer.token_to_id(token) for token in ("a", "<0x41>", "<0x42>")]) == ("a", None)
    assert (text.finish(), text.stop_string) == ("", "AB")


def test_a_hostile_stop_string_costs_no_more() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = TextStream(tokenizer, ("a" * 20_000 + "b",))
    ids = [tokenizer.token_to_id("a")] * 19_999
    start = time.perf_counter()
    assert text.push(ids).text == ""
    assert len(text.push([tokenizer.token_to_id("c")]).text) == 20_000
    assert time.perf_counter() - start < 2
