"""A real browser for the tests of pages."""

import json
import os
import shutil
import subprocess
import time

import pytest


class Browser:
    """Chromium without a window, spoken to over a pipe in its DevTools protocol."""

    def __init__(self, folder):
        program = next(
            filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
        )
        if program is None:
            words = "no chromium on the path: `apt-get install chromium`"
            # .ci/run asks for a browser, so that these tests are not left out unseen.
            (pytest.fail if os.environ.get("REPORT_BROWSER") == "required" else pytest.skip)(words)
        theirs, self.write = os.pipe()
        self.read, answers = os.pipe()
        # 3 and 4 are where it reads and writes; bash moves ours there.
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", *words],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self.count, self.rest, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.read, 1 << 20)
                assert part, "the browser has ended"
                self.rest += part
            one, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(one)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def js(self, code):
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, code, seconds=120):
        """Waits for an expression to be true."""
        end = time.monotonic() + seconds
        while not self.js(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.1)

    def open(self, address):
        """A page in a window of the usual size and light; what came before it is forgotten."""
        self.look()
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.until(f"location.href === '{address}' && document.readyState === 'complete'")

    def look(self, width=1600, height=1000, scheme="light"):
        """The size of the window, and whether the reader likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def place(self, query):
        """The middle of what a query finds, scrolled to the middle of the window."""
        return self.js(
            f"(() => {{ const found = document.querySelector({query!r});"
            "found.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )

    def mouse(self, kind, x, y, **params):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def click(self, query):
        """A click with the mouse."""
        x, y = self.place(query)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def complaints(self):
        """Errors in the console and requests that failed."""
        bad = (
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Network.loadingFailed",
        )
        return [event for event in self.events if event["method"] in bad]

    def close(self):
        self.call("Browser.close")
        self.process.wait()
        os.close(self.read)
        os.close(self.write)
