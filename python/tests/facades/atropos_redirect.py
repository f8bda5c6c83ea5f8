"""Pytest plugin: Atropos' own tests of its HTTP API, unmodified, against another server.

The tests start the server of their project on port 8000 and call that port. With this plugin, their calls go to
`FACADE_URL`, and the program that they start in place of the server only waits until it is ended.
"""

import os
import subprocess
import sys

import requests

ORIGINAL = "http://localhost:8000"
FACADE = os.environ["FACADE_URL"].rstrip("/")

_request = requests.Session.request
_popen = subprocess.Popen


def request(self, method, url, *args, **kwargs):
    if not url.startswith(ORIGINAL + "/"):
        raise AssertionError(f"a test calls {url}, which is not the API server")
    return _request(self, method, FACADE + url[len(ORIGINAL) :], *args, **kwargs)


class Popen(_popen):
    def __init__(self, args, *rest, **kwargs):
        if "atroposlib.cli.run_api" in args:
            args = [sys.executable, "-c", "import time; time.sleep(3600)"]
        super().__init__(args, *rest, **kwargs)


requests.Session.request = request
subprocess.Popen = Popen
