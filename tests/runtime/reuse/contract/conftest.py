"""The strategy under contract."""

import pytest

from tests.runtime.reuse.contract.subject import Subject
from tests.runtime.reuse.contract.subjects import SUBJECTS


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(request) -> Subject:
    return SUBJECTS[request.param].make(request.getfixturevalue)
