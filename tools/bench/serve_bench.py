#!/usr/bin/env python3
"""Requests per second of an OpenAI endpoint, and how long its clients wait. Standard library only.

  serve_bench.py --url http://127.0.0.1:8080/v1 --image a.png --clients 64 --requests 640

Every request streams its answer to one image and a question of its own. Prints a line of JSON: requests and tokens per
second, and percentiles (50, 90, 99) in milliseconds of the time to the first token and of the time that a token takes after
it (by request, both on the server's clock), of the longest time between two texts of an answer, and of a whole request.
"""

import argparse
import base64
import concurrent.futures
import http.client
import json
import math
import sys
import threading
import time
import urllib.parse
from pathlib import Path

PERCENTILES = (50, 90, 99)


def percentiles(values):
    """Nearest rank."""
    ordered = sorted(values)
    return {f"p{p}": round(1000 * ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)], 2) for p in PERCENTILES} if ordered else {}


def body_of(options, image, number):
    """Questions of one length that differ from the start."""
    text = f"{number:06} " + "What is in the image? " * (options.text_bytes // 22 + 1)
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text[: options.text_bytes]}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": options.max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    if options.kv:
        body["kv"] = options.kv[number % len(options.kv)]
    return json.dumps(body)


def ask(address, path, body):
    """Seconds to the first token, for a token, longest between two texts, and to the end; tokens of the answer and of the prompt."""
    start = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=600)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"serve_bench.py: the server answers {response.status}: {response.read().decode()}")
    first, token, gap, latest, tokens, prompt = 0, 0, 0, None, 0, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            raise SystemExit(f"serve_bench.py: the server answers {event['error']['message']}")
        if any(choice["delta"].get("content") for choice in event["choices"]):
            now = time.monotonic()
            gap, latest = max(gap, now - (latest or now)), now
        if event.get("usage"):
            tokens, prompt = event["usage"]["completion_tokens"], event["usage"]["prompt_tokens"]
            of_server = event.get("kvlm", {})
            first = of_server.get("ttft_ms", 0) / 1000
            token = of_server.get("decode_ms", 0) / 1000 / max(1, tokens - 1)
    connection.close()
    return first, token, gap, time.monotonic() - start, tokens, prompt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="of the endpoint")
    parser.add_argument("--image", type=Path, required=True, help="shown with every request")
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--requests", type=int, default=640, help="in all, after one for each client that is not counted")
    parser.add_argument("--text-bytes", type=int, default=230, help="of the question")
    parser.add_argument("--max-tokens", type=int, default=70, help="of an answer")
    parser.add_argument("--kv", action="append", help="cache policy, instead of the server's; several take turns")
    options = parser.parse_args()
    url = urllib.parse.urlparse(options.url)
    image = "data:image/png;base64," + base64.b64encode(options.image.read_bytes()).decode()
    failed = threading.Event()

    def run(number):
        if failed.is_set():
            return None
        try:
            return ask((url.hostname, url.port), url.path + "/chat/completions", body_of(options, image, number))
        except OSError as error:
            failed.set()
            raise SystemExit(f"serve_bench.py: {options.url}: {error}; start vlm-serve, or name it with --url") from None
        except BaseException:
            failed.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
        list(pool.map(run, range(options.clients)))
        start = time.monotonic()
        answers = list(pool.map(run, range(options.clients, options.clients + options.requests)))
        seconds = time.monotonic() - start
    first, token, gap, whole, tokens, prompts = zip(*answers, strict=True)
    print(json.dumps({
        "clients": options.clients, "requests": options.requests, "prompt_tokens": max(prompts),
        "requests_per_s": round(options.requests / seconds, 2),
        "tokens_per_s": round(sum(tokens) / seconds, 1),
        "first_token_ms": percentiles(first), "token_ms": percentiles(token), "gap_ms": percentiles(gap), "request_ms": percentiles(whole),
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
