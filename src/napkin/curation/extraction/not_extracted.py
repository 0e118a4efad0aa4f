"""Why a document gives no text."""


class NotExtracted(ValueError):
    """A document over a limit, or one that cannot be read: the name of the rule, and what was found."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail
