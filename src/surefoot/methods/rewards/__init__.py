"""What answers score: functions of the user's own, servers, and graders of surefoot's, each score with its reason."""
