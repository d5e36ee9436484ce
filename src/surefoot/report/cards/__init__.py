"""Files written next to weights for their users: model cards and Modelfiles."""
