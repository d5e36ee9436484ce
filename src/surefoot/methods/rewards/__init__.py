"""What answers score: functions of the user's own, servers, and graders that surefoot has, each score with its reason."""
