"""Lines about errors."""

from acmoe.errors import typed_line


def test_a_typed_line_has_the_type_and_the_first_line_that_is_not_blank() -> None:
    assert typed_line(ValueError("too wide")) == "ValueError: too wide"
    assert (
        typed_line(RuntimeError("\n  no memory left\nfree some")) == "RuntimeError: no memory left"
    )
    assert typed_line(KeyError()) == "KeyError: no message"
