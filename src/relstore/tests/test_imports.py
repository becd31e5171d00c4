"""No test module is imported by another one: what several need is in support."""
import re
import unittest
from pathlib import Path

TESTS = Path(__file__).parent


class Imports(unittest.TestCase):

    def test_no_test_module_is_imported(self):
        found = [path.name for path in TESTS.rglob('*.py')
                 if re.search(r'\brelstore\.tests(\.| import \(?\s*)test_', path.read_text('utf-8'))]
        self.assertEqual(found, [])
