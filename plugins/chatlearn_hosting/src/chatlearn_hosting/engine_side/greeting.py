"""What a peer says before anything else that it sends is read. Needs the standard library only.

Both sides know a secret. The caller sends ``GREETING_BYTES``: a mark, a nonce, and the nonce's HMAC. The listener
answers with another HMAC of that nonce, so the caller knows the listener too, and the secret itself never travels. A
listener takes each nonce once. What follows is neither encrypted nor signed: this keeps out who can reach a port, not
who can change packets on their way.
"""

from __future__ import annotations

import hashlib
import hmac
import os

MARK = b"chatlearn-hello1"
NONCE_BYTES = 16
ANSWER_BYTES = 32
GREETING_BYTES = len(MARK) + NONCE_BYTES + ANSWER_BYTES


class Caller:
    """The side that connects: one greeting and the answer that it expects."""

    def __init__(self, secret: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        self.greeting = MARK + nonce + _proof(secret, b"caller", nonce)
        self._answer = _proof(secret, b"listener", nonce)

    def accepts(self, answer: bytes) -> bool:
        """Whether the listener knows the secret."""
        return hmac.compare_digest(answer, self._answer)


class Doorkeeper:
    """The side that listens: tells callers that know the secret from all others."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._nonces: set[bytes] = set()

    def may_become_greeting(self, data: bytes) -> bool:
        """Whether more bytes could complete it; a peer that began with other bytes is not waited for."""
        return len(data) <= GREETING_BYTES and data[: len(MARK)] == MARK[: len(data)]

    def answer(self, greeting: bytes) -> bytes | None:
        """What to send to a caller that knows the secret; None for any other, and for a greeting that was used before.

        Args:
            greeting: [GREETING_BYTES].
        """
        nonce, proof = greeting[len(MARK) : -ANSWER_BYTES], greeting[-ANSWER_BYTES:]
        known = hmac.compare_digest(proof, _proof(self._secret, b"caller", nonce))
        if len(greeting) != GREETING_BYTES or greeting[: len(MARK)] != MARK or not known or nonce in self._nonces:
            return None
        self._nonces.add(nonce)
        return _proof(self._secret, b"listener", nonce)


def _proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), side + b":" + nonce, hashlib.sha256).digest()
