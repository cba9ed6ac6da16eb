"""A gateway whose sessions a test leads, and a client of plain HTTP."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


class Client:
    """Makes requests of a session, each on a connection of its own."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.url = urlsplit(base_url)
        self.headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def begin(
        self, fields: dict[str, Any], route: str = "/chat/completions"
    ) -> http.client.HTTPConnection:
        """Send a request; its answer is read later."""
        assert self.url.hostname is not None
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=120)
        connection.request("POST", self.url.path + route, json.dumps(fields), self.headers)
        return connection

    def post(self, route: str = "/chat/completions", **fields: Any) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        return read(self.begin(fields, route))

    def say(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the message that answers; raises if there is none."""
        status, answer = self.post(messages=messages, **fields)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


def read(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    """Return status and JSON of a connection's answer."""
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body)
