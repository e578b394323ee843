"""`regenerate` by a server: bounded, retried, timed out, resumed, and every failure named."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from forebay.errors import UsageError
from forebay.stages.endpoint import EndpointError, regenerate_by_endpoint
from tiny import write_jsonl


class FakeServer:
    """An OpenAI-compatible server on 127.0.0.1. `behave(text, n)` may say (status, body) for the n-th try of a text."""

    def __init__(self, behave=lambda text, n: None, models=("m",)):
        self.bodies, self.tries, self.at_once, self.most = [], {}, 0, 0
        self.release = threading.Event()
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def reply(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply(200, {"data": [{"id": name} for name in models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                with lock:
                    server.bodies.append(body)
                    server.tries[text] = n = server.tries.get(text, 0) + 1
                    server.at_once += 1
                    server.most = max(server.most, server.at_once)
                try:
                    said = behave(text, n)
                    if said == "hang":
                        server.release.wait(60)
                        return
                    message = {"role": "assistant", "content": f"re: {text}", "reasoning_content": "hm"}
                    choice = {"message": message, "finish_reason": "stop"}
                    self.reply(*(said or (200, {"choices": [choice], "usage": {"completion_tokens": 3}})))
                finally:
                    with lock:
                        server.at_once -= 1

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": i, "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(6)]
    return write_jsonl(tmp_path / "p.jsonl", rows)


def ask(server, prompts, out, **options):
    options = {"concurrency": 3, "pause_s": 0.0, "progress": False, **options}
    return regenerate_by_endpoint(prompts, out, endpoint=server.url, **options)


def test_answers_keep_reasoning_finish_reason_and_settings_and_requests_are_bounded(prompts, tmp_path):
    with FakeServer() as server:
        summary = ask(server, prompts, tmp_path / "o.jsonl", template_kwargs={"enable_thinking": True}, temperature=0.5)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert (summary.written, summary.new_tokens, summary.finish_reasons) == (6, 18, {"stop": 6})
    assert server.most <= 3
    said = {"role": "assistant", "content": "re: q0", "reasoning_content": "hm"}
    assert next(row for row in rows if row["id"] == 0)["messages"][-1] == said
    assert rows[0]["regenerated"]["by"]["template_kwargs"] == {"enable_thinking": True}
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert len({body["seed"] for body in server.bodies}) == 6


def test_busy_and_broken_answers_are_tried_again_and_a_refusal_is_not(prompts, tmp_path):
    def behave(text, n):
        if text == "q1" and n < 3:
            return (429 if n == 1 else 503), {"error": "busy"}
        if text == "q2":
            return 400, {"error": "too long"}
        return (200, {"what": 1}) if text == "q3" else None

    with FakeServer(behave) as server:
        summary = ask(server, prompts, tmp_path / "o.jsonl")
    assert (server.tries["q1"], server.tries["q2"], server.tries["q3"]) == (3, 1, 1)
    assert summary.written == 4
    failed = sorted(summary.failed)
    assert "p.jsonl:3: HTTP 400" in failed[0] and "too long" in failed[0]
    assert "p.jsonl:4: an answer of another form" in failed[1]


def test_a_request_that_hangs_is_tried_again_then_named_and_skipped_or_stops(prompts, tmp_path):
    """C73."""
    with FakeServer(lambda text, n: "hang" if text == "q3" else None) as server:
        summary = ask(server, prompts, tmp_path / "o.jsonl", timeout_s=0.3, retries=1)
        assert (summary.written, server.tries["q3"]) == (5, 2)
        assert summary.failed == [f"{prompts}:4: no answer within 0.3 s"]
        with pytest.raises(EndpointError, match=r"p.jsonl:4 was not answered after 2 tries: no answer within 0.3 s"):
            ask(server, prompts, tmp_path / "other.jsonl", timeout_s=0.3, retries=1, on_fail="stop")


def test_the_same_command_goes_on_with_what_is_missing(prompts, tmp_path):
    with FakeServer(lambda text, n: (500, {}) if text in ("q1", "q4") else None) as server:
        ask(server, prompts, tmp_path / "o.jsonl", retries=0)
    with FakeServer() as server:
        summary = ask(server, prompts, tmp_path / "o.jsonl")
    assert (summary.resumed, summary.written, sorted(server.tries)) == (4, 2, ["q1", "q4"])


def test_a_server_that_is_not_there_fails_before_any_work(prompts, tmp_path):
    """C72: within seconds, with the address. Forebay starts no server, so there is no stderr of one to show."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"no server answers at {url}/v1/models"):
            regenerate_by_endpoint(prompts, tmp_path / "o.jsonl", endpoint=url, progress=False)
    assert not (tmp_path / "o.jsonl").exists()


def test_a_server_that_dies_on_the_way_stops_the_run(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(60)]
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    with FakeServer(lambda text, n: (500, {}) if text not in ("q0", "q1") else None) as server:
        with pytest.raises(EndpointError, match=r"14 prompts failed in a row.*2 answers are kept"):
            ask(server, prompts, tmp_path / "o.jsonl", retries=0)


def test_the_model_is_the_one_served_or_one_of_those_named(prompts, tmp_path):
    with FakeServer(models=("a", "b")) as server:
        with pytest.raises(UsageError, match="serves 2 models"):
            ask(server, prompts, tmp_path / "o.jsonl")
        with pytest.raises(UsageError, match="does not serve 'c': --model must be one of a, b"):
            ask(server, prompts, tmp_path / "o.jsonl", model="c")
        ask(server, prompts, tmp_path / "o.jsonl", model="b")
        assert {body["model"] for body in server.bodies} == {"b"}
