"""What an administrator may read where something is refused."""
import unittest

from relstore.errors import ConfigurationError

# What a driver, a parser or Python would say, and an administrator should not have to read.
NOISE = ('\n', '\t', 'LINE 1', '^', 'Traceback', 'Error:', 'DETAIL', '<class', '?', '..', '.;', ' ;', ';;')


class Refusals(unittest.TestCase):

    def refusal(self, open_storage, expected=ConfigurationError):
        """Return what open_storage() says when it refuses. Keep the exception, and with it all that it holds."""
        try:
            open_storage().close()
        except expected as e:
            self.kept = e
            self.addCleanup(setattr, self, 'kept', None)
            return str(e)
        self.fail('it opened')

    def check(self, message, *words):
        """Is it one sentence, with these words in it?"""
        for noise in NOISE:
            self.assertNotIn(noise, message)
        self.assertNotRegex(message, r'\. ', 'more than one sentence')
        self.assertRegex(message, r'\A[A-Za-z].*[.]\Z')
        self.assertLess(len(message), 400, message)
        for word in words:
            self.assertIn(word, message)
