"""Refuse what cannot run before a rank starts: checks, plan, dry run, rehearsal."""
