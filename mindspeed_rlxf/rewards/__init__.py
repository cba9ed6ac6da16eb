"""Scores of responses: rules, verifiers, functions of the user, servers and classifiers."""
