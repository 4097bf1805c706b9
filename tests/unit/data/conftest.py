"""A folder with a tokenizer, which encoded rows are cached beside."""

import pytest
from tiny import tokenizer


@pytest.fixture
def folder(tmp_path):
    tokenizer().save_pretrained(tmp_path / "coder")
    return tmp_path
