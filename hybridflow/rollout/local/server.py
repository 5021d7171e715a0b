"""The local engine's HTTP face: SGLang's endpoints that a trainer uses, and no others."""

from __future__ import annotations

import hmac
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hybridflow.recipe.names import hint
from hybridflow.rollout.local.requests import answer, read_generate
from hybridflow.rollout.local.scheduler import Scheduler
from hybridflow.rollout.server_side.sync_files import LOADER

_MAX_BODY = 256 << 20


class LocalServer(ThreadingHTTPServer):
    """Serves one scheduler. With `token`, everything but /health wants it as a bearer token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, scheduler: Scheduler, token: str | None) -> None:
        self.scheduler, self.token = scheduler, token
        super().__init__((host, port), Handler)
        threading.Thread(target=self._decode, name="decode", daemon=True).start()

    def _decode(self) -> None:
        """A decode loop that fails ends the process: a server that cannot decode is not healthy."""
        try:
            self.scheduler.run()
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


class Handler(BaseHTTPRequestHandler):
    """One connection. A ValueError is a 400 whose text says what was wrong."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body leave in one write
    server: LocalServer

    def do_GET(self) -> None:
        self._serve(_GETS)

    def do_POST(self) -> None:
        self._serve(_POSTS)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Only faults go to the log; see `_reply`."""

    def _serve(self, routes: dict[str, Callable]) -> None:
        path = self.path.split("?")[0]
        try:
            body = self._body()
            if path != "/health" and not self._allowed():
                self._reply(401, {"error": "a bearer token is needed"})
            elif path not in routes:
                self._reply(404, {"error": f"no endpoint {path}; {hint(path, routes)}"})
            else:
                self._reply(200, routes[path](self.server.scheduler, body))
        except ValueError as error:
            self._reply(400, {"success": False, "message": str(error)})

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= _MAX_BODY:
            self.close_connection = True
            raise ValueError(f"a body of {length} bytes is over the limit of {_MAX_BODY}.")
        raw = self.rfile.read(length)
        body = json.loads(raw) if raw else {}
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object.")
        return body

    def _allowed(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode())

    def _reply(self, status: int, content: Any) -> None:
        if status != 200:
            self.log_error("%s %s: %s", self.command, self.path, content)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _health(scheduler: Scheduler, body: dict) -> dict:
    return {"status": "healthy"}


def _model_info(scheduler: Scheduler, body: dict) -> dict:
    model = scheduler.model
    return {
        "model_path": str(model.folder),
        "weight_version": scheduler.version,
        "architectures": model.raw_config["architectures"],
    }


def _server_info(scheduler: Scheduler, body: dict) -> dict:
    dtype = str(scheduler.model.dtype).removeprefix("torch.")
    return {
        **_model_info(scheduler, body),
        "engine": "local",
        "tp_size": 1,
        "dtype": dtype,
        "device": "cpu",
        "context_length": scheduler.model.context_length,
        "max_running_requests": scheduler.max_rows,
        "paused": scheduler.paused,
    }


def _generate(scheduler: Scheduler, body: dict) -> list[dict] | dict:
    request = read_generate(body, scheduler.model)
    rows = answer(scheduler.submit(request).result(), scheduler.version)
    return rows[0] if isinstance(body["input_ids"][0], int) else rows


def _pause(scheduler: Scheduler, body: dict) -> dict:
    mode = body.get("mode", "abort")
    modes = ("abort", "retract", "in_place")
    if mode not in modes:
        raise ValueError(f"unknown pause mode {mode!r}; {hint(str(mode), modes)}")
    scheduler.call(lambda: scheduler.pause(mode)).result()
    return {"status": "ok"}


def _continue(scheduler: Scheduler, body: dict) -> dict:
    scheduler.call(scheduler.resume).result()
    return {"status": "ok"}


def _abort(scheduler: Scheduler, body: dict) -> dict:
    everything, rid = body.get("abort_all", False), body.get("rid")
    if not everything and not rid:
        raise ValueError("abort_request needs rid, or abort_all: true.")
    scheduler.call(lambda: scheduler.abort(None if everything else rid)).result()
    return {"success": True}


def _flush(scheduler: Scheduler, body: dict) -> dict:
    scheduler.call(scheduler.flush).result()
    return {"success": True}


def _update(scheduler: Scheduler, body: dict) -> dict:
    folder, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(folder, str):
        raise ValueError("update_weights_from_disk needs model_path, a folder.")
    waiting = scheduler.call(lambda: scheduler.update(folder, version)).result()
    if waiting is not None:
        waiting.result()
    return {"success": True, "message": f"loaded {folder}"}


def _begin_update(scheduler: Scheduler, body: dict) -> dict:
    scheduler.call(scheduler.begin_update).result()
    return {"success": True, "message": "Success"}


def _end_update(scheduler: Scheduler, body: dict) -> dict:
    scheduler.call(scheduler.end_update).result()
    return {"success": True, "message": "Success"}


def _load_through(scheduler: Scheduler, body: dict) -> dict:
    """SGLang's pickles stay closed: `control` says the same in JSON."""
    if body.get("load_format") != LOADER:
        raise ValueError(f"the local engine loads tensors with load_format {LOADER!r} alone.")
    controls = body.get("control")
    if not isinstance(controls, list) or len(controls) != 1 or not isinstance(controls[0], str):
        raise ValueError("update_weights_from_tensor needs control, a list of one JSON text.")
    flush = body.get("flush_cache", True) is not False
    waiting = scheduler.call(lambda: scheduler.load_through(controls[0], flush)).result()
    if waiting is not None:
        waiting.result()
    return {"success": True, "message": "Success"}


def _set_version(scheduler: Scheduler, body: dict) -> dict:
    version = body.get("new_version")
    if not isinstance(version, str):
        raise ValueError("update_weight_version needs new_version, a string.")
    if body.get("abort_all_requests", True):
        scheduler.call(lambda: scheduler.abort(None)).result()
    scheduler.call(lambda: scheduler.set_version(version)).result()
    return {"success": True, "new_version": version}


def _check_weights(scheduler: Scheduler, body: dict) -> dict:
    action = body.get("action", "checksum")
    if action != "checksum":
        raise ValueError(f"unknown action {action!r}; the local engine knows: checksum.")
    digest = scheduler.call(scheduler.checksum).result()
    return {"success": True, "per_engine_checksum": digest}


_GETS = {"/health": _health, "/model_info": _model_info, "/server_info": _server_info}
_POSTS = {
    "/generate": _generate,
    "/pause_generation": _pause,
    "/continue_generation": _continue,
    "/abort_request": _abort,
    "/flush_cache": _flush,
    "/update_weights_from_disk": _update,
    "/begin_weight_update": _begin_update,
    "/end_weight_update": _end_update,
    "/update_weights_from_tensor": _load_through,
    "/update_weight_version": _set_version,
    "/weights_checker": _check_weights,
}
