"""Operations beside or before a run: supervisor, plan of a dry run, doctor, checks of `convert`."""
