"""`surefoot evaluate commonsense`: the eight question sets, asked as published or by likelihood."""
