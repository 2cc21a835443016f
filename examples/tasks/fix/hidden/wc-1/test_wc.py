import unittest

from wc import count_lines


class Lines(unittest.TestCase):
    def test_a_final_newline_ends_a_line(self):
        assert count_lines("a\nb\n") == 2

    def test_the_last_line_counts_without_one(self):
        assert count_lines("a\nb") == 2

    def test_nothing_is_no_line(self):
        assert count_lines("") == 0
