"""A small OpenAI-compatible `/v1/completions` on 127.0.0.1 over a signed release: memopt's Engine generates, and its
decoder scores an echoed prompt. What lm-eval's local-completions asks for, no more.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memopt
from memopt.compressor.evaluate.token_windows import Window
from memopt.compressor.evaluate.window_rows import batches, step_rows
from memopt.kernels.kv_formats import kv_format
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.verified_model import load_verified
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.parallel.communicator import SingleRank

PATH = "/v1/completions"


@dataclass
class Server:
    """`requests`: the bodies so far, in order."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)


class ServedModel:
    """A signed release, loaded for both kinds of request, in float32."""

    def __init__(self, folder: Path, key: Path) -> None:
        self.engine = memopt.Engine(folder, key=key, dtype="float32")
        self._model = load_verified(folder, None, key, EngineOptions(dtype="float32"), SingleRank())

    def ids(self, prompt: str | list[int]) -> list[int]:
        assert self._model.tokenizer is not None
        return self._model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]: what follows each token."""
        decoder = self._model.decoder
        (batch,) = batches([Window(0, 0, np.array(ids, np.int64))], len(ids))
        pools = new_kv_pools(
            decoder.config,
            kv_format("fp32"),
            batch.num_pages + 1,
            num_layers=decoder.config.num_layers,
            num_kv_heads_here=1,
        )
        return decoder.logits(decoder.forward(step_rows(batch, "cpu"), pools)).log_softmax(-1)

    def echo(self, prompt: str | list[int], index: int) -> dict[str, Any]:
        """The prompt's logprobs and those of one greedy token behind it, as the OpenAI API gives them."""
        ids = self.ids(prompt)
        rows = self.logprobs(ids)
        ids = [*ids, int(rows[-1].argmax())]
        own = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
        top = [{f"token_id:{int(row.argmax())}": float(row.max())} for row in rows]
        logprobs = {"tokens": list(map(str, ids)), "token_logprobs": [None, *own], "top_logprobs": [None, *top]}
        return {"index": index, "text": "", "logprobs": logprobs, "finish_reason": "length"}

    def answer(self, prompt: str | list[int], index: int, body: dict[str, Any]) -> dict[str, Any]:
        params = memopt.SamplingParams(
            max_tokens=body["max_tokens"], temperature=body.get("temperature", 0.0), stop=tuple(body.get("stop") or ())
        )
        completion = self.engine.generate([self.ids(prompt)], params)[0]
        return {"index": index, "text": completion.text, "finish_reason": "stop"}


@contextmanager
def serving(folder: Path, key: Path) -> Iterator[Server]:
    """Serves the release in `folder`, signed by `key`, until the block ends."""
    model, lock = ServedModel(folder, key), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(404, {"error": "no such path"})

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != PATH:
                return self._send(404, {"error": "no such path"})
            body = json.loads(raw)
            server.requests.append(body)
            prompts = body["prompt"]
            if isinstance(prompts, str) or isinstance(prompts[0], int):
                prompts = [prompts]
            with lock:
                if body.get("echo"):
                    choices = [model.echo(prompt, index) for index, prompt in enumerate(prompts)]
                else:
                    choices = [model.answer(prompt, index, body) for index, prompt in enumerate(prompts)]
            self._send(200, {"object": "text_completion", "model": body["model"], "choices": choices})

        def _send(self, status: int, table: dict[str, Any]) -> None:
            raw = json.dumps(table).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}{PATH}")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
        model.engine.close()
