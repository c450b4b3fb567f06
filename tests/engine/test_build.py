from __future__ import annotations

import pytest

from loramux.engine.build import text_stream
from loramux.grammar.types import Constraint
from tests.engine.symbolic import make_request
from tests.engine.test_detokenize import byte_fallback, ids_of


@pytest.mark.parametrize(("constrained", "expected"), [(False, "the the"), (True, " the the")])
def test_a_choice_has_its_requests_rules_for_text(constrained: bool, expected: str) -> None:
    """The stop string of the second token is text, that of the third ends it; a grammar's first space is kept without a prompt's text."""
    tokenizer = byte_fallback()
    start, word = ids_of(tokenizer, "<s>", "▁the")
    constraint = Constraint("regex", " the the the") if constrained else None
    text = text_stream(tokenizer, make_request("r", [start], stop=("the",), min_tokens=2, constraint=constraint))
    pieces = [text.push((word,)) for _ in range(3)]
    assert "".join(piece.text for piece in pieces) == expected + " "
    assert pieces[-1].stop_string == "the"
    assert text_stream(tokenizer, make_request("r", [word])).push((word,)).text == " the"
