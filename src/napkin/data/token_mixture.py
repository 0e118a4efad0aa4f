"""Several token files as one text to train on, each with a weight."""

from collections.abc import Sequence
from hashlib import sha256

from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError


class TokenMixture:
    """Token files of one tokenizer, mapped and not read, and what part of training each is.

    `weights` are shares of the training windows, and need not sum to 1; None gives each file as many as it holds, so
    that all come to the end of an epoch together.
    """

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...] | None

    def __init__(self, files: Sequence[TokenFile], weights: Sequence[float] | None = None) -> None:
        if not files:
            raise NapkinError("there is no token file to train on: name one or more")
        first = files[0]
        for file in files:
            if file.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise NapkinError(
                    f"'{first.path}' and '{file.path}' were made by two tokenizers: make them again with one"
                )
        self.files = tuple(files)
        self.weights = None if weights is None else tuple(weights)

    @property
    def n_tokens(self) -> int:
        """Tokens of all files."""
        return sum(file.n_tokens for file in self.files)

    @property
    def separator(self) -> int:
        """The token between documents."""
        return self.files[0].separator

    @property
    def sha256(self) -> str:
        """What was trained on, in order: of one file its own checksum, of several one of their checksums and weights.

        Names and places of the files are no part of it.
        """
        if len(self.files) == 1:
            return self.files[0].sha256
        weights = self.weights or (None,) * len(self.files)
        lines = (f"{file.sha256} {weight}\n" for file, weight in zip(self.files, weights, strict=True))
        return sha256("".join(lines).encode()).hexdigest()
