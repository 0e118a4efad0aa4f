"""OpenAI's own client, unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from peers import peer
from serving.conftest import Serve, Served

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def openai() -> Any:
    return peer("openai")


@pytest.fixture
def client(served: Served, openai: Any) -> Any:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_completions(client: Any, served: Served) -> None:
    (choice,) = served.complete("Hello", max_tokens=10, seed=1, logprobs=2)
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=10, seed=1, logprobs=2)
    assert answer.choices[0].text == choice["text"]
    assert answer.choices[0].logprobs.token_logprobs == choice["logprobs"]["token_logprobs"]
    assert answer.usage.completion_tokens == 10
    pieces = list(client.completions.create(model="tiny", prompt="Hello", max_tokens=10, seed=1, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == choice["text"]


def test_conversations(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 12,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    }
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].message.content
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == content
    assert last.usage.completion_tokens == answer.usage.completion_tokens


def test_models_and_errors(client: Any, openai: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="model 'gpt'"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)


def test_a_stream_that_is_left_is_cancelled(client: Any, served: Served) -> None:
    with client.completions.create(
        model="tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    served.wait_until_idle()


def test_a_key(start_server: Serve, openai: Any) -> None:
    served = start_server(key="open-sesame")
    address = f"http://127.0.0.1:{served.port}/v1"
    with openai.OpenAI(base_url=address, api_key="open-sesame") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
    with openai.OpenAI(base_url=address, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_tools(start_server: Serve, openai: Any) -> None:
    """A loop as programs write it: the answer's message is sent back as it is, with what the function returns."""
    served = start_server(calling="hermes")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    described = {"name": "weather", "description": "Degrees in a city.", "parameters": schema}
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": [{"type": "function", "function": described}]}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="unused", max_retries=0) as client:
        for letter, cities in (("A", ["Rome"]), ("B", ["Paris", "Oslo"])):
            messages: list[Any] = [{"role": "user", "content": letter}]
            (choice,) = client.chat.completions.create(messages=messages, **asked).choices
            assert choice.finish_reason == "tool_calls"
            assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [
                {"city": city} for city in cities
            ]
            messages += [choice.message]
            messages += [
                {"role": "tool", "tool_call_id": each.id, "content": "5"} for each in choice.message.tool_calls
            ]
            (last,) = client.chat.completions.create(messages=messages, **asked).choices
            assert (last.message.content, last.message.tool_calls) == ("It has five degrees.", None)
            with client.chat.completions.stream(messages=messages[:1], **asked) as stream:
                events = list(stream)
                whole = stream.get_final_completion().choices[0]
            done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
            assert [json.loads(each.arguments) for each in done] == [{"city": city} for city in cities]
            assert [each.function.name for each in whole.message.tool_calls] == ["weather"] * len(cities)
            assert whole.message.content == choice.message.content
        # The loop that the documentation shows.
        page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
        shown: dict[str, Any] = {}
        exec(page.partition("```python\n")[2].partition("```")[0], shown)
        assert shown["answer"](client, "tiny", "How warm is it? B") == "It has five degrees."
        chosen = {"type": "function", "function": {"name": "rm"}}
        with pytest.raises(openai.BadRequestError, match="names 'rm', which is not among tools"):
            client.chat.completions.create(messages=messages[:1], tool_choice=chosen, **asked)
