"""The one exception that a user's mistake becomes: a message, no traceback."""


class UserError(Exception):
    """Something the user can put right. The text says what was found, what was expected and what to do next."""
