"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port, no package.

https://chromedevtools.github.io/devtools-protocol/ says what the methods and events mean.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
NO_CHROMIUM = f"no browser: none of {', '.join(NAMES)} is on the PATH (Debian: apt-get install chromium)"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)


class Browser:
    """One browser for many pages; a context manager. `profile` is a folder of its own."""

    def __init__(self, profile, timeout_s=60):
        self._timeout_s = timeout_s
        self._number = 0
        self._buffer = b""
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        self._process = subprocess.Popen(
            # The browser reads its file descriptor 3 and writes to 4.
            [
                *("sh", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'),
                *(CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
        )
        os.close(to_read)
        os.close(to_write)
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method, session=None, /, **params):
        """Sends a command and waits for its answer; events that come before it are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address, *, width=1280, height=900, dark=False, phone=False, wait_for_ready=True):
        """A page of its own at the address (or path of a file), once its script says that it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        if phone:
            page.call("Emulation.setTouchEmulationEnabled", enabled=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.go(address, wait_for_ready=wait_for_ready)
        return page


class Page:
    """A tab."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def go(self, address, *, wait_for_ready=True):
        address = Path(address).resolve().as_uri() if not str(address).startswith(("http:", "file:")) else address
        self.call("Page.navigate", url=str(address))
        if wait_for_ready:
            self.wait("document.documentElement.dataset.ready === 'true'")

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait(self, expression, timeout_s=30):
        """Waits until the expression holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.run(expression):
                    return
            except RuntimeError:  # the page is being replaced
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not come true; problems: {self.problems()}")
            time.sleep(0.05)

    def click(self, selector):
        """Clicks the middle of the first element that matches, as a mouse would; it must be in sight and on top."""
        point = self.run(
            f"""(() => {{
                const node = document.querySelector({json.dumps(selector)});
                if (!node) throw new Error("nothing matches " + {json.dumps(selector)});
                node.scrollIntoView({{ block: "center", behavior: "instant" }});
                const box = node.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                const top = document.elementFromPoint(x, y);
                if (!node.contains(top)) throw new Error("covered by " + (top && top.outerHTML.slice(0, 200)));
                return [x, y];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], button="left", buttons=1, clickCount=1
            )

    def choose(self, selector, value):
        """Sets a select or an input as a user would."""
        event = "change" if self.run(f"document.querySelector({json.dumps(selector)}).tagName") == "SELECT" else "input"
        self.run(
            f"""(() => {{
                const node = document.querySelector({json.dumps(selector)});
                node.value = {json.dumps(value)};
                if (node.value !== {json.dumps(value)}) throw new Error("no such option");
                node.dispatchEvent(new Event({json.dumps(event)}, {{ bubbles: true }}));
            }})()"""
        )

    def text(self, selector="body"):
        """The visible text of the first element that matches."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def html(self):
        return self.run("document.documentElement.outerHTML")

    def scrolls_sideways(self):
        """Whether the page is wider than its window, which nobody wants to read on a phone."""
        return self.run("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    def screenshot(self, file, *, whole=True):
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 16000), "scale": 1}
        extra = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        Path(file).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **extra)["data"]))

    def problems(self):
        """What the page threw, logged or was refused by its security policy."""
        self.run("0")
        texts = []
        for event in self._mine():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                texts.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded":
                texts.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                texts.append(str(params["args"]))
            elif event["method"] == "Page.javascriptDialogOpening":
                texts.append(f"dialog: {params['message']}")
        return texts

    def requests(self):
        """The addresses that were asked for, but for the page itself."""
        sent = [e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith(("data:", "about:"))]

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _mine(self):
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
