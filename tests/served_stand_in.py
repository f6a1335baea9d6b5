"""What stands in for `vllm serve` where its process matters and vLLM does not: it begins at once, and ends like any.

It imports nothing of ours. A completion is made of prompt and seed, so that another of these draws the same; what
follows the prompt 13 is not finite, and the prompt 14 holds up the loop.
"""

import hashlib
import json
import os
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

LOOP = threading.Lock()
LEDGER = {"version": 0, "bytes": 0, "faults": [], "unread": [], "twice": [], "receipts": {}, "layers": {}}


def answer(path, body):
    if path == "/inference/v1/generate":
        time.sleep(4 if body["token_ids"] == [14] else 0)
        asked = body["sampling_params"]
        made = hashlib.sha256(repr((body["token_ids"], asked["seed"])).encode()).digest()
        tokens = list(made[: asked["max_tokens"]])
        content = [{"logprob": None if body["token_ids"] == [13] else -1.0} for _ in tokens]
        return {"choices": [{"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "length"}]}
    if path == "/collective_rpc" and body["method"] == "connect_json":
        config = json.loads(Path(sys.argv[1], "config.json").read_text())
        return {
            "results": [
                {
                    "versions": json.loads(os.environ["STAND_IN_VERSIONS"]),
                    "config": config,
                    "longest": 4096,
                    "workers": 1,
                }
            ]
        }
    if path == "/collective_rpc":
        return {"results": [LEDGER if body["method"] == "outcome_json" else {}]}
    return {}


class Handler(BaseHTTPRequestHandler):
    key = os.environ.get("VLLM_API_KEY")

    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        known = self.headers["Authorization"] == f"Bearer {self.key}"
        self.reply(*(self.answered(body) if known else (401, {})))

    def answered(self, body):
        with LOOP:
            return 200, answer(self.path.partition("?")[0], body)

    def reply(self, status, said):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *args):
        pass


class Standing(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def get_request(self):
        connection, _ = super().get_request()
        return connection, ("", 0)  # whose name a handler would look up


if __name__ == "__main__":
    place = next(one for one in sys.argv if one.startswith("--uds=")).removeprefix("--uds=")
    Standing(place, Handler).serve_forever()
