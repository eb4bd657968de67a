"""Public running text: LAMBADA's passages and their last words, WikiText-2 by article or as a whole."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

from quanteval.tasks.loading import Row
from quanteval.tasks.public.reading import need, read_rows, read_text

RAW = (".raw", ".txt", ".tokens")
WIKITEXT = "WikiText-2, CC-BY-SA-3.0 and GFDL (Wikipedia)"


def lambada(
    path: str | None = None,
    hub: str = "EleutherAI/lambada_openai",
    name: str = "default",
    split: str = "test",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield LAMBADA's passages (Paperno et al., 2016), split before their last word.

    Reads {text}, or {context, continuation}.
    """
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "continuation" in row:
            context = str(need(row, "context", number, "LAMBADA"))
            target = str(row["continuation"]).removeprefix(" ")
        else:
            context, _, target = str(need(row, "text", number, "LAMBADA")).rpartition(" ")
        yield {
            "id": str(number),
            "context": context,
            "target": target,
            "origin": "LAMBADA, CC-BY-4.0; OpenAI's split, MIT",
        }


def wikitext2(
    path: str | None = None,
    hub: str = "EleutherAI/wikitext_document_level",
    name: str = "wikitext-2-raw-v1",
    split: str = "test",
    revision: str | None = None,
    whole: bool = False,
) -> Iterator[Row]:
    """Yield WikiText-2 (Merity et al., 2016) by article, or as one document with `whole`.

    `page` is the text as published, on which words and bytes are counted; `text` is what is scored. By article,
    as lm-evaluation-harness has it, that is the page with the set's spaced punctuation undone. As a whole, as
    llama.cpp reads it, it is the file without its last line break. A `path` may be the raw file.
    """
    if path is not None and (file := _raw_file(Path(path), split)):
        # Copies with the line ends of another system are the same text.
        raw = io.StringIO(read_text(file), newline=None).read()
        pages = list(articles(raw))
    else:
        rows = read_rows(path, hub, name, split, revision)
        pages = [str(need(row, "page", i, "WikiText-2")) for i, row in enumerate(rows)]
        raw = "\n".join(pages)
    if whole:
        yield {
            "id": "whole",
            "text": raw.removesuffix("\n"),
            "page": raw,
            "origin": WIKITEXT,
        }
        return
    for number, page in enumerate(pages):
        yield {
            "id": str(number),
            "text": undo_spacing(page),
            "page": page,
            "title": _title(page),
            "origin": WIKITEXT,
        }


def _raw_file(path: Path, split: str) -> Path | None:
    """Return the raw text meant by a file or a folder, the untokenized one first; None where it holds rows."""
    if path.is_file():
        return path if path.suffix in RAW else None
    short = "valid" if split == "validation" else split
    for pattern in (f"*.{short}.raw", f"{short}.raw", f"{short}.txt", f"*.{short}.tokens"):
        if found := sorted(path.rglob(pattern)):
            return found[0]
    return None


def articles(text: str) -> Iterator[str]:
    """Yield the articles of a raw file: each begins at a heading of the first level, '= Title ='."""
    lines: list[str] = []
    for line in text.split("\n"):
        mark = line.replace("= = =", "===").replace("= =", "==").strip()
        if mark.startswith("= ") and mark.endswith(" ="):
            if (page := "\n".join(lines)).strip():
                yield page
            lines = []
        lines.append(line)
    if (page := "\n".join(lines)).strip():
        yield page


def _title(page: str) -> str:
    return page.strip().split("\n", 1)[0].strip("= ")


# In this order, since some undo what others make: lm-evaluation-harness's wikitext_detokenizer, so that
# perplexities can be compared with its own; one of its rules, which matches nowhere in the set, is left out.
SPACING: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", r"\n"),
    (r"\n ", r"\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def undo_spacing(page: str) -> str:
    """Return a page with its punctuation set as in ordinary text."""
    for pattern, instead in SPACING:
        page = re.sub(pattern, instead, page)
    return page
