"""A headless Chromium, driven over its debugging socket, and a TensorBoard for it to look at."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import websocket

PATIENCE_S = 90
"""How long any one thing may take on a busy machine."""

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    "--window-size=1600,2400",
)

_VISIBLE = """
function visible(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.textContent;
  if (node instanceof Element) {
    if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.tagName)) return '';
    if (getComputedStyle(node).display === 'none') return '';
  }
  const parts = [];
  if (node.shadowRoot) parts.push(visible(node.shadowRoot));
  for (const child of node.childNodes) parts.push(visible(child));
  return parts.join(' ');
}
"""
"""Text of a page through all shadow roots, which neither innerText nor --dump-dom goes into."""


def find_chromium() -> str | None:
    """The browser's path, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def _line_with(stream: Any, text: str) -> str:
    """The first line that contains `text`; goes on reading the rest so that the pipe never fills."""
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            threading.Thread(target=stream.read, daemon=True).start()
            return str(line)
    raise AssertionError(f"no {text!r} in the output:\n{''.join(seen)}")


@contextlib.contextmanager
def _running(command: list[str], sign: str, **options: Any) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)
    guard = threading.Timer(PATIENCE_S, process.kill)
    guard.start()
    try:
        line = _line_with(process.stderr, sign)
        guard.cancel()
        yield line
    finally:
        guard.cancel()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def tensorboard(folder: Path, *flags: str) -> Iterator[str]:
    """Starts TensorBoard on a free port; gives its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with _running([*command, "--port", "0", *flags], " at http://", env=environment) as line:
        yield line.split(" at ")[1].split()[0]


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(
            address, timeout=PATIENCE_S, suppress_origin=True, http_no_proxy=["*"]
        )
        self._number = 0
        self._call("Page.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def show(self, address: str) -> None:
        """Loads a page, from nothing also where only the part after ``#`` differs."""
        for where in ("about:blank", address):
            self._call("Page.navigate", url=where)
            while json.loads(self._socket.recv()).get("method") != "Page.loadEventFired":
                pass

    def run(self, script: str) -> Any:
        """What the body of an async function returns."""
        found = self._call(
            "Runtime.evaluate",
            expression=f"(async () => {{ {_VISIBLE} {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> str:
        """Waits until the JavaScript expression holds; gives the text of the page."""
        text = self.run(f"""
            const end = Date.now() + {(PATIENCE_S - 10) * 1000};
            while (Date.now() < end) {{
                if ({condition}) return 'yes ' + visible(document.body);
                await new Promise(done => setTimeout(done, 200));
            }}
            return 'no ' + visible(document.body);
        """)
        assert text.startswith("yes "), f"never {condition}; the page shows:\n{' '.join(text.split())}"
        return " ".join(text.split())


@contextlib.contextmanager
def page(chromium: str, profile: Path) -> Iterator[Page]:
    """Starts a browser with an empty profile; gives its first tab."""
    command = [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with _running(command, "DevTools listening on") as line:
        port = line.split("127.0.0.1:")[1].split("/")[0]
        opener = build_opener(ProxyHandler({}))
        request = Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
        with opener.open(request, timeout=PATIENCE_S) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        tab = Page(address)
        try:
            yield tab
        finally:
            tab._socket.close()
