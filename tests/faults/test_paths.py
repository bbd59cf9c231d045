"""Paths and special files."""


def test_a_path_that_is_too_long_is_told(call_cli):
    call_cli("data", "check", "x" * 300).assert_refused("too long")
