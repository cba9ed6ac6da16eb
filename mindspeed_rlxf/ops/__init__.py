"""Operations beside or before a run: supervisor, dry-run plan, doctor."""
