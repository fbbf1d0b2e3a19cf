"""The handshake that opens every connection. Needs only the standard library.

Both sides know a secret. The caller sends ``GREETING_BYTES``: a mark, a nonce, and the nonce's HMAC. The listener
answers with another HMAC of that nonce, which authenticates the listener too; the secret itself is never sent. A
listener accepts each nonce once. Later traffic is neither encrypted nor signed: the handshake keeps out processes that
can reach the port, but not attackers who can change packets in transit.
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
    """The connecting side: one greeting and the answer that it expects."""

    def __init__(self, secret: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        self.greeting = MARK + nonce + _proof(secret, b"caller", nonce)
        self._answer = _proof(secret, b"listener", nonce)

    def accepts(self, answer: bytes) -> bool:
        """Whether the answer proves that the listener knows the secret."""
        return hmac.compare_digest(answer, self._answer)


class Doorkeeper:
    """The listening side: accepts callers that know the secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._nonces: set[bytes] = set()

    def may_become_greeting(self, data: bytes) -> bool:
        """Whether more bytes could complete a greeting; a peer that starts with other bytes can be rejected at once."""
        return len(data) <= GREETING_BYTES and data[: len(MARK)] == MARK[: len(data)]

    def answer(self, greeting: bytes) -> bytes | None:
        """Return the answer for a caller that knows the secret; None for other callers and for a reused greeting.

        Args:
            greeting: GREETING_BYTES bytes.
        """
        nonce, proof = greeting[len(MARK) : -ANSWER_BYTES], greeting[-ANSWER_BYTES:]
        known = hmac.compare_digest(proof, _proof(self._secret, b"caller", nonce))
        if len(greeting) != GREETING_BYTES or greeting[: len(MARK)] != MARK or not known or nonce in self._nonces:
            return None
        self._nonces.add(nonce)
        return _proof(self._secret, b"listener", nonce)


def _proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), side + b":" + nonce, hashlib.sha256).digest()
