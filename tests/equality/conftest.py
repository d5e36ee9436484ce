import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a file of tests keeps its models and runs."""
    return tmp_path_factory.mktemp("models")
