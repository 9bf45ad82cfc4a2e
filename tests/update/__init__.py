"""Projects that are regenerated: other answers, a newer template, edits that stay."""
