"""The stage `decontaminate`: documents with questions of a task in them are dropped, as `napkin contamination` finds
them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.record import Record
from napkin.curation.stage import Dropped
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.evaluation.contamination import ItemSearch


@dataclass(frozen=True)
class Decontaminate:
    """Drop documents that hold an item of a task, whatever its case, spaces, line breaks, punctuation, HTML and the
    order of its choices.

    Items of fewer than 48 letters and digits cannot be told from other text, and are not looked for.
    """

    name: ClassVar[str] = "decontaminate"
    version: ClassVar[int] = 2
    reads: ClassVar[tuple[str, ...]] = ("tasks",)

    tasks: tuple[str, ...]
    """Files of tasks, or folders with the files of one, as `napkin evaluate --task` reads them."""
    share: float = 0.6
    """Of an item's windows of 32 letters and digits that stand together in a document, for the item to be in it."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise NapkinError("no task is named: give `tasks` files of tasks")
        if not 0 < self.share <= 1:
            raise NapkinError(f"the share of windows is {self.share:g}: use a number above 0, at most 1")

    def apply(self, record: Record) -> Record | Dropped:
        """The record, or which item it holds."""
        from napkin.data.document import Document

        search, names = _search_of(self.tasks)
        document = Document(record.identity, data=record.text.encode("utf-8", "replace"))
        found = [*search.add(document), *search.flush()]
        share, index = max(((share, -index) for index, share, _ in found), default=(0.0, 0))
        if share >= self.share:
            return Dropped("contaminated", f"{names[-index]}: {share:.2f} of its windows")
        return record


@lru_cache(maxsize=8)
def _search_of(tasks: tuple[str, ...]) -> "tuple[ItemSearch, list[str]]":
    """The index of all items, and their names; the files are read once per process."""
    from napkin.evaluation.contamination import ItemSearch, looked_for
    from napkin.evaluation.tasks.task_file import read_task

    read = [read_task([path], skip_bad=True) for path in tasks]
    names = [f"{task.name}/{item.name}" for task in read for item in task.items]
    return ItemSearch([looked_for(item) for task in read for item in task.items]), names
