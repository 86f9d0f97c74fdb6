"""The resumable store: cut lines, keys, headers."""

from __future__ import annotations

import pytest

from loadgen.micro.records import Records
from runtime.errors import ModelError


@pytest.mark.parametrize("header", [None, {"model": "tiny", "ratios": (50, 90)}])
@pytest.mark.parametrize("cut", ['{"of": {"case": 2}, "outco', '{"of": {"case": 2}, "outcome": 7}'])
def test_an_interrupted_run_leaves_whole_records(tmp_path, header, cut):
    path = tmp_path / "records.jsonl"
    Records(path, header).put({"case": 1, "dtype": "float32"}, {"answers": 3})
    with path.open("a") as file:
        file.write(cut)
    records = Records(path, header)
    assert records.get({"dtype": "float32", "case": 1}) == {"answers": 3}
    assert records.get({"case": 2}) is None
    records.put({"case": 2}, [0.5])
    records.put("name", 1)
    records.put("name", 2)
    again = Records(path, header)
    assert (again.get({"case": 2}), again.get("name")) == ([0.5], 2)
    assert again.get({"case": 1, "dtype": "float32"}) == {"answers": 3}


def test_a_file_with_a_cut_header_is_begun_anew(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"header": {"mod')
    Records(path, {"model": "a"}).put("key", 1)
    assert Records(path, {"model": "a"}).get("key") == 1


@pytest.mark.parametrize("begun", [None, {"model": "b"}])
def test_outcomes_of_another_header_are_refused(tmp_path, begun):
    path = tmp_path / "records.jsonl"
    Records(path, begun).put("key", 1)
    with pytest.raises(ModelError, match="other settings"):
        Records(path, {"model": "a"})
