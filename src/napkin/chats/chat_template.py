"""Chat templates: how the messages of a conversation become the text that a model was trained on.

A Hugging Face folder has its template in chat_template.jinja or in tokenizer_config.json, in the language of jinja2. It
is a program from elsewhere: it is rendered in a process of its own, see `napkin.chats.chat_template_process`.

`read_first_ids` reads the tokens that a folder puts before every text, such as one for its beginning.
"""

import contextlib
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from napkin.child_process import AnsweringProcess, start_answering
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, regular
from napkin.model.huggingface.folder_files import read_json, read_text
from napkin.runs.run_folder import read_conversation
from napkin.tokenizer.base import Tokenizer

MOST_CHARACTERS = 2**18
"""The longest template that is read: ten times the longest known."""
_START_SECONDS = 60.0
_MOST_ANSWER = 2**28
_PROCESS = "from napkin.chats.chat_template_process import main; main()"

Message = Mapping[str, Any]


class RefusedConversation(NapkinError):
    """A template refused messages of this kind; `reason` is its message."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template refuses the conversation: {reason}")
        self.reason = reason


class _Ended(NapkinError):
    """The process was ended, or ended, before it had answered."""


class ChatTemplate:
    """A template with the special tokens that it may name; it may be used from several threads.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}",
    ...                         {"eos_token": "</s>"})
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<user>Hello</s>'

    The process that renders is started at first use and ends with the object. A rendering that takes longer than
    `most_seconds` is ended. Raises NapkinError for a template of more than 2^18 characters.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, Any] | None = None, *, most_seconds: float = 5.0
    ) -> None:
        if len(source) > MOST_CHARACTERS:
            raise NapkinError(
                f"the chat template has {len(source)} characters: use one of at most {MOST_CHARACTERS} characters"
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.most_seconds = most_seconds
        self._process: AnsweringProcess | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the model's answer begins.

        A message has a `role` and a `content`, and what else its template reads; `variables` are given to the template
        too. Values are those of JSON. Raises NapkinError if they are not, or where the template cannot be compiled or
        exceeds its limits, RefusedConversation where it refuses the messages.
        """
        variables |= {
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        (text,) = self.render_all([variables])
        if isinstance(text, RefusedConversation):
            raise text
        return text

    def render_all(self, renderings: Sequence[Mapping[str, Any]]) -> "list[str | RefusedConversation]":
        """The texts of several conversations, each given by all variables that the template may read.

        They are rendered in one exchange with the process; each may take as long as one alone. Raises NapkinError as
        `render` does.
        """
        with self._lock:
            try:
                return self._answers(renderings)
            except _Ended:
                if len(renderings) == 1:
                    raise
            return [each for one in renderings for each in self._answers([one])]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answers(self, renderings: Sequence[Mapping[str, Any]]) -> "list[str | RefusedConversation]":
        try:
            line = json.dumps({"renderings": [{**self.special_tokens, **each} for each in renderings]})
        except (TypeError, ValueError, RecursionError) as error:
            raise NapkinError(f"a conversation holds what JSON cannot ({first_line(error)}): use texts") from None
        if self._process is None or self._process.poll() is not None:
            self._start()
        return [
            RefusedConversation(_one_line(each["error"])) if "error" in each else str(each["text"])
            for each in self._ask(line, self.most_seconds)["answers"]
        ]

    def _start(self) -> None:
        try:
            self._process = start_answering(_PROCESS)
        except OSError as error:
            raise NapkinError(f"the process that renders chat templates cannot be started ({error})") from None
        weakref.finalize(self, _end_process, self._process)
        self._ask("", _START_SECONDS)
        # Compiling computes what is constant, which may take as long as rendering.
        answer = self._ask(json.dumps({"template": self.source}), self.most_seconds)
        if "error" in answer:
            self._end()
            raise NapkinError(f"the chat template cannot be read: {_one_line(answer['error'])}")

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send the process a line and return its answer; a timer ends the process, and so the waiting."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline(_MOST_ANSWER)
        except OSError:
            answer = b""
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self._end()
        if late.is_set():
            raise _Ended(f"the chat template takes longer than {seconds:g} s: use another template")
        raise _Ended("the chat template needs more memory than it may have: use another template")

    def _end(self) -> None:
        if self._process is not None:
            _end_process(self._process)
        self._process = None


def read_chat_template(folder: StrPath) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder; None if it has none.

    chat_template.jinja goes before tokenizer_config.json, where there may be several by name: `default` is taken.
    Raises NapkinError for files that cannot be read, are damaged or lead out of the folder.
    """
    folder = Path(folder)
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(config_file) if config_file.exists() else {}
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if template_file.exists():
        source = read_text(template_file, MOST_CHARACTERS)
    if source is None:
        return None
    if not isinstance(source, str):
        raise NapkinError(f"'{config_file}' has a chat_template that is not a text: download it again")
    try:
        return ChatTemplate(source, _special_tokens(settings))
    except NapkinError as error:
        raise NapkinError(f"'{folder}': {error}") from None


def read_gguf_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template in the metadata of a GGUF file; None if it has none. Raises NapkinError for one too long."""
    source, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
    named = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    return ChatTemplate(source, named) if isinstance(source, str) else None


def read_template_file(path: StrPath) -> str:
    """A template from a file of its own. Raises NapkinError where it cannot be read."""
    path = Path(path)
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            # One byte more than allowed, so that `ChatTemplate` refuses a longer file.
            return file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a file with a chat template") from None
    except ValueError as error:
        raise NapkinError(f"'{path}' is not UTF-8 ({first_line(error)}): name a file with a chat template") from None


def read_template_variables(folder: StrPath) -> dict[str, str]:
    """The special tokens that a Hugging Face folder gives a template, by the names that templates use."""
    path = Path(folder) / "tokenizer_config.json"
    return _special_tokens(read_json(path)) if path.exists() else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use: bos_token, eos_token and so on."""
    tokens = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _one_line(message: str) -> str:
    return first_line(ValueError(message))


def _end_process(process: AnsweringProcess) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # Bytes still buffered for a process that has ended cannot be flushed.
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def read_first_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the template in tokenizer.json puts before a text, or else `bos_token` where tokenizer_config.json
    adds it.

    An `add_bos_token` of false takes it out of the template. Raises NapkinError for files that cannot be read.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    first = _special_id(settings.get("bos_token"), tokenizer)
    first_ids = _of_template(read_json(folder / "tokenizer.json"))
    match settings.get("add_bos_token"):
        case True if not first_ids and first is not None:
            return (first,)
        case False if first_ids == (first,):
            return ()
    return first_ids


def _of_template(document: dict[str, Any]) -> tuple[int, ...]:
    post_processor = document.get("post_processor") or {}
    ids: list[int] = []
    try:
        for processor in post_processor.get("processors") or [post_processor]:
            if processor.get("type") != "TemplateProcessing":
                continue
            for piece in processor["single"]:
                if "SpecialToken" not in piece:
                    break
                ids += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        return tuple(int(number) for number in ids)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise NapkinError("tokenizer.json has a post_processor that cannot be read: download it again") from None


def _special_id(token: Any, tokenizer: Tokenizer) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.special_tokens.get(text) if isinstance(text, str) else None


def texts_of_run(run: Path, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...], ChatTemplate | None]:
    """Return the ids before every text of a run, those at which texts end, and its chat template: by its
    conversation.json, or the separator of documents. Raises CorruptFile for a conversation.json that is not one."""
    conversation = read_conversation(run, tokenizer)
    if conversation is None:
        separator = (tokenizer.special_tokens[SEPARATOR],)
        return separator, separator, None
    template = (
        None
        if conversation.chat_template is None
        else ChatTemplate(conversation.chat_template, conversation.template_tokens)
    )
    return conversation.first_ids, conversation.stop_ids, template


def bos_of_run(run: Path, tokenizer: Tokenizer) -> int | None:
    """Return the token that a tuned run's base model calls bos; None where it names none."""
    conversation = read_conversation(run, tokenizer)
    return (
        None
        if conversation is None
        else tokenizer.special_tokens.get(conversation.template_tokens.get("bos_token", ""))
    )


def tokens_with_bos(template: ChatTemplate | None, tokenizer: Tokenizer, bos_id: int | None) -> dict[str, str]:
    """Return the tokens that a template may name, and that which is called bos, by the names that templates use."""
    texts = [text for text, number in tokenizer.special_tokens.items() if number == bos_id]
    named = {"bos_token": texts[0]} if texts else {}
    return named | ({} if template is None else dict(template.special_tokens))
