"""Engine servers for tests: one process that serves a small real model on several ports.

Every port speaks both protocols, has settings of its own (which log-probs it gives, whether it
names ids), and makes the faults that it is told to make. Run as a program it prints its ports.
"""

import argparse
import base64
import http.client
import json
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tests.megatron.rl.engines.served import Model

ROOT = Path(__file__).parents[4]
START_TIMEOUT_S = 240.0
SETTINGS = {
    "log_probs": "scaled",  # after the temperature; raw: before it; processed: among the kept
    "kept": "top_p_token_ids",  # sampling_mask, none: how /generate names the kept ids
    "names_ids": "token_ids",  # texts: as "token_id:7"; nothing: how /v1/completions names ids
    "says_version": True,
    "end_token": None,  # of the model
}


class EngineServers:
    """The process, from its caller's side.

    Args:
        model: Hugging Face directory that is served first.
        num_ports: How many servers there seem to be.
        at: The first one's port; 0: any.
    """

    def __init__(self, model: Path, num_ports: int = 2, at: int = 0) -> None:
        module = "tests.megatron.rl.engines.server"
        command = [sys.executable, "-m", module, str(model), "--ports", str(num_ports)]
        command += ["--at", str(at)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(START_TIMEOUT_S):
                self.close()
                raise TimeoutError(f"no server within {START_TIMEOUT_S} s")
        self._control, *self.ports = json.loads(self._process.stdout.readline())
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def tell(self, port: int, **what: Any) -> dict[str, Any]:
        """Change a port, counted from 0, and learn what it has seen.

        Args:
            port: Which one.
            settings: Some of SETTINGS.
            faults: Each {"kind": ..., "count": how often, ...}, made in this order.
            gone_s: Nobody listens for so long, in seconds, and then it serves its first model.
            reset: Everything is as at first, before the rest is done.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._control, timeout=30)
        connection.request("POST", "/", json.dumps({"port": port, **what}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@dataclass
class Port:
    """One server."""

    first: str
    """Directory of the model that it serves when it starts."""
    settings: dict[str, Any] = field(default_factory=lambda: dict(SETTINGS))
    faults: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0
    num_now: int = 0
    num_most: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What was asked, the last ones."""
    model: Any = None
    version: str = "default"
    lock: threading.Lock = field(default_factory=threading.Lock)
    server: Any = None
    number: int = 0

    def start(self) -> None:
        """Listen, on the port it had before."""
        self.model, self.version = Model(self.first), "default"
        handler = type("Handler", (Handler,), {"port": self})
        self.server = Server(("127.0.0.1", self.number), handler)
        self.number = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def go(self, seconds: float) -> None:
        """Be gone for a while."""
        self.server.shutdown()
        self.server.server_close()
        threading.Timer(seconds, self.start).start()

    def next_fault(self) -> dict[str, Any]:
        """The fault that this call makes."""
        with self.lock:
            while self.faults and self.faults[0].get("count", 1) <= 0:
                self.faults.pop(0)
            if not self.faults:
                return {"kind": "none"}
            self.faults[0]["count"] = self.faults[0].get("count", 1) - 1
            return self.faults[0]

    def told(self, what: dict[str, Any]) -> dict[str, Any]:
        """Do what the test says."""
        seen = {"calls": self.num_calls, "most": self.num_most, "version": self.version}
        seen["bodies"] = self.bodies
        if what.get("reset"):
            self.settings, self.faults, self.bodies = dict(SETTINGS), [], []
            self.num_calls = self.num_most = 0
            if self.version != "default":
                self.model, self.version = Model(self.first), "default"
        self.settings |= what.get("settings", {})
        self.faults = what.get("faults", self.faults)
        if "gone_s" in what:
            self.go(what["gone_s"])
        return seen


class Server(ThreadingHTTPServer):
    """A thread a connection."""

    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    """One call."""

    port: Port

    def handle(self) -> None:
        """Serve; who asks may have given up."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer that somebody is there."""
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        """Answer, or make a fault."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        port = self.port
        with port.lock:
            port.num_calls += 1
            port.num_now += 1
            port.num_most = max(port.num_most, port.num_now)
            port.bodies = [
                *port.bodies[-99:],
                {"path": self.path, "key": self.headers["Authorization"], **body},
            ]
        try:
            self.handle_body(body)
        finally:
            with port.lock:
                port.num_now -= 1

    def handle_body(self, body: dict[str, Any]) -> None:
        """Draw, or load weights."""
        port = self.port
        if self.path == "/generate":
            fault = port.next_fault()
            self.with_fault(fault, lambda: spoiled(native_answer(port, body), fault))
        elif self.path == "/v1/completions":
            fault = port.next_fault()
            self.with_fault(fault, lambda: spoiled(completions_answer(port, body), fault))
        elif self.path in ("/update_weights_from_disk", "/load"):
            try:
                port.model, port.version = Model(body["model_path"]), body["weight_version"]
                self.answer({"success": True, "message": "Succeeded to update model weights."})
            except OSError as error:
                self.answer({"success": False, "message": str(error)[:200]}, 400)
        else:
            self.answer({"error": {"message": f"no {self.path} here"}}, 404)

    def with_fault(self, fault: dict[str, Any], make: Any) -> None:
        """Answer as the fault says."""
        kind = fault["kind"]
        if kind == "slow":
            time.sleep(fault["seconds"])
        if kind == "status":
            self.answer({"error": {"message": fault["message"]}}, fault["status"])
        elif kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif kind == "truncated":
            text = json.dumps(make()).encode()
            self.send(text[: len(text) // 2], 200)
        else:
            self.answer(make())

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        """Send JSON."""
        self.send(json.dumps(content).encode(), status)

    def send(self, text: bytes, status: int) -> None:
        """Send a text that calls itself JSON."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def native_answer(port: Port, body: dict[str, Any]) -> dict[str, Any]:
    """What SGLang answers to /generate."""
    sampling = body["sampling_params"]
    stops = [] if sampling["ignore_eos"] else [*sampling.get("stop_token_ids", [])]
    if port.settings["end_token"] is not None and not sampling["ignore_eos"]:
        stops.append(port.settings["end_token"])
    params = {
        "num_tokens": sampling["max_new_tokens"],
        "seed": sampling.get("sampling_seed"),
        "stops": stops,
        **{name: sampling[name] for name in ("temperature", "top_p", "top_k")},
    }
    names_kept = port.settings["kept"]
    wants_ids = sampling.get("custom_params", {}).get("return_top_p_token_ids", False)
    is_replayed = wants_ids and names_kept == "top_p_token_ids"
    log_probs = "processed" if is_replayed else port.settings["log_probs"]
    drawn = port.model.draw(body["input_ids"], params, log_probs)
    ids = drawn["ids"]
    meta: dict[str, Any] = {
        "id": "1",
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(ids),
        "finish_reason": {"type": "stop", "matched": ids[-1]}
        if ids[-1] in stops and len(ids) < params["num_tokens"]  # it looks at the length first
        else {"type": "length", "length": len(ids)},
        "output_token_logprobs": [
            [log_prob, token, None] for log_prob, token in zip(drawn["log_probs"], ids, strict=True)
        ],
        "output_top_logprobs": [
            [[log_prob, token, "x"] for log_prob, token in row] for row in drawn["likeliest"]
        ],
    }
    if port.settings["says_version"]:
        meta["weight_version"] = port.version
    if is_replayed:
        flat = [token for kept in drawn["kept"] for token in kept]
        offsets = [sum(map(len, drawn["kept"][:i])) for i in range(len(ids) + 1)]
        for name, numbers in (("top_p_token_ids", flat), ("top_p_token_offsets", offsets)):
            packed = struct.pack(f"<{len(numbers)}i", *numbers)
            meta[name] = base64.b64encode(packed).decode()
    if body.get("return_sampling_mask") and names_kept == "sampling_mask":
        again = port.model.draw(body["input_ids"], params, "processed")
        meta["output_token_sampling_mask"] = again["kept"]
        meta["output_token_sampling_logprobs"] = again["log_probs"]
    return {"text": "", "output_ids": ids, "meta_info": meta}


def completions_answer(port: Port, body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers to /v1/completions."""
    stops = [*body.get("stop_token_ids", [])]
    if port.settings["end_token"] is not None and not body["ignore_eos"]:
        stops.append(port.settings["end_token"])
    params = {
        "num_tokens": body["max_tokens"],
        "seed": body.get("seed"),
        "stops": stops,
        **{name: body[name] for name in ("temperature", "top_p", "top_k")},
    }
    drawn = port.model.draw(body["prompt"], params, port.settings["log_probs"])
    names = port.settings["names_ids"]
    prefix = "text " if names == "nothing" else "token_id:"
    choice = {
        "index": 0,
        "text": "",
        "logprobs": {
            "tokens": [f"{prefix}{token}" for token in drawn["ids"]],
            "token_logprobs": drawn["log_probs"],
            "top_logprobs": [
                {f"{prefix}{token}": max(log_prob, -9999.0) for log_prob, token in row}
                for row in drawn["likeliest"]
            ],
        },
        "finish_reason": "stop" if drawn["ids"][-1] in stops else "length",
    }
    if names == "token_ids":
        choice |= {"token_ids": drawn["ids"], "prompt_token_ids": body["prompt"]}
    return {"id": "1", "object": "text_completion", "model": "tiny", "choices": [choice]}


def spoiled(answer: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    """The answer with something wrong: `set` paths to values, `cut` the ends of lists."""
    for path, value in fault.get("set", {}).items():
        *outer, last = path.split(".")
        inner = at(answer, outer)
        if value == "missing":
            del inner[last]
        else:
            inner[int(last) if last.isdecimal() else last] = value
    for path in fault.get("cut", []):
        at(answer, path.split(".")).pop()
    return answer


def at(answer: Any, path: list[str]) -> Any:
    """A part of the answer."""
    for name in path:
        answer = answer[int(name) if name.isdecimal() else name]
    return answer


def main() -> None:
    """Serve until killed, or until nobody holds the other end of stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--ports", type=int, required=True)
    parser.add_argument("--at", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ports = [Port(args.model, number=args.at if i == 0 else 0) for i in range(args.ports)]
    for port in ports:
        port.start()

    class Control(Handler):
        def do_POST(self) -> None:
            what = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(ports[what["port"]].told(what))

    control = Server(("127.0.0.1", 0), Control)
    sys.stdout.write(json.dumps([control.server_port, *(port.number for port in ports)]) + "\n")
    sys.stdout.flush()
    threading.Thread(target=control.serve_forever, daemon=True).start()
    sys.stdin.read()  # ends when whoever started this is gone


if __name__ == "__main__":
    main()
