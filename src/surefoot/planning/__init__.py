"""Every choice of a run with its reason: pure functions of request, model facts and hardware facts."""
