"""Attached runs: pages behind a prefix that hold something else than the KV of further tokens.

Only keys made by `attached_key` reach an attached run. No prompt does, since token ids are not negative. The tree
evicts such a run as a whole and before its prefix, and shows none of it as text.
"""

from radix.match import Match
from radix.node import ATTACHED, TOKEN_BYTES, Node, path


def attached_key(tail: bytes, num_pages: int, page_bytes: int) -> bytes:
    """The key of an attached run, behind the key of the whole pages before it.

    Args:
        tail: int32 tokens between these pages and the run, less than a page. If there are any, the run's first page is
            theirs.
        num_pages: number of the run's other pages, at least 1.
        page_bytes: bytes of a page's tokens.
    """
    size = (num_pages + bool(tail)) * page_bytes
    return tail + ATTACHED * ((size - len(tail)) // TOKEN_BYTES)


def num_before(key: bytes, page_bytes: int) -> int:
    """Number of whole pages of a key before its attached run; all pages if there is none."""
    return len(text(key)) // page_bytes


def text(key: bytes) -> bytes:
    """The tokens of a key, int32, without the filling of an attached run."""
    return key[: key.index(ATTACHED)] if key.endswith(ATTACHED) else key


def text_of_path(node: Node | None) -> bytes:
    """The tokens of the path that ends in `node`, int32."""
    return text(b"".join(above.key for above in reversed(list(path(node)))))


def nearest(key: bytes, match: Match, root: Node | None, page_size: int) -> tuple[Node | None, int]:
    """The nearest attached run on the path of a match of `key`, and the tokens before it; (None, 0) without one."""
    last, end, page_bytes = match.node, len(match.pages), page_size * TOKEN_BYTES
    node = last or root
    if last is not None and match.node_pages < len(last.pages):
        node, end = last.parent, end - match.node_pages
    while node is not None:
        tail = key[end * page_bytes : (end + 1) * page_bytes]
        rows = min(len(tail) // TOKEN_BYTES, page_size - 1) if node.num_attached else -1
        for row in range(rows, -1, -1):
            first_page = tail[: row * TOKEN_BYTES] + ATTACHED * (page_size - row)
            if (found := node.children.get(first_page)) is not None:
                return found, end * page_size + row
        end -= len(node.pages)
        node = node.parent
    return None, 0
