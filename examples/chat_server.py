"""Serve chats over HTTP with HuggingFace's generate: each turn computes only its new tokens.

Run: python examples/chat_server.py            two clients talk to it, then it stops
     python examples/chat_server.py --port 8000     it serves until interrupted:
     curl localhost:8000 -d '{"conversation": "a", "message": "Hello"}'
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from small_model import article, load

from pc.integrations.huggingface import enable_prefix_caching

SYSTEM = f"You answer questions about this text, briefly, in a sentence.\n\n{article('III', 'IV')}"
QUESTIONS = ("In what court is the judicial power vested?", "How many witnesses does treason need?", "Thank you.")


class Chat:
    """Conversations as token ids. Turns are appended and never encoded again, so each turn is a prefix of the next."""

    def __init__(self):
        self.model, self.tokenizer = load()
        self.handle = enable_prefix_caching(self.model, num_blocks=512)
        self.conversations: dict[str, list[int]] = {}
        self.lock = threading.Lock()  # a conversation's turns come one after another

    def encode(self, role: str, text: str) -> list[int]:
        """Encode a message in the format that SmolLM2 was trained on."""
        return self.tokenizer.encode(f"<|im_start|>{role}\n{text}<|im_end|>\n")

    def answer(self, conversation: str, message: str) -> dict[str, object]:
        """Return the answer of the next turn of a conversation, and how many tokens of its prompt were reused."""
        with self.lock:
            tokens = self.conversations.setdefault(conversation, self.encode("system", SYSTEM))
            tokens += self.encode("user", message) + self.tokenizer.encode("<|im_start|>assistant\n")
            ids = self.tokenizer.pad({"input_ids": [tokens]}, return_tensors="pt").to(self.model.device)
            output = self.model.generate(**ids, max_new_tokens=20, do_sample=False)[0].tolist()
            report = self.handle.last_requests[0]
            answer = self.tokenizer.decode(output[len(tokens) :], skip_special_tokens=True)
            tokens[:] = output
            return {"answer": answer, "prompt_tokens": report.prompt_tokens, "cached_tokens": report.cached_tokens}


def serve(chat: Chat, port: int) -> ThreadingHTTPServer:
    """Return a server on a port of this machine (0: any free port)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, result = 200, chat.answer(str(body["conversation"]), str(body["message"]))
            except (KeyError, TypeError, ValueError) as error:
                status, result = 400, {"error": f'needs {{"conversation": ..., "message": ...}}: {error}'}
            reply = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            """Print nothing for a request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def talk(url: str, conversation: str, message: str) -> dict[str, object]:
    """Send a message and return the reply, as a client does."""
    body = json.dumps({"conversation": conversation, "message": message}).encode()
    with urllib.request.urlopen(url, body) as reply:
        return json.loads(reply.read())


def main() -> None:
    """Start the server; without --port, let two clients talk to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, help="serve there until interrupted")
    parser.add_argument("--untrained", action="store_true", help="a model whose words mean nothing")
    port = parser.parse_args().port
    chat = Chat()
    server = serve(chat, port or 0)
    if port:
        print(f"http://127.0.0.1:{port}")
        server.serve_forever()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for message in QUESTIONS:
        for conversation in ("alice", "bob"):
            reply = talk(url, conversation, message)
            print(f"{conversation}: {reply['prompt_tokens']} tokens, {reply['cached_tokens']} of them reused")
        print(f"  {message} {reply['answer']}")
    server.shutdown()
    print(chat.handle.stats())


if __name__ == "__main__":
    main()
