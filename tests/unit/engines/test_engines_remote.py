"""The remote engine against a tiny server on a free port: answers, rate limits, budgets, broken servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from triune.errors import ConfigError, EngineError
from triune.explorer.engines import _retrying
from triune.explorer.engines.remote import Remote, RemoteEngine
from triune.models import EndpointSettings
from triune.ports import GenerateRequest, Sampling, WeightUpdate
from triune.records import Stop

Answer = tuple[int, Any, dict[str, str]]


@contextmanager
def server(answer: Callable[[str, dict[str, Any], int], Answer]) -> Iterator[tuple[str, list[Any]]]:
    """Base address and the requests seen so far; `answer(path, body, number)` gives status, JSON and headers."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body, dict(self.headers)))
            status, value, headers = answer(self.path, body, len(seen))
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", seen
    finally:
        running.shutdown()
        running.server_close()


def said(text: str, reason: str | None = "stop") -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}, "text": text, "finish_reason": reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(
        _retrying.RetryingClient.__init__, "__kwdefaults__", {"max_requests": None, "first_pause_s": 0.01}
    )


def ask(engine: RemoteEngine, *calls: Any) -> list[Any]:
    async def work() -> list[Any]:
        try:
            return await asyncio.gather(*(call(engine) for call in calls), return_exceptions=True)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(work(), 20))


def hello(engine: RemoteEngine):
    return engine.chat([{"role": "user", "content": "hello"}], Sampling(temperature=0.5, max_tokens=7, stop=("\n",)))


def test_chat_sends_openai_fields_and_reads_text_usage_and_stop(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    with server(lambda path, body, number: (200, said("hi", "length"), {})) as (url, seen):
        (answer,) = ask(RemoteEngine(Remote(url=url, model="m", api_key_env="SOME_KEY")), hello)
    assert (answer.text, answer.stop) == ("hi", Stop.LENGTH)
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 2}
    path, body, headers = seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 7,
        "stop": ["\n"],
    }


def test_completions_continue_text():
    with server(lambda path, body, number: (200, said("there"), {})) as (url, seen):
        (answer,) = ask(RemoteEngine(Remote(url=url, model="m")), lambda engine: engine.complete("hello "))
    assert answer.text == "there"
    assert seen[0][1] == {"model": "m", "prompt": "hello "}
    assert "Authorization" not in seen[0][2]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [("stop", Stop.DONE), ("eos", Stop.DONE), ("tool_calls", Stop.DONE), ("function_call", Stop.DONE),
     ("length", Stop.LENGTH), ("abort", Stop.ABORTED), ("content_filter", Stop.ABORTED), (None, Stop.ABORTED)],
)  # fmt: skip
def test_case_47_an_answer_that_the_server_broke_off_is_no_whole_one(reason, stop):
    with server(lambda path, body, number: (200, said("half", reason), {})) as (url, _):
        (answer,) = ask(RemoteEngine(Remote(url=url, model="m")), hello)
    assert answer.stop is stop


@pytest.mark.parametrize("status", [429, 500, 503])
def test_case_37_a_judge_under_load_is_asked_again(status):
    def answer(path, body, number):
        return (200, said("good"), {}) if number == 3 else (status, {}, {"Retry-After": "0.02"})

    with server(answer) as (url, seen):
        engine = RemoteEngine(Remote(url=url, model="m", retries=3))
        (found,) = ask(engine, hello)
    assert found.text == "good"
    assert len(seen) == 3
    assert engine.stats()["retries"] == 2


def test_a_server_that_stays_down_ends_in_an_error_that_counts_the_tries():
    with server(lambda path, body, number: (503, {}, {})) as (url, seen):
        (error,) = ask(RemoteEngine(Remote(url=url, model="m", retries=2)), hello)
    assert isinstance(error, EngineError)
    assert "status 503, 3 times" in str(error)
    assert len(seen) == 3


def test_a_refusal_is_not_repeated_and_says_what_to_check():
    with server(lambda path, body, number: (401, {"error": "no such key"}, {})) as (url, seen):
        (error,) = ask(RemoteEngine(Remote(url=url, model="m")), hello)
    assert "no such key" in str(error)
    assert "api_key_env" in str(error)
    assert len(seen) == 1


