"""Group relative policy optimization and its relatives: several answers per prompt, compared with each other."""
