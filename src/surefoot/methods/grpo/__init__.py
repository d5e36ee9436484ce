"""Group relative policy optimisation and its relatives: several answers to each prompt, compared with each other."""