@pytest.mark.parametrize("body", [b"<html>", [1], {"choices": []}, {"nothing": 1}])
def test_an_answer_of_another_format_is_an_engine_error(body):
    with server(lambda path, body_, number: (200, body, {})) as (url, _):
        (error,) = ask(RemoteEngine(Remote(url=url, model="m", retries=0)), hello)
    assert isinstance(error, EngineError)


def test_nobody_listening_is_named():
    with server(lambda path, body, number: (200, {}, {})) as (url, _):
        pass
    (error,) = ask(RemoteEngine(Remote(url=url, model="m", retries=1)), hello)
    assert "Connect" in str(error)
    assert url in str(error)


def test_a_slow_answer_meets_the_timeout():
    release = threading.Event()

    def answer(path, body, number):
        release.wait(3)
        return 200, said("late"), {}

    with server(answer) as (url, _):
        (error,) = ask(RemoteEngine(Remote(url=url, model="m", retries=0, timeout_s=0.1)), hello)
        release.set()
    assert "no answer within 0.1 s" in str(error)


def test_the_budget_is_of_all_tries():
    with server(lambda path, body, number: (200, said("x"), {})) as (url, seen):
        found = ask(RemoteEngine(Remote(url=url, model="m", max_requests=2)), hello, hello, hello)
    assert sum(isinstance(one, EngineError) and "budget" in str(one) for one in found) == 1
    assert len(seen) == 2


def test_no_more_requests_are_in_flight_than_allowed():
    lock, now, most = threading.Lock(), 0, 0

    def answer(path, body, number):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.02)
        with lock:
            now -= 1
        return 200, said("x"), {}

    with server(answer) as (url, seen):
        ask(RemoteEngine(Remote(url=url, model="m", max_concurrency=3)), *[hello] * 12)
    assert len(seen) == 12
    assert most == 3


def test_token_ids_are_used_where_the_server_returns_them():
    def answer(path, body, number):
        assert body["prompt"] == [5, 6]
        assert body["return_token_ids"] is True
        choice = {
            "text": "x",
            "token_ids": [7, 8],
            "logprobs": {"token_logprobs": [-0.5, -1.0]},
            "finish_reason": "stop",
        }
        return 200, {"choices": [choice]}, {}

    request = GenerateRequest(id="r/0", prompt=np.array([5, 6], dtype=np.int32))
    with server(answer) as (url, _):
        (done,) = ask(RemoteEngine(Remote(url=url, model="m")), lambda engine: engine.generate(request))
    assert done.tokens.tolist() == [7, 8]
    np.testing.assert_allclose(done.logprobs, [-0.5, -1.0])
    assert done.stop is Stop.DONE


def test_case_03_ids_are_never_guessed_from_text():
    request = GenerateRequest(id="r/0", prompt=np.array([5], dtype=np.int32))
    with server(lambda path, body, number: (200, said("x"), {})) as (url, _):
        (error,) = ask(RemoteEngine(Remote(url=url, model="m")), lambda engine: engine.generate(request))
    assert "without token ids" in str(error)


def test_an_aborted_request_says_so():
    release = threading.Event()

    def answer(path, body, number):
        release.wait(3)
        return 200, said("late"), {}

    async def work(url: str):
        engine = RemoteEngine(Remote(url=url, model="m"))
        task = asyncio.create_task(engine.generate(GenerateRequest(id="r", prompt=np.array([5]))))
        await asyncio.sleep(0.05)
        await engine.abort(["r"])
        done = await task
        await engine.close()
        return done

    with server(answer) as (url, _):
        done = asyncio.run(work(url))
        release.set()
    assert (done.stop, len(done.tokens)) == (Stop.ABORTED, 0)


def test_what_an_endpoint_cannot_do_is_said():
    update = WeightUpdate(version=1, step=1, digest="", dtype="float32")
    engine = RemoteEngine(Remote(url="http://127.0.0.1:9/v1", model="m"))
    errors = ask(engine, lambda e: e.swap(update, {}), lambda e: e.logprobs(np.array([1])))
    assert all(isinstance(error, EngineError) for error in errors)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        RemoteEngine(Remote(url="http://x/v1", model="m", api_key_env="NO_SUCH_KEY"))


def test_an_entry_of_models_becomes_an_engine():
    settings = EndpointSettings(url="http://127.0.0.1:9/v1", model="judge", retries=1)
    assert Remote.of(settings, max_requests=5) == Remote(
        url="http://127.0.0.1:9/v1", model="judge", retries=1, max_requests=5
    )
