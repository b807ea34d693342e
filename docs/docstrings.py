"""What the site makes of a docstring: `Example:` holds code, `Source:` is a paragraph, arXiv ids are links."""

import re
from typing import Any

from griffe import Extension, Object

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")


def _source(section: re.Match[str]) -> str:
    return f"\nSource: {' '.join(section[1].split())}\n"


class Docstrings(Extension):
    """Rewrites the headings that griffe does not know."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Changes the docstring in place, before it is parsed."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            text = re.sub(r"\nSource:\n((?: {4}.*(?:\n|$))+)", _source, text)
            text = re.sub(r"^( +`\(.*\)`): ", r"\1, ", text, flags=re.MULTILINE)  # a tuple is no type
            obj.docstring.value = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
