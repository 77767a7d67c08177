"""What the demo's jobs talk to, on loopback: a mail server, and a web server with a picture and two webhook endpoints."""

import http.server
import struct
import subprocess
import sys
import threading
import time
import zlib

import lib

AIOSMTPD = "aiosmtpd==1.4.6"


def picture(width, height):
    """A PNG: a sky, a sun and a hill, so that a person sees at a glance whether it was resized or only cut."""
    rows = bytearray()
    for y in range(height):
        rows.append(0)  # no filter
        hill = height * 0.72
        for x in range(width):
            if (x - width * 0.75) ** 2 + (y - height * 0.25) ** 2 < (height * 0.12) ** 2:
                rows += b"\xff\xd8\x40"
            elif y > hill - height * 0.25 * max(0.0, 1 - ((x - width * 0.3) / (width * 0.35)) ** 2):
                rows += bytes((40, 110 + 60 * y // height, 50))
            else:
                rows += bytes((90 + 100 * y // height, 150 + 60 * y // height, 240))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")


class Web:
    """GET *.png gives a picture; POST to a path with "hold" in it answers after a minute; any other POST at once."""

    def __init__(self, port):
        self.posts, self.held = [], threading.Event()
        image = picture(1200, 800)
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, "image/png", image) if self.path.endswith(".png") else self.answer(404, "text/plain", b"")

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if "hold" in self.path:
                    web.held.set()
                    time.sleep(60)
                else:
                    web.posts.append((f"{self.command} {self.path}", dict(self.headers), body))
                try:
                    self.answer(200, "application/json", b"{}")
                except OSError:
                    pass  # the worker has hung up: its job was cancelled

            def answer(self, code, kind, body):
                self.send_response(code)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()


class Mail:
    """A mail server that keeps what it gets, as it arrived."""

    def __init__(self, port):
        sys.path.insert(0, str(self.library()))
        from aiosmtpd.controller import Controller

        self.messages = messages = []

        class Handler:
            async def handle_DATA(self, _server, _session, envelope):
                messages.append((envelope.mail_from, envelope.rcpt_tos, envelope.content.decode(errors="replace")))
                return "250 OK"

        self.controller = Controller(Handler(), hostname="127.0.0.1", port=port)
        self.controller.start()

    @staticmethod
    def library():
        """aiosmtpd, from PyPI, in the cache: nothing is installed into the system's Python."""
        return lib.python_packages(AIOSMTPD)
