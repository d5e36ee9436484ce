"""Engines hold the parameters and run the optimizer, in one process or in many, behind one interface."""

from surefoot.training.engine.base import ALL, Elements, Engine, Groups, PerGroup, of_group
from surefoot.training.engine.make import EngineChoice, make_engine
from surefoot.training.engine.replicated import SingleEngine

__all__ = ["ALL", "Elements", "Engine", "EngineChoice", "Groups", "PerGroup", "SingleEngine", "make_engine", "of_group"]
