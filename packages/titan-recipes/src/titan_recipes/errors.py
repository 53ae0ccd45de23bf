"""What goes wrong in a way that a user can understand: a message, no traceback of ours."""


class UserError(Exception):
    """Something the user can put right. The text says what was found, what was expected and what to do next."""

    exit_code = 2


class RankFailed(UserError):
    """A rank ended in an error that it has printed itself."""

    exit_code = 1
