"""expert_load.json, and what is said of experts without tokens."""

from surefoot.report.expert_load import dead_caution, load_record, load_rows

LOAD = {"1": (2, 0, 6, 0), "3": (1, 1, 1, 1), "5": (0, 0)}


def test_the_file_has_every_count_and_names_the_dead():
    assert load_record(LOAD) == {
        "tokens": {"1": [2, 0, 6, 0], "3": [1, 1, 1, 1], "5": [0, 0]},
        "dead": {"1": [1, 3], "5": [0, 1]},
    }


def test_rows_are_shares_of_what_a_layer_routed():
    assert load_rows(LOAD) == [
        ("1", "4", "0.00%", "25.00%", "75.00%", "1, 3"),
        ("3", "4", "25.00%", "25.00%", "25.00%", ""),
    ]
    assert load_rows({}) == []


def test_dead_experts_are_counted_and_a_run_without_any_is_silent():
    (said,) = dead_caution(LOAD)
    assert "4 of 10" in said
    assert dead_caution({"1": (1, 2)}) == []
