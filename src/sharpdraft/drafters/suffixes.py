"""Where the end of a text has stood before: an index that grows with the text, and shrinks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LONGEST = 12
"""As many tokens as are compared at most."""


class Suffixes:
    """The longest earlier occurrence of every prefix's last tokens, at most LONGEST of them.

    A tree of contexts read backwards: a node stands for some tokens in a row, its children for the
    same with one more token before them, and it knows where they last ended. Below a node that came
    only once there is nothing yet; it gets its first child when it comes again. So a token that is
    added costs as many steps as its match is long, and one more; taken away, the same.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        # Of each token: how many tokens up to it were seen before, and where these last ended.
        self.lengths = bytearray()
        self.ends = array("i")
        # Nodes by their parent and the token before it; 0 is the root.
        self.nodes: dict[int, int] = {}
        # Where each node's tokens last ended; ~end where they came only there.
        self.last = array("i", [0])
        # What stood there before, node by node of every token's path.
        self.before = array("i")
        # How often something was taken away.
        self.cuts = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        """Put a token behind the text."""
        end, node, depth, seen = len(self.tokens), 0, 0, -1
        self.tokens.append(token)
        for depth in range(min(LONGEST, end + 1)):
            key = node << 32 | self.tokens[end - depth]
            child = self.nodes.get(key)
            if child is None:
                self._grow(key, end)
                break
            node, seen = child, self.last[child]
            self.before.append(seen)
            if seen < 0:
                seen = ~seen
                if depth + 1 < LONGEST and depth < seen:
                    self._grow(node << 32 | self.tokens[seen - depth - 1], seen)
            self.last[node] = end
        else:
            depth += 1
        self.lengths.append(depth)
        self.ends.append(seen)

    def _grow(self, key: int, end: int) -> None:
        self.nodes[key] = len(self.last)
        self.last.append(~end)

    def _fell(self, key: int) -> None:
        del self.nodes[key]
        self.last.pop()

    def cut(self, length: int) -> None:
        """Take away all behind the first `length` tokens, as if it had never been there."""
        self.cuts += len(self.tokens) > length
        while len(self.tokens) > length:
            self._pop()

    def _pop(self) -> None:
        end, depth = len(self.tokens) - 1, self.lengths.pop()
        path, node = [], 0
        for k in range(depth):
            node = self.nodes[node << 32 | self.tokens[end - k]]
            path.append(node)
        # In the reverse order of `add`: the youngest node is the last one.
        if depth < min(LONGEST, end + 1):
            self._fell(node << 32 | self.tokens[end - depth])
        for k in range(depth, 0, -1):
            node, seen = path[k - 1], self.before.pop()
            self.last[node] = seen
            if seen < 0 and k < LONGEST and k <= ~seen:
                self._fell(node << 32 | self.tokens[~seen - k])
        self.ends.pop()
        self.tokens.pop()

    def put(self, at: int, tokens: Sequence[int]) -> None:
        """Let tokens stand from `at` on, `at` being within the text or at its end. Where others
        stood there, these and all behind them are gone; where the same did, nothing is done."""
        for place, token in enumerate(tokens, at):
            if place < len(self.tokens):
                if self.tokens[place] == token:
                    continue
                self.cut(place)
            self.add(token)
