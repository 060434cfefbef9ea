"""A reward server with nothing but the standard library: `python server.py 8000`, then `reward.urls` of the recipe.

Each POST has one response in JSON, as docs/rewards.md describes; the answer is its reward. A real server would do here
what takes a GPU, a compiler or another machine.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RewardHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last_word = request["response"].split()[-1:]
        is_right = last_word == [str(request["label"])]
        answer = {"reward": float(is_right), "parts": {"right": float(is_right)}, "answer": "".join(last_word)}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), RewardHandler).serve_forever()
