"""The process that reads a PDF: the document on standard input, the text of its pages as JSON on standard output.

Only pdfium is loaded, after memory and files are limited, and a crash ends this process alone.
"""

import contextlib
import json
import sys
from typing import Any


def main(settings: str) -> None:
    """Read the document within the given limits, and write the answer."""
    limits = json.loads(settings)
    _limit_process(limits["most_memory"], limits["most_seconds"])
    sys.stdout.write(json.dumps(_answer(sys.stdin.buffer.read(), limits)))


def _limit_process(memory: int, seconds: float) -> None:
    try:
        import resource
    except ImportError:
        # Windows has no such limits; the time is limited by the parent.
        return
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(what)[1]
        # macOS refuses some of them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _answer(data: bytes, limits: dict[str, Any]) -> dict[str, Any]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
        if len(document) > limits["most_pages"]:
            return {"rule": "PDF pages", "detail": f"{len(document):,} > {limits['most_pages']:,}"}
        pages, characters = [], 0
        for number in range(len(document)):
            page = document[number]
            text_page = page.get_textpage()
            characters += text_page.count_chars()
            if characters > limits["most_characters"]:
                return {"rule": "PDF characters", "detail": f"more than {limits['most_characters']:,}"}
            pages.append(text_page.get_text_range())
            text_page.close()
            page.close()
        return {"pages": pages, "title": document.get_metadata_value("Title")[:500]}
    except MemoryError:
        return {"rule": "PDF memory", "detail": f"more than {limits['most_memory']:,} bytes"}
    except (pypdfium2.PdfiumError, ValueError, IndexError) as error:
        return {"rule": "unreadable PDF", "detail": str(error)[:200]}
