"""What a run shows: tables and pictures."""
