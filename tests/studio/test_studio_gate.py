"""Who is let in: the holder of the token, from the studio's own pages; and what wrong requests are told."""

import http.client
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reliability.harness import Napkin
from studio.conftest import PATIENCE, Studio, started

PLAN = {"on": "8xH100", "preset": "gpt2", "training": {"batch_size": 64, "micro_batch_size": 8}}


def test_without_the_token_there_is_no_answer(studio: Studio) -> None:
    for path in ("/", "/planner", "/assets/rules.js", "/api/planner/catalogue", "/nothing"):
        assert studio.ask(path, with_token=False).status == 403
        assert studio.ask(path, headers={"authorization": "Bearer wrong"}, with_token=False).status == 403
        assert studio.ask(f"{path}?token=wrong", with_token=False).status == 403
        assert (
            studio.ask(path, headers={"cookie": f"napkin-studio-{studio.port}=wrong"}, with_token=False).status == 403
        )
    assert studio.ask("/api/planner/plan", PLAN, with_token=False).status == 403


def test_the_token_of_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(studio: Studio) -> None:
    told = studio.ask(f"/planner?token={studio.token}", with_token=False)
    assert (told.status, told.headers["location"]) == (303, "/planner")
    cookie, *flags = told.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict"} <= set(flags)
    assert studio.ask("/planner", headers={"cookie": cookie}, with_token=False).status == 200
    # What stands in the address decides nothing about where the browser goes.
    elsewhere = studio.ask(f"//evil.example/x?token={studio.token}", with_token=False)
    assert elsewhere.headers["location"] == "/"


def test_pages_elsewhere_are_refused_even_with_the_token(studio: Studio) -> None:
    assert studio.ask("/", headers={"host": f"evil.example:{studio.port}"}).status == 421
    assert studio.ask("/api/planner/plan", PLAN, headers={"origin": "http://evil.example"}).status == 403
    policy = studio.ask("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "truncated"),
        (b"\xff\xfe", 400, ""),
        (b"[" * 60_000, 400, ""),
        (b"0" * 70_000, 413, "longer than 65,536 bytes"),
        ({"on": "8xH100", "colour": "red"}, 400, "unknown field `colour`"),
        ({"on": "8xH1000"}, 422, "H1000"),
        ({"on": "8xH100", "preset": "gpt9"}, 422, "'gpt9' is not a preset"),
        ({**PLAN, "model": {"d_modell": 3}}, 422, "did you mean 'model.d_model'"),
        ({**PLAN, "model": {"d_model": "wide"}}, 422, "model.d_model"),
        ({**PLAN, "model": {"n_layers": 10**9}}, 422, "4096"),
        ({**PLAN, "tokens": -1}, 422, "tokens is -1"),
        ({**PLAN, "training": {"batch_size": 63, "micro_batch_size": 8}}, 422, "63"),
    ],
)
def test_what_is_wrong_is_named_in_a_line(studio: Studio, body: object, status: int, said: str) -> None:
    told = studio.ask("/api/planner/plan", body)
    assert told.status == status
    assert said in told.json["error"]
    assert "\n" not in told.json["error"]


def test_unknown_pages_and_assets_are_not_found(studio: Studio) -> None:
    for path in ("/nothing", "/assets/../application.py", "/assets/%2e%2e%2fapplication.py", "/assets/x.js"):
        assert studio.ask(path).status == 404
    assert studio.ask("/api/planner/plan").status == 405


def test_a_newer_plan_ends_the_one_that_nobody_waits_for(studio: Studio) -> None:
    slow = {**PLAN, "preset": "deepseek-v3", "on": "64xB200", "parallelism": {"shard": 64, "expert": 64}}
    slow["training"] = {"batch_size": 64, "micro_batch_size": 1, "parallelism": "fsdp"}
    with ThreadPoolExecutor(4) as pool:
        asked = []
        for layers in (50, 40, 30):
            asked.append(pool.submit(studio.ask, "/api/planner/plan", {**slow, "model": {"n_layers": layers}}))
            time.sleep(0.3)
        last = studio.ask("/api/planner/plan", PLAN)
        superseded = [each.result().status for each in asked]
    assert last.status == 200
    assert superseded[1:] == [409, 409]


def test_the_end_cancels_a_plan_without_a_traceback(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """`started` asserts that nothing is printed but what the command says."""
    with started(Napkin(tmp_path, server)) as studio:
        connection = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=PATIENCE)
        asked = {"preset": "llama-3-70b", "on": "8xH100", "input_tokens": 1024, "output_tokens": 8192}
        headers = {"authorization": f"Bearer {studio.token}"}
        connection.request("POST", "/api/services/curves", json.dumps(asked), headers)
        # The request is read before the server ends.
        assert studio.ask("/api/services/catalogue").status == 200
    connection.close()
