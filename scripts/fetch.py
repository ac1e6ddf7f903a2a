"""Files over https, received whole and checked, or not at all.

A file is received under `.partial/` beside its place, continued where an earlier command was cut
off, and gets its name when it is whole and checked. SHA256SUMS beside it notes what came, in the
form of sha256sum; what is there is compared with it by every later command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError as BrokenOff
from urllib3.util import Retry

from training.errors import UserError
from training.files import sha256, sync, write_text

SUMS, PARTIAL = "SHA256SUMS", ".partial"
TRIES = 6  # of a request, and of a body that breaks off
PAUSE = 1.0  # seconds before the second try of a request; doubled for each further one
PASSING = (408, 429, 500, 502, 503, 504)  # statuses that may be others a moment later
TIMEOUT = (20, 60)  # seconds until a connection, and between two bytes
CHUNK, REPORT_SECONDS = 1 << 20, 10.0
AGAIN = "give the same command again, which goes on where it stopped"


@dataclass(frozen=True)
class File:
    """A published file of `size` bytes; where that is not `exact`, of at most twice as many."""

    url: str
    path: Path
    size: int
    sha256: str | None = None
    exact: bool = True
    check: Callable[[Path], None] = lambda path: None
    """Raises UserError for content that is not what it should be; for files without checksum."""

    @property
    def most(self) -> int:
        return self.size if self.exact else 2 * self.size


class Fetcher:
    """Fetches files over https, or from a mirror."""

    def __init__(self, mirror: str | None = None) -> None:
        adapter = HTTPAdapter(
            max_retries=Retry(
                total=TRIES - 1,
                backoff_factor=PAUSE,
                status_forcelist=PASSING,
                allowed_methods=None,
                raise_on_status=False,
                retry_after_max=60,
            )
        )
        self.session = requests.Session()
        self.session.adapters.clear()  # http goes nowhere, also when redirected to
        self.session.mount("https://", adapter)
        self.session.max_redirects = 5
        self.mirror = f"{mirror.rstrip('/')}/" if mirror else "https://"
        try:
            scheme, host = urlsplit(self.mirror).scheme, urlsplit(self.mirror).hostname
        except ValueError as error:
            raise UserError(f"--mirror: {mirror} given ({error}); expected https://HOST") from None
        if scheme == "http" and host in ("127.0.0.1", "::1", "localhost"):
            self.session.mount(self.mirror, adapter)
            self.session.trust_env = False  # no proxy stands between a machine and itself
        elif scheme != "https":
            raise UserError(f"--mirror: {mirror} given; expected https://, as http can be forged")

    def request(self, method: str, url: str, **options: object) -> requests.Response:
        """The answer to a request that succeeded; UserError, naming the address, for others."""
        url = self.mirror + url.removeprefix("https://")
        try:
            answer = self.session.request(method, url, timeout=TIMEOUT, **options)
        except requests.exceptions.InvalidSchema as error:
            raise UserError(f"{url}: a redirect leaves https ({error}); refused") from None
        except requests.TooManyRedirects:
            raise UserError(f"{url}: more than {self.session.max_redirects} redirects") from None
        except requests.RequestException as error:
            raise UserError(
                f"{url}: cannot be reached ({type(error).__name__}); check the network, or fetch "
                f"from a copy with --mirror; {AGAIN}"
            ) from None
        if not answer.ok and answer.status_code != 416:
            answer.close()
            raise UserError(
                f"{url}: the server answers {answer.status_code} {answer.reason}; try again later, "
                "or fetch from a copy with --mirror"
            )
        return answer

    def fetch(self, file: File) -> None:
        """Fetches a file unless it is there; either way it is checked. UserError says what to do.

        What is there and neither published with a checksum nor noted yet is checked and noted.
        """
        if file.path.exists():
            settle(file, file.path)
            return
        part = file.path.parent / PARTIAL / file.path.name
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            self._receive(file, part)
            sync(part)
        except OSError as error:
            raise UserError(
                f"{part}: cannot write: {error.strerror or error}; expected room for "
                f"{amount(file.size)}; {AGAIN}"
            ) from None
        settle(file, part)
        os.replace(part, file.path)

    def _receive(self, file: File, part: Path) -> None:
        """Receives a file's bytes, in several requests if the connection breaks off."""
        for left in reversed(range(TRIES)):
            try:
                self._receive_rest(file, part)
                return
            except BrokenOff as error:
                if not left:
                    raise UserError(
                        f"{file.url}: broke off {TRIES} times, the last time with "
                        f"{type(error).__name__}: {error}; {AGAIN}"
                    ) from None
                time.sleep(PAUSE)

    def _receive_rest(self, file: File, part: Path) -> None:
        """Receives what `part` lacks; BrokenOff where another try may get on."""
        start = part.stat().st_size if part.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with self.request("GET", file.url, headers=headers, stream=True) as answer:
            span = answer.headers.get("Content-Range", "")
            if answer.status_code == 416 and start and span == f"bytes */{start}":
                return  # nothing was missing
            if answer.status_code == 416 or (
                answer.status_code == 206 and not span.startswith(f"bytes {start}-")
            ):
                part.unlink(missing_ok=True)
                raise BrokenOff(f"the server goes on at {span or 'no byte'}, not at {start}")
            _check_offer(file, answer, start if answer.status_code == 206 else 0)
            # A server without ranges answers 200 and sends all of it again.
            with open(part, "ab" if answer.status_code == 206 else "wb") as opened:
                due = time.monotonic() + REPORT_SECONDS
                for chunk in answer.raw.stream(CHUNK, decode_content=False):
                    opened.write(chunk)
                    if opened.tell() > file.most:
                        part.unlink()
                        raise UserError(f"{file.url}: more than the {file.most} bytes expected")
                    if time.monotonic() > due:
                        say(f"{file.path}: {amount(opened.tell())} of {amount(file.size)}")
                        due = time.monotonic() + REPORT_SECONDS
        if file.exact and part.stat().st_size != file.size:
            raise BrokenOff(f"{part.stat().st_size} bytes came, expected {file.size}")


