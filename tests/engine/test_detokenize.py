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


def stream(tokenizer: Tokenizer, ids: list[int], rng: random.Random, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """The pieces of a random split, and the stop string."""
    text, pieces, rest = TextStream(tokenizer, stop), [], list(ids)
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


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """From the definition: the least end, then the longest."""
    for end in range(len(text) + 1):
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
