"""What a failed step leaves behind, and how it is run again."""
