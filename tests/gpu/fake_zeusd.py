"""A stand-in for the Zeus daemon: `python fake_zeusd.py <socket path or port> [token]`, on the emulated NVML."""

from __future__ import annotations

import json
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pynvml

TOKEN = sys.argv[2] if len(sys.argv) > 2 else None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if urlsplit(self.path).path == "/discover":
            gpus = [
                {"id": i, "name": pynvml.nvmlDeviceGetName(handle), "pci_address": f"0000:{1 + 64 * i:02x}:00.0"}
                for i, handle in enumerate(handles)
            ]
            self.answer({"gpus": gpus, "cpus": [], "enabled_api_groups": ["gpu-control"], "auth_required": bool(TOKEN)})
        else:
            energy = {i: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for i, handle in enumerate(handles)}
            self.answer({str(i): {"energy_mj": value} for i, value in energy.items()})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if TOKEN and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer("the token was refused", 401)
            return
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(query["gpu_ids"]))
        try:
            if url.path == "/gpu/set_power_limit":
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, int(query["power_limit_mw"]))
            elif url.path == "/gpu/set_gpu_locked_clocks":
                low, high = int(query["min_clock_mhz"]), int(query["max_clock_mhz"])
                pynvml.nvmlDeviceSetGpuLockedClocks(handle, low, high)
            else:
                pynvml.nvmlDeviceResetGpuLockedClocks(handle)
        except pynvml.NVMLError_NoPermission:
            self.answer("no permission", 403)
        except pynvml.NVMLError as error:
            self.answer(str(error), 400)
        else:
            self.answer(None)

    def answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    pynvml.nvmlInit()
    where = sys.argv[1]
    server: socketserver.BaseServer
    if where.isdigit():
        server = socketserver.TCPServer(("127.0.0.1", int(where)), Handler)
        print(server.server_address[1], flush=True)
    else:
        Path(where).unlink(missing_ok=True)
        server = socketserver.UnixStreamServer(where, Handler)
        print(where, flush=True)
    server.serve_forever()
