"""Operations beside or before a run: the supervisor, the plan of a dry run, the doctor."""
