from __future__ import annotations

from pathlib import Path

from loramux.engine.types import RequestEnd, TokenLogprob
from loramux.gateway.openai.responses import Choice, CompletionFormat
from loramux.gateway.tokenizer import ChatTokenizer
from tests.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def test_text_offset_counts_the_characters_of_the_text(tmp_path: Path) -> None:
    """`<s>` before the prompt and `</s>` in the answer are tokens without text."""
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, byte_level_tokenizer(bos=True)))
    echo = tokenizer.encode_echoed("the fox")
    answer = [*tokenizer.encode(" é", add_special_tokens=False), 1, *tokenizer.encode(" dog", add_special_tokens=False)]
    prompt = (None, *(TokenLogprob(token_id, -1.0, 1) for token_id in echo.token_ids[1:]))
    choices = [
        Choice(index, " é dog", [TokenLogprob(token_id, -1.0, 1) for token_id in answer], prompt if index == 0 else None, "length")
        for index in range(2)
    ]
    format = CompletionFormat("x", 0, "m", tokenizer, n=2, echoes=[echo], with_logprobs=True)
    for choice in format.whole(choices, [RequestEnd("x", "finished", 3, 0, 10)])["choices"]:
        logprobs = choice["logprobs"]
        assert choice["text"] == "the fox é dog"
        assert logprobs["tokens"] == ["<s>", "the", " fox", " ", "\ufffd", "\ufffd", "</s>", " dog"]
        assert logprobs["text_offset"] == [0, 0, 3, 7, 8, 8, 9, 9]
        assert logprobs["token_logprobs"] == [None, *[-1.0] * 7]
