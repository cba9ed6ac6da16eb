"""Stand in for a vLLM server: the routes that the client uses, and faults that FAULT names.

It draws token n of a response as (first of the prompt + n) % 7 + 3. STARTS, a file, counts starts.
"""

import json
import mmap
import os
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

import numpy as np

FAULT, LIMIT = os.environ.get("FAULT", ""), 5
STARTS = Path(os.environ["STARTS"])
received: dict = {}
noted: dict = {}
state = {"version": "default", "cache": set(), "served": 0, "buckets": 0, "adapters": []}


def bit_sum(raw: bytes, width: int) -> int:
    elements = np.frombuffer(raw, np.int32 if width == 2 else np.int16)
    blocks = np.pad(elements, (0, -len(elements) % 512)).reshape(-1, 512)
    sums = (blocks * np.arange(1, 513, dtype=np.int64)).sum(1)
    return int((sums * np.cumprod(np.full(len(sums), 0x1E3779B97F4A7C15))).sum())


def load(path: str, tensors: list) -> None:
    state["buckets"] += 1
    if FAULT == "skipped" and state["buckets"] == 2:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for name, kind, shape, start in tensors:
            width = {"float32": 2, "bfloat16": 1}[kind]
            raw = memory[start : start + 2 * width * int(np.prod(shape))]
            times = 2 if FAULT == "twice" and "norm" in name else 1
            received.setdefault(name, []).extend([bit_sum(raw, width)] * times)
    if FAULT == "swapped" and {"a.weight", "b.weight"} <= received.keys():
        received["a.weight"], received["b.weight"] = received["b.weight"], received["a.weight"]


def receipt() -> dict:
    version = "0" if FAULT == "old receipt" else state["begun"]
    stale = ["lm_head.weight"] if FAULT == "stale head" else []
    return {"version": version, "received": received, "loaded": {}, "stale": stale}


def load_adapter(name: str, folder: Path) -> None:
    """Read the tensors of a file in safetensors' format, as fp32 or bf16."""
    state["adapters"].append(name)
    raw = (folder / "adapter_model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:start])
    head.pop("__metadata__", None)
    noted.clear()
    for key, tensor in head.items():
        first, last = (start + at for at in tensor["data_offsets"])
        width = {"F32": 2, "BF16": 1}[tensor["dtype"]]
        noted[key.removeprefix("base_model.model.")] = [bit_sum(raw[first:last], width)]
    if FAULT == "old adapter" and len(state["adapters"]) > 1:
        noted.update(state["first adapter"])
    state.setdefault("first adapter", dict(noted))
    state["rank"] = json.loads((folder / "adapter_config.json").read_text())["r"]


def adapter_receipt() -> dict:
    return {
        "version": state["adapter version"], "received": noted, "loaded": {}, "stale": [],
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        version = "0" if FAULT == "old info" else state["version"]
        found = {"weight_version": version} if self.path == "/weight_info" else None
        self.answer(json.dumps(found).encode() if found else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route, found = self.path.partition("?")[0], {}
        if route == "/inference/v1/generate":
            return self.generate(body, body["sampling_params"])
        if route == "/update_weights":
            load(**body["update_info"])
        elif route == "/finish_weight_update" and FAULT != "old version":
            state["version"] = body["weight_version"]
        elif route == "/v1/load_lora_adapter":
            load_adapter(body["lora_name"], Path(body["lora_path"]))
            return self.answer(b"Success: loaded")
        elif route == "/v1/unload_lora_adapter":
            state["adapters"].remove(body["lora_name"])
            return self.answer(b"Success: removed")
        elif route == "/collective_rpc" and "adapter" in body["method"]:
            if body["method"] == "rlxf_begin_adapter":
                state["adapter version"], *names = body["args"]
                unable = [name for name in names if FAULT == "unable" and "a.lora_A" in name]
                found = {"results": [[name.partition(".lora_")[0] for name in unable]]}
            else:
                found = {"results": [adapter_receipt()]}
        elif route == "/collective_rpc":
            if body["method"] == "rlxf_begin":
                received.clear()
                state["begun"] = body["args"][0]
            found = {"results": [receipt() if body["method"] == "rlxf_receipt" else None]}
            found["results"] *= FAULT != "no worker"
        elif route in ("/sleep", "/wake_up"):
            print(route, flush=True)
        elif route == "/reset_prefix_cache":
            found = {"success": FAULT != "refused"}
            if FAULT != "cache":
                state["cache"].clear()
        self.answer(json.dumps(found).encode())

    def generate(self, body: dict, asked: dict) -> None:
        prompt, key = body["token_ids"], (body.get("model"), *body["token_ids"])
        if [body.get("model")] != (state["adapters"] or [None]):
            return self.send_error(404, "no such model")
        state["served"] += bool(body.get("stream"))
        if (
            state["served"] == LIMIT
            and body.get("stream")
            and (FAULT[:5] == "again" or int(STARTS.read_text()) == 1)
        ):
            if "dies" in FAULT:
                os._exit(9)
            if "hangs" in FAULT:
                time.sleep(60)
            if "queues" in FAULT:
                time.sleep(2)
            if "breaks" in FAULT:
                return self.answer(b'data: {"choices": [{"token_ids": [3]}]}\n\n')
            if "errs" in FAULT:
                self.send_error(500, "out of blocks")
                return
        cached = len(prompt) * (key in state["cache"])
        state["cache"].add(key)
        tokens = [(prompt[0] + n) % 7 + 3 for n in range(asked["max_tokens"])]
        end = next((n for n, t in enumerate(tokens) if t in asked.get("stop_token_ids", ())), None)
        tokens, reason = (tokens, "length") if end is None else (tokens[: end + 1], "stop")
        time.sleep(0.4 * (FAULT == "queues"))
        spans = [{"version": state["version"], "start": 0, "end": len(tokens)}]
        found = {"usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
        logs = [{str(t): {"logprob": -t / 8}} for t in prompt]
        parts = [tokens[:2], tokens[2:]] if body.get("stream") else [tokens]
        chunks = [
            {"choices": [{"token_ids": part, "finish_reason": reason if part is parts[-1] else None,
                "logprobs": {"content": [{"logprob": -t / 8} for t in part]},
                "weight_versions": spans if part is parts[-1] and FAULT != "unnamed" else None}],
             **({} if body.get("stream") else {**found, "prompt_logprobs": [None, *logs[1:]]})}
            for part in parts
        ]  # fmt: skip
        if not body.get("stream"):
            return self.answer(json.dumps(chunks[0]).encode())
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.answer("".join([*lines, "data: [DONE]\n\n"]).encode())

    def answer(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that has gone is no error."""


STARTS.write_text(str(int(STARTS.read_text()) + 1) if STARTS.exists() else "1")
print(f"start {STARTS.read_text()}: {sys.argv[3:]}", flush=True)
if FAULT == "never ready":
    sys.exit("no such model")
if FAULT.startswith("refuses "):
    sys.exit(FAULT.removeprefix("refuses "))
Server(sys.argv[-1], Handler).serve_forever()
