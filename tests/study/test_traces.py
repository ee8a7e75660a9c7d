"""The reader of arrivals: row by row, bad rows by their line; the embedded ones are our own."""

from __future__ import annotations

import itertools

import pytest

from kvlab.study.traces import EMBEDDED, Arrival, AzureArrivals, TraceError, draw_arrivals
from tests.support import require

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2024-01-01 00:00:00.0000000,10,2"
LATER = "2024-01-01 00:00:01.5000000,20,3"


def written(tmp_path, *lines, end="\n"):
    path = tmp_path / "mine.csv"
    path.write_bytes((end.join(lines) + end).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_become_records(tmp_path, end):
    rows = list(AzureArrivals(written(tmp_path, HEAD, GOOD, LATER, "", end=end)))
    assert rows == [Arrival(0.0, 10, 2), Arrival(1.5, 20, 3)]
    assert rows[1].final_tokens == 23


BAD = [("2024-01-01 00:00:02,20", "3 cells"), ("yesterday,20,3", "TIMESTAMP"),
       ("2024-01-01 00:00:02,20.5,3", "ContextTokens"), ("2024-01-01 00:00:02,-4,3", "ContextTokens"),
       ("2024-01-01 00:00:02,20,0", "GeneratedTokens"),
       ("2024-01-01 00:00:02,20,", "GeneratedTokens"), ("2023-12-31 00:00:02,20,1", "earlier"),
       ("2024-01-01 00:00:02,20,1,9", "3 cells"), ("2024-01-01 00:00:02+00:00,20,1", "time zone"),
       ("2024-01-01 00:00:02,²,1", "ContextTokens")]


@pytest.mark.parametrize(("row", "says"), BAD)
def test_a_bad_row_names_its_line_and_can_be_counted(tmp_path, row, says):
    path = written(tmp_path, HEAD, GOOD, row, LATER, row)
    with pytest.raises(TraceError, match=says) as error:
        list(AzureArrivals(path))
    assert error.value.line == 3 and str(path) in str(error.value)
    lenient = AzureArrivals(path, skip_bad=True)
    for _ in range(2):
        assert len(list(lenient)) == 2
        assert lenient.skipped == 2 and lenient.first_skipped.line == 3


@pytest.mark.parametrize("lines", [[""], ["a,b,c", GOOD], [GOOD]])
def test_a_file_of_another_form_is_refused_even_when_bad_rows_are_skipped(tmp_path, lines):
    with pytest.raises(TraceError, match="line 1"):
        list(AzureArrivals(written(tmp_path, *lines), skip_bad=True))


def test_a_missing_or_binary_file_is_named(tmp_path):
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nowhere.csv", tmp_path / "mine.csv", tmp_path):
        with pytest.raises(TraceError, match="readable"):
            list(AzureArrivals(path))


ZONED = "2024-05-10 00:00:00.009930+00:00,2162,5"


def test_rows_of_2024_have_a_time_zone_each(tmp_path):
    path = written(tmp_path, HEAD, ZONED, "2024-05-10 00:00:01+00:00,20,3")
    assert list(AzureArrivals(path)) == [Arrival(0.0, 2162, 5), Arrival(0.99007, 20, 3)]
    with pytest.raises(TraceError, match="time zone") as error:
        list(AzureArrivals(written(tmp_path, HEAD, ZONED, "2024-05-10 00:00:01,20,3")))
    assert error.value.line == 3


def test_a_row_may_not_be_earlier_than_the_one_before_it(tmp_path):
    path = written(tmp_path, HEAD, GOOD, LATER, "2024-01-01 00:00:01,20,3", "2024-01-01 00:00:01.5,20,3")
    with pytest.raises(TraceError, match="line 4: the row is earlier"):
        list(AzureArrivals(path))
    assert [row.at for row in AzureArrivals(path, skip_bad=True)] == [0.0, 1.5, 1.5]


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(f"{HEAD}\n{GOOD}\n".encode() + b"\xff\n")
    lenient = AzureArrivals(path, skip_bad=True)
    assert len(list(lenient)) == 1 and "line 3: byte 1 is not UTF-8" in str(lenient.first_skipped)


def test_rows_come_one_by_one(tmp_path):
    path = written(tmp_path, HEAD, GOOD, "broken")
    assert next(iter(AzureArrivals(path))) == Arrival(0.0, 10, 2)


def test_the_embedded_arrivals_are_the_stated_model():
    assert EMBEDDED.read_text().splitlines() == list(draw_arrivals())
    rows = list(AzureArrivals(EMBEDDED))
    assert len(rows) == 600 and all(a.at <= b.at for a, b in itertools.pairwise(rows))


def test_the_embedded_arrivals_are_no_rows_of_the_real_file():
    """Not the same requests in a row: single pairs of lengths meet by chance, three in order do not."""
    real, ours = ([(r.context_tokens, r.generated_tokens) for r in AzureArrivals(p)]
                  for p in (require("azure"), EMBEDDED))
    runs = set(zip(real, real[1:], real[2:], strict=False))
    assert not runs & set(zip(ours, ours[1:], ours[2:], strict=False))


def test_the_real_file():
    rows = list(AzureArrivals(require("azure")))
    assert len(rows) == 19_366
    assert max(r.context_tokens for r in rows) == 14_050
    assert sorted(r.context_tokens for r in rows)[len(rows) // 2] == 1_020
