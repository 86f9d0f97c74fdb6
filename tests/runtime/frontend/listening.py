"""Who hears the Outputs of a submission, without a stream."""

from collections.abc import Callable

from runtime.errors import RametError
from runtime.frontend.output import Output, Submission


class Listener:
    """`put`: called with each Output or error."""

    def __init__(self, put: Callable[[Output | RametError], None]):
        self.put = put

    def add(self, submission: Submission, tokens: list[int]) -> int:
        return 0