def _check_offer(file: File, answer: requests.Response, start: int) -> None:
    """UserError for a web page in place of the file, and for a file of another size."""
    kind, length = (answer.headers.get(f"Content-{name}", "") for name in ("Type", "Length"))
    if "html" in kind:
        raise UserError(
            f"{file.url}: a web page came in place of the file (a login, or a proxy's message?); "
            "look at the address in a browser, or fetch from a copy with --mirror"
        )
    total = start + int(length) if length.isdecimal() else None
    if total is not None and (total > file.most or (file.exact and total < file.size)):
        bound = "" if file.exact else "at most "
        raise UserError(
            f"{file.url}: the server has {total} bytes, expected {bound}{file.most}; it is not the "
            "published file"
        )


def settle(file: File, path: Path) -> None:
    """Checks the content of a file, or of what becomes it, and notes its SHA-256.

    UserError if that is neither what is published nor what was noted, or the content is wrong;
    what was received is deleted then, and kept where only the note cannot be read or written.
    """
    sums, before = file.path.parent / SUMS, noted(file.path.parent)
    name, digest = file.path.name, sha256(path)
    try:
        _check_content(file, path, digest, before.get(name))
    except UserError:
        if path != file.path:
            path.unlink()
        raise
    if before.get(name) != digest:
        before[name] = digest
        write_text(sums, "".join(f"{before[name]}  {name}\n" for name in sorted(before)))


def _check_content(file: File, path: Path, digest: str, before: str | None) -> None:
    """UserError if content of this SHA-256 is not the file's, whose noted one is `before`."""
    sums = file.path.parent / SUMS
    expected, source = file.sha256 or before, "published" if file.sha256 else f"in {sums}"
    if expected not in (None, digest):
        action = f"delete it and {AGAIN}" if path == file.path else "it is deleted; try again"
        if not file.sha256:
            action += f", or delete its line in {SUMS} if another file is published now"
        raise UserError(
            f"{path}: its SHA-256 is {digest}, but the one {source} is {expected}; {action}"
        )
    if before != digest:
        file.check(path)


def noted(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder, as they were when it came."""
    sums = folder / SUMS
    try:
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        raise UserError(
            f"{sums}: not lines of a SHA-256, two spaces and a name; delete it, and {AGAIN}"
        ) from None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def amount(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
